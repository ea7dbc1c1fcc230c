"""NCCL communicators over the ABI fake: initialisation, failure, destruction and resources.

backends/nccl/test_conformance.py tests the enqueued operations, with new and old versions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from collective import cuda
from collective.backends.nccl.engine import NcclComm
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
)
from collective.memory.dtypes import BY_NAME
from tests.support.nccl_threads import (
    FLOAT32,
    NEW,
    OLD,
    SUM,
    Ranks,
    at,
    destroy,
    fresh,
    ranks,
    until,
    within,
)

__all__ = ["fresh", "ranks"]  # fixtures


# -- initialisation -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [NEW, OLD])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_initialise_and_reduce(
    fresh: Callable[[int], Ranks], version: int, size: int
) -> None:
    ranks = fresh(version)
    comms = ranks.create(size)
    assert [(comm.rank, comm.size) for comm in comms] == [(rank, size) for rank in range(size)]
    assert all(comm.handle for comm in comms)
    assert ranks.sums(comms) == [[size * (size + 1) / 2] * 3] * size
    destroy(ranks, comms)
    assert not any(comm.handle for comm in comms)
    assert len(ranks.fake.log("ncclCommInitRankConfig")) == size
    # A communicator that was initialised without blocking has been split into a second one.
    assert len(ranks.fake.log("ncclCommFinalize")) == 2 * size
    assert len(ranks.fake.log("ncclCommDestroy")) == 2 * size
    assert ranks.fake.log("ncclCommAbort") == []


def test_deadline_during_init_leaves_no_communicator_or_thread(ranks: Ranks) -> None:
    unique_id, before = ranks.library.unique_id(), set(threading.enumerate())
    with ranks.fake.turned("init_polls", -1):  # initialisation never completes
        for rank in range(2):
            with pytest.raises(CollectiveTimeoutError, match="the test's deadline"):
                NcclComm.create(ranks.library, unique_id, rank, 2, cuda.device(rank), within(0.05))
    assert len(ranks.fake.log("ncclCommAbort")) == 2
    assert set(threading.enumerate()) <= before


def test_two_ranks_on_one_gpu_raise_error_with_remedy(ranks: Ranks) -> None:
    unique_id = ranks.library.unique_id()

    def one(rank: int) -> str:
        with pytest.raises(BackendError) as caught:
            NcclComm.create(ranks.library, unique_id, rank, 2, cuda.device(0), within())
        assert caught.value.code == 5
        return str(caught.value)

    for text in ranks.run(2, one):
        assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device" in text
        assert "COLLECTIVE_DEVICE or CUDA_VISIBLE_DEVICES" in text
    assert len(ranks.fake.log("ncclCommAbort")) == 2


def test_init_error_contains_nccl_text(ranks: Ranks) -> None:
    with (
        ranks.fake.turned("init_error", 2),
        pytest.raises(BackendError, match=r"of rank 0: unhandled system error.*NCCL_DEBUG=INFO"),
    ):
        NcclComm.create(ranks.library, ranks.library.unique_id(), 0, 1, cuda.device(0), within())


def test_calls_block_after_nonblocking_init(ranks: Ranks) -> None:
    comms = ranks.create(2)
    assert all("blocking=0" in line for line in ranks.fake.log("ncclCommInitRankConfig"))
    x = np.ones(1, np.float32)

    def one(rank: int) -> None:
        comms[rank].all_reduce(at(x), at(x), 0, FLOAT32, SUM, ranks.stream(rank))

    ranks.run(2, one)  # would raise if a call stayed in progress when the ranks connect
    destroy(ranks, comms)


def test_abandoned_split_aborts_both_communicators(ranks: Ranks) -> None:
    unique_id = ranks.library.unique_id()

    def poll() -> None:
        if ranks.fake.log("ncclCommSplit"):
            raise CollectiveTimeoutError("rank 1 is not there")

    def one(rank: int) -> None:
        if rank == 1:  # rank 1 never calls split
            comm = NcclComm(ranks.library, 1, 2, cuda.device(1))
            comm._initialise(unique_id, within())
            comm.abort()
            return
        with pytest.raises(CollectiveTimeoutError, match="rank 1 is not there"):
            NcclComm.create(ranks.library, unique_id, 0, 2, cuda.device(0), poll)

    ranks.run(2, one)
    assert len(ranks.fake.log("ncclCommAbort")) == 2


# -- destruction and abort ----------------------------------------------------------------------


def test_async_error_reports_error_of_another_rank(ranks: Ranks) -> None:
    comms = ranks.create(2)
    ranks.sums(comms)  # the ranks are connected now, so the next calls do not block
    ranks.fake.clear_log()
    assert [comm.async_error() for comm in comms] == [None, None]
    x = np.ones(3, np.float32)
    with ranks.fake.turned("fault_rank", 0, -1), ranks.fake.turned("remote_error_at", 1):
        for rank, comm in enumerate(comms):
            comm.all_reduce(at(x), at(x), 3, FLOAT32, SUM, ranks.stream(rank))
        text = until(comms[0].async_error)
    with comms[0]._lock:  # as a call inside NCCL holds the lock
        assert ranks.run(1, lambda _: comms[0].async_error(wait=False)) == [None]
    assert comms[0].async_error(wait=False) == text
    assert "rank 0 of NCCL's communicator: remote process exited" in text
    assert "ncclRemoteError, 6" in text
    comms[0].destroy(within())  # a broken communicator is aborted instead of destroyed
    comms[1].abort()
    assert ranks.fake.log("ncclCommDestroy") == []
    assert len(ranks.fake.log("ncclCommAbort")) == 2
    assert [comm.async_error() for comm in comms] == [None, None]


def test_abort_frees_once_from_any_thread(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    ranks.fake.clear_log()
    ranks.run(4, lambda rank: comm.abort())
    comm.abort()
    comm.destroy(within())
    assert len(ranks.fake.log("ncclCommAbort")) == 1
    assert ranks.fake.log("ncclCommDestroy") == []


def test_abort_wakes_blocking_call(ranks: Ranks) -> None:
    comms = ranks.create(2)
    x = np.ones(1, np.float32)

    def call(rank: int) -> None:
        if rank == 1:
            until(lambda: ranks.fake.log("ncclSend") or None)
            comms[0].abort()
            return
        with pytest.raises((CommunicatorAbortedError, BackendError)):
            comms[0].send(at(x), 1, FLOAT32, 1, ranks.stream(0))

    ranks.run(2, call)
    comms[1].abort()
    assert len(ranks.fake.log("ncclCommAbort")) == 2


def test_destroy_past_deadline_aborts(ranks: Ranks) -> None:
    unique_id = ranks.library.unique_id()
    # These communicators do not block.
    comms = [NcclComm(ranks.library, rank, 2, cuda.device(rank)) for rank in range(2)]
    ranks.run(2, lambda rank: comms[rank]._initialise(unique_id, within()))
    x = np.ones(1, np.float32)
    # The peer never joins, so the enqueued operation does not end.
    comms[0].all_reduce(at(x), at(x), 1, FLOAT32, SUM, ranks.stream(0))
    with pytest.raises(CollectiveTimeoutError):
        comms[0].destroy(within(0.05))
    assert comms[0].handle == 0
    assert len(ranks.fake.log("ncclCommAbort")) == 1
    comms[1].abort()


# -- operators, groups and memory ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_premultiplied_sum_scales_and_is_destroyed(ranks: Ranks, dtype: str) -> None:
    kind = BY_NAME[dtype]
    code = ranks.library.dtype(kind)
    assert code is not None
    comms = ranks.create(2)
    one = np.array([0x3F80], np.uint16) if dtype == "bfloat16" else np.ones(1, kind.storage)
    out = [one.copy() for _ in comms]

    def reduce(rank: int) -> None:
        op = comms[rank].premul_sum(0.375, kind)
        assert comms[rank].premul_sum(0.375, kind) == op
        stream = ranks.stream(rank)
        comms[rank].all_reduce(at(out[rank]), at(out[rank]), 1, code, op, stream)
        ranks.wait(stream, rank)

    ranks.run(2, reduce)
    wanted = np.array([0x3F40], np.uint16) if dtype == "bfloat16" else 0.75
    assert [array.tolist() for array in out] == [np.broadcast_to(wanted, 1).tolist()] * 2
    assert len(ranks.fake.log("ncclRedOpCreatePreMulSum")) == 2
    destroy(ranks, comms)
    assert len(ranks.fake.log("ncclRedOpDestroy")) == 2


def test_premultiplied_sums_by_both_zeros_are_two_operators(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    zero, minus_zero = (comm.premul_sum(factor, BY_NAME["float32"]) for factor in (0.0, -0.0))
    assert zero != minus_zero
    comm.destroy(within())


def test_premultiplied_operators_are_bounded(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    for number in range(200):
        comm.premul_sum(number, BY_NAME["float32"])
    assert len(ranks.fake.log("ncclRedOpDestroy")) == 200 - 60
    comm.destroy(within())


def test_group_ends_when_its_body_raises(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    with pytest.raises(ZeroDivisionError), comm.group():
        raise ZeroDivisionError
    starts, ends = (len(ranks.fake.log(name)) for name in ("ncclGroupStart", "ncclGroupEnd"))
    assert starts == ends == 1
    assert ranks.sums([comm]) == [[1.0] * 3]


def test_invalid_call_in_group_is_raised_once(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    refused = pytest.raises(BackendError, match="ncclAllReduce of rank 0: invalid argument")
    with refused, comm.group():
        comm.all_reduce(0, 0, 3, FLOAT32, SUM, 0)
    assert ranks.sums([comm]) == [[1.0] * 3]


def test_nccl_memory_is_registered_and_freed(ranks: Ranks) -> None:
    comms = ranks.create(2)

    def one(rank: int) -> None:
        comm = comms[rank]
        address = comm.mem_alloc(8192)
        assert cuda.owner_of(address) == rank
        handle = comm.register(address, 8192)
        comm.deregister(handle)
        window = comm.window(address, 8192, within())
        assert window
        comm.close_window(window)
        comm.destroy(within())
        comm.close_window(window)  # the window is already closed
        comm.mem_free(address)

    ranks.run(2, one)
    assert len(ranks.fake.log("ncclMemFree")) == 2
