"""The ABI fake's communicators: initialisation, split and end."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess

import numpy as np
import pytest

from tests import fakes
from tests.fakes import compiler, library_path
from tests.fakes.raw import (
    IN_PROGRESS,
    INVALID_ARGUMENT,
    INVALID_USAGE,
    MAX,
    SUCCESS,
    SUM,
    SYSTEM_ERROR,
    Config,
    Nccl,
    NcclError,
    Rank,
    UniqueId,
    in_processes,
    in_threads,
)
from tests.support.nccl_raw import FLOAT64, INT32, leftovers, nccl, number, sums

__all__ = ["nccl"]  # a fixture

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

# Init


def test_ranks_of_single_thread_initialise_in_group(nccl):
    identity = nccl.unique_id()
    ranks = [Rank(nccl, identity, r, 2, r) for r in range(2)]
    comms = [ctypes.c_void_p() for _ in ranks]
    with nccl.group():
        for rank, comm in zip(ranks, comms):
            unique = UniqueId.from_buffer_copy(identity)
            with nccl.active(rank.device):
                nccl.call("CommInitRank", comm, 2, unique, rank.rank)
    assert [nccl.state(c) for c in comms] == [SUCCESS] * 2


def test_nonblocking_init_is_in_progress_until_all_ranks_joined(nccl):
    identity = nccl.unique_id()
    ranks = [Rank(nccl, identity, r, 2, r) for r in range(2)]
    first = ranks[0].init(blocking=False)
    assert nccl.state(first.comm) == IN_PROGRESS
    with pytest.raises(NcclError, match="before the previous operation") as caught:
        number(nccl, "CommCount", first.comm)
    assert caught.value.code == INVALID_ARGUMENT
    ranks[1].init(blocking=False)
    assert [r.poll() for r in ranks] == [SUCCESS] * 2
    nccl.call("CommFinalize", ranks[0].comm)
    assert ranks[0].poll() == SUCCESS
    for rank in ranks:
        rank.destroy()


def test_endless_init_is_abortable(nccl):
    nccl.knob("init_polls", 5)
    rank = Rank(nccl, nccl.unique_id(), 0, 1, 0).init(blocking=False)
    assert [nccl.state(rank.comm) for _ in range(4)] == [IN_PROGRESS] * 4
    assert rank.poll() == SUCCESS
    rank.destroy()
    nccl.knob("init_polls", -1)
    rank = Rank(nccl, nccl.unique_id(), 0, 1, 0).init(blocking=False)
    assert [nccl.state(rank.comm) for _ in range(20)] == [IN_PROGRESS] * 20
    rank.abort()
    alone = Rank(nccl, nccl.unique_id(), 0, 2, 0).init(blocking=False)
    alone.abort()
    assert not leftovers()
    with pytest.raises(NcclError, match="destroyed or unknown"):
        nccl.state(rank.comm)


def test_init_fails_by_knob_and_with_invalid_arguments(nccl):
    nccl.knob("init_error", SYSTEM_ERROR)
    with pytest.raises(NcclError, match="FAKE_INIT_ERROR") as caught:
        Rank(nccl, nccl.unique_id(), 0, 1, 0).init()
    assert caught.value.code == SYSTEM_ERROR
    rank = Rank(nccl, nccl.unique_id(), 0, 1, 0).init(blocking=False)
    assert rank.poll() == SYSTEM_ERROR
    rank.abort()
    nccl.knob("init_error", 0)
    with pytest.raises(NcclError, match="Invalid rank"):
        Rank(nccl, nccl.unique_id(), 2, 2, 0).init()
    with pytest.raises(NcclError, match="not a unique id"):
        Rank(nccl, bytes(128), 0, 1, 0).init()
    comm, config = ctypes.c_void_p(), Config.of(blocking=True)
    config.magic = 1
    unique = UniqueId.from_buffer_copy(nccl.unique_id())
    with pytest.raises(NcclError, match="NCCL_CONFIG_INITIALIZER"):
        nccl.call("CommInitRankConfig", comm, 1, unique, 0, config)


def on_device_0(rank):
    rank.device = 0
    if rank.nccl.library.fake_knob(b"MULTI_RANK_GPU", 0):
        raise AssertionError
    with pytest.raises(NcclError) as caught:
        rank.init()
    return caught.value.code, caught.value.text


def as_another_host(rank):
    os.environ["NCCL_HOSTID"] = f"host{rank.rank}"
    rank.device = 0
    rank.stream = rank.nccl.stream(0)
    return sums(rank.init())


def test_two_ranks_on_single_gpu_are_refused_unless_allowed(nccl):
    for code, text in in_threads(2, on_device_0, init=False):
        assert code == INVALID_USAGE
        assert "Duplicate GPU detected : rank 0 and rank 1" in text
    nccl.knob("multi_rank_gpu", 1)

    def allowed(rank):
        rank.device, rank.stream = 0, rank.nccl.stream(0)
        return sums(rank.init())

    assert in_threads(2, allowed, init=False) == [3.0] * 2
    assert in_processes(2, as_another_host, init=False) == [3.0] * 2


# Communicators from communicators


def split_and_use(rank):
    """Split into odd and even ranks, in reversed order; rank 4, if there is one, stays out."""
    nccl, child = rank.nccl, ctypes.c_void_p()
    color = -1 if rank.rank == 4 else rank.rank % 2
    nccl.call("CommSplit", rank.comm, color, -rank.rank, child, None)
    assert sums(rank) == 10.0 if rank.size == 4 else True
    if child.value is None:
        return None
    place = number(nccl, "CommUserRank", child), number(nccl, "CommCount", child)
    return *place, sums(rank, comm=child.value)


def test_split_orders_ranks_by_key(nccl):
    expected = [(1, 2, 4.0), (1, 2, 6.0), (0, 2, 4.0), (0, 2, 6.0)]
    assert in_threads(4, split_and_use) == expected
    assert not leftovers()


def test_nonblocking_split_is_polled_on_parent(nccl):
    identity = nccl.unique_id()
    ranks = [Rank(nccl, identity, r, 2, r).init(blocking=False) for r in range(2)]
    assert [r.poll() for r in ranks] == [SUCCESS] * 2
    children = [ctypes.c_void_p() for _ in ranks]
    nccl.call("CommSplit", ranks[0].comm, 0, 0, children[0], None)
    assert nccl.state(ranks[0].comm) == IN_PROGRESS
    assert children[0].value is None
    nccl.call("CommSplit", ranks[1].comm, 0, 0, children[1], None)
    assert [r.poll() for r in ranks] == [SUCCESS] * 2
    assert [number(nccl, "CommUserRank", m) for m in children] == [0, 1]


# Memory, registration, windows


def refuses_other_memory(rank, memory):
    nccl, none, handle = rank.nccl, ctypes.c_void_p(), ctypes.c_void_p()
    with pytest.raises(NcclError, match="aligned"):
        nccl.call("CommWindowRegister", rank.comm, memory.value + 8, 8, none, 0)
    nccl.call("CommRegister", rank.comm, memory, 8192, handle)
    nccl.call("CommDeregister", rank.comm, handle)
    with pytest.raises(NcclError, match="unknown handle"):
        nccl.call("CommDeregister", rank.comm, handle)
    with pytest.raises(NcclError, match="not of ncclMemAlloc"):
        nccl.call("MemFree", rank.empty(16, "u1").address)


def test_windows_need_nccl_memory():
    def work(rank):
        nccl, memory = rank.nccl, ctypes.c_void_p()
        with nccl.active(rank.device):
            nccl.call("MemAlloc", memory, 8192)
        window, none = ctypes.c_void_p(), ctypes.c_void_p()
        nccl.call("CommWindowRegister", rank.comm, memory, 8192, window, 1)
        plain = rank.empty(4096, "u1")
        at = plain.address + -plain.address % 4096
        if at == plain.address:
            nccl.call("CommWindowRegister", rank.comm, at, 16, none, 0)
        else:
            nccl.call("CommWindowRegister", rank.comm, memory, 16, none, 0)
        # Only one rank, because all threads share the text of the last error, as in NCCL.
        if rank.rank == 0:
            refuses_other_memory(rank, memory)
        nccl.call("CommWindowDeregister", rank.comm, window)
        nccl.call("MemFree", memory)
        if rank.rank == 0:
            with pytest.raises(NcclError, match="not of ncclMemAlloc"):
                nccl.call("MemFree", memory)
        return bool(window.value)

    assert in_threads(2, work) == [True, True]


# Versions


SINCE = {
    2403: "ncclCommAbort",
    2703: "ncclSend",
    21104: "ncclRedOpCreatePreMulSum",
    21304: "ncclGetLastError",
    21403: "ncclCommFinalize",
    21801: "ncclCommSplit",
    21901: "ncclMemAlloc",
    22703: "ncclCommWindowRegister",
    22803: "ncclAlltoAll",
}


@pytest.mark.parametrize("version", [2708, 21403, 22907])
def test_version_has_functions_of_its_release(version):
    library = ctypes.CDLL(library_path(version))
    version_code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version_code))
    assert version_code.value == version
    present = {name: hasattr(library, name) for name in SINCE.values()}
    assert present == {name: version >= since for since, name in SINCE.items()}


@pytest.mark.whole
@pytest.mark.parametrize("version", [2306, 21003, 21304, 21801, 21903, 22203, 22703])
def test_versions_in_between_compile(version):
    folder = pathlib.Path(fakes.__file__).parent
    command = [*compiler(), "-std=c11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    sources = map(str, folder.glob("*.c"))
    subprocess.run([*command, f"-DNCCL_FAKE_VERSION={version}", *sources], check=True)


def test_old_version_lacks_bfloat16_and_avg():
    nccl = Nccl(2708)
    nccl.context(0)
    comm = ctypes.c_void_p()
    code = nccl.library.ncclCommInitRank(
        ctypes.byref(comm), 1, UniqueId.from_buffer_copy(nccl.unique_id()), 0
    )
    assert code == SUCCESS
    memory = ctypes.c_uint64()
    with nccl.active(0):
        nccl.cuda("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(64))
    reduce_all = nccl.library.ncclAllReduce
    stream = nccl.stream(0)
    codes = [
        reduce_all(memory.value, memory.value, 4, dtype, op, comm, stream)
        for dtype, op in ((INT32, SUM), (INT32, 4), (9, SUM), (10, SUM))
    ]
    assert codes == [SUCCESS] + [INVALID_ARGUMENT] * 3
    nccl.synchronize(stream)


# The log


def test_log_lists_calls_in_order(nccl):
    rank = Rank(nccl, nccl.unique_id(), 0, 1, 0).init()
    array = rank.array(np.ones(4))
    nccl.clear_log()
    with nccl.group():
        rank.call("AllReduce", array, array, 4, FLOAT64, MAX)
    names = [line.split("(")[0] for line in nccl.log("nccl")]
    assert names == ["ncclGroupStart", "ncclAllReduce", "ncclGroupEnd"]
    expected = (
        f"sendbuff={array.address:#x}, recvbuff={array.address:#x}, count=4, datatype=8, op=2"
    )
    assert expected in nccl.log("ncclAllReduce")[0]
    assert f"stream={rank.stream:#x}" in nccl.log("ncclAllReduce")[0]
    rank.destroy()
