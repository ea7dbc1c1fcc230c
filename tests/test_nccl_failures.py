"""The ``nccl`` transport over the ABI fake, when things go wrong.

Peers that die, abort or do not come, as a program hears of them: test_nccl_conformance.py and
test_nccl_bad_input.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("fakes")

from fakes import Fake
from nccl_callers import FAR, Caller, FakeNccl, Run, needs_compiler, pools, read, side_by_side

from collective import ops
from collective.backends.nccl import NcclBackend
from collective.contract.failure import Failure
from collective.contract.world import World
from collective.errors import (
    AllocationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    MismatchError,
    PeerLostError,
)
from collective.request import Request
from collective.start.memory_store import MemoryStore

pytestmark = needs_compiler

SUM = ops.as_op("sum")
# What is promised, and what a busy machine may add to it.
PROMISED_S, NOISE_S = 3.0, 15.0


@pytest.fixture(scope="module")
def nccl() -> Iterator[Run]:
    yield from pools(FakeNccl)


def adds(caller: Caller, timeout: float = FAR, x: Any = None) -> Any:
    # To make one waits for the stream.
    x = x or caller.buffer(np.ones(4))
    caller.call("all_reduce", x, x, op=SUM, timeout=timeout)
    return x


def error_of(function: Any) -> BaseException:
    """Return what a function raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  the test looks at it
        function()
    return caught.value


def broken(caller: Caller, within: float = PROMISED_S + NOISE_S) -> BaseException:
    """Wait until the transport is broken; return what a call raises then."""
    end = time.monotonic() + within
    while caller.backend.channel.failure is None:
        assert time.monotonic() < end, "it did not break"
        time.sleep(0.005)
    return error_of(lambda: adds(caller))


# -- deadlines --------------------------------------------------------------------------


def absent(comm: Any) -> str:
    caller = Caller(comm)
    adds(caller)
    caller.finish()
    caller.backend.plan(Request("barrier"))(None, None, FAR)
    if caller.rank == 1:
        return str(broken(caller))
    # The program is ahead of the GPU: the calls return, and the first of them never ends.
    x = caller.buffer(np.ones(4))
    for _ in range(20):
        adds(caller, 1.0, x)
    error = error_of(lambda: caller.finish(timeout=FAR))
    if isinstance(error, CollectiveTimeoutError):
        assert error.ranks == (1,)
    later = error_of(lambda: adds(caller))
    assert isinstance(later, (CollectiveTimeoutError, CommunicatorAbortedError))
    # The kernel that waited has ended, and the stream goes on.
    caller.stream.synchronize()
    return str(error)


def test_a_deadline_names_who_has_not_come(nccl: Run) -> None:
    for text in nccl(3, absent):
        assert "waited 1 s for rank 1: rank 1 last did its call 1, all_reduce(float64[4]" in text


def other_lengths(comm: Any) -> str:
    caller = Caller(comm)
    x = caller.buffer(np.ones(3 + caller.rank))
    if caller.rank == 0:
        return str(error_of(lambda: caller.backend.send(x, 1, 0, FAR)))
    return str(error_of(lambda: caller.backend.recv(x, 0, 0, FAR)))


def test_a_message_of_another_length(nccl: Run) -> None:
    for text in nccl(2, other_lengths):
        assert "rank 0 sends 24 bytes and rank 1 has asked for 32" in text


# -- calls that differ --------------------------------------------------------------------


def different(comm: Any) -> str:
    caller = Caller(comm)
    for _ in range(12):
        adds(caller)
    caller.finish()
    x = caller.buffer(np.ones(4))
    if caller.rank == 0:
        caller.call("broadcast", x, x, root=0)
    # Both run ahead, until they hear of it: in the call that differs, or in one after it.
    with contextlib.suppress(MismatchError, CommunicatorAbortedError):
        for _ in range(12):
            adds(caller, x=x)
    return str(broken(caller))


def test_different_calls_are_told_apart_after_they_have_returned(nccl: Run) -> None:
    for text in nccl(2, different):
        assert re.search(
            r"made different calls \(their call 13\):\s+rank 0: broadcast\(root=0\).*"
            r"\s+rank 1: all_reduce\(float64\[4\], op=sum\)", text
        ), text  # fmt: skip


def mixed(comm: Any) -> str:
    """One has its array on the GPU and the other in the host's memory."""
    caller = Caller(comm)
    adds(caller)
    if caller.rank == 0:
        adds(caller, timeout=1.0)
        return str(broken(caller))
    return str(error_of(lambda: caller.backend.plan(Request("barrier"))(None, None, 5.0)))


def test_a_gpu_waits_for_a_rank_that_is_elsewhere(nccl: Run) -> None:
    for text in nccl(2, mixed):
        assert "waited 1 s for rank 1" in text


# -- peers that go ------------------------------------------------------------------------


def leaves(comm: Any) -> str:
    caller = Caller(comm)
    adds(caller)
    caller.finish()
    if caller.rank == 1:
        caller.backend.close()
        return "left"
    error = error_of(lambda: (adds(caller), caller.finish()))
    assert isinstance(error, PeerLostError), error
    return str(error)


def test_a_peer_that_left(nccl: Run) -> None:
    texts = nccl(3, leaves)
    assert all("rank 1 has closed its communicator" in texts[rank] for rank in (0, 2))


def leaves_in_time(comm: Any) -> None:
    """Who has done its part may go: the others' calls end well."""
    caller = Caller(comm)
    if caller.rank == 0:
        x = caller.buffer(np.full(3, 7))
        caller.call("broadcast", x, x, root=0)
        caller.backend.close()
    else:
        x = caller.buffer(np.zeros(3, np.int64))
        caller.call("broadcast", x, x, root=0)
        assert read(x).tolist() == [7] * 3


def test_close_waits_for_what_is_under_way(nccl: Run) -> None:
    nccl(2, leaves_in_time)


def closes_alone(comm: Any) -> float:
    caller = Caller(comm)
    adds(caller)
    caller.finish()
    caller.backend.plan(Request("barrier"))(None, None, FAR)
    since = time.monotonic()
    if caller.rank == 0:
        adds(caller)  # to which nobody comes
        caller.backend.close()
        caller.stream.synchronize()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if "nccl" in name], names
    return time.monotonic() - since


def test_close_with_work_that_nobody_joins(nccl: Run) -> None:
    assert max(nccl(2, closes_alone)) < 2.0 + PROMISED_S + NOISE_S


# -- aborts and errors --------------------------------------------------------------------


def host_times_out(comm: Any) -> str:
    """What breaks the host plane breaks NCCL's, also for ranks that are only in that."""
    caller = Caller(comm)
    adds(caller)
    caller.finish()
    if caller.rank == 0:
        error = error_of(lambda: caller.backend.plan(Request("barrier"))(None, None, 0.5))
        assert isinstance(error, CollectiveTimeoutError)
        return str(error_of(lambda: adds(caller)))
    return str(broken(caller))


def test_a_failure_of_the_host_plane_breaks_both(nccl: Run) -> None:
    for text in nccl(3, host_times_out):
        assert "waited 0.5 s" in text


def not_enough(comm: Any) -> str:
    caller = Caller(comm)
    adds(caller)
    caller.finish()
    if caller.rank == 1:
        Fake().knob("alloc_fail_at", 1)
    error = error_of(lambda: caller.backend.empty_device(1 << 20, Request("empty"), FAR))
    assert isinstance(error, AllocationError), error
    adds(caller)  # it stays usable
    caller.finish()
    return str(error)


def test_no_memory_on_one_rank(nccl: Run) -> None:
    for text in nccl(3, not_enough):
        assert "there is not enough on that of rank 1" in text


# -- what the ranks bring -------------------------------------------------------------------


class SharedGpu(FakeNccl):
    """Two ranks with one GPU, where NCCL is told that they are on different hosts."""

    options: ClassVar[dict[str, str]] = {"device": "0"}

    @classmethod
    def connect(cls, world: World, timeout: float) -> NcclBackend:
        os.environ["NCCL_HOSTID"] = f"host{world.rank}"
        return super().connect(world, timeout)


class NoDriver(FakeNccl):
    """Rank 0 has no GPU."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> NcclBackend:
        made = super().connect(world, timeout)
        if world.rank == 0:
            os.environ["COLLECTIVE_CUDA_LIBRARY"] = "/nowhere/libcuda.so.1"
        return made


class Version27(FakeNccl):
    version = 2708


class Version210(FakeNccl):
    version = 21003


class Version219(FakeNccl):
    version = 21903


class Version227(FakeNccl):
    version = 22703


def cannot(comm: Any) -> str:
    """Make a call that is refused on every rank, and another on the host."""
    backend = comm._backend
    # Whoever has no GPU has no array on one either; all ranks are in the call all the same.
    texts = set()
    for _ in range(2):
        error = error_of(lambda: backend._open("all_reduce()", FAR))
        assert isinstance(error, BackendUnavailableError), error
        texts.add(str(error))
    assert len(texts) == 1
    backend.plan(Request("barrier"))(None, None, FAR)
    return texts.pop()


# What else does not go together: test_nccl_bad_input.py::test_what_the_ranks_cannot_do_together.
def test_a_rank_without_a_driver_is_named_everywhere() -> None:
    for run in pools(NoDriver):
        for refusal in run(2, cannot):
            assert re.search(r"all_reduce\(\): rank 0: cuda: .*/nowhere/libcuda", refusal), refusal


def works(comm: Any) -> None:
    caller = Caller(comm)
    x = adds(caller)
    assert read(x).tolist() == [caller.size] * 4
    got = caller.empty(4, "float64")
    peer = 1 - caller.rank
    caller.backend.sendrecv(caller.buffer(np.full(4, 1.0 * caller.rank)), peer, got, peer, 0, FAR)
    assert read(got).tolist() == [peer] * 4
    dst = caller.empty(5, "float64")
    caller.call(
        "all_gather", caller.buffer(np.arange(3.0) if caller.rank else np.ones(2)), dst,
        elements=[2, 3],
    )  # fmt: skip
    assert read(dst).tolist() == [1, 1, 0, 1, 2]
    array = caller.backend.empty_device(100, Request("empty"), FAR)
    assert array.nbytes == 100
    assert caller.backend.supports("all_reduce", ops.as_op("avg"), x.dtype, False)


@pytest.mark.parametrize("transport", [SharedGpu, Version27, Version210, Version219, Version227])
def test_versions_and_arrangements_that_work(transport: type[FakeNccl]) -> None:
    for run in pools(transport):
        run(2, works if transport.version >= 21003 else without_avg)


def without_avg(comm: Any) -> None:
    caller = Caller(comm)
    x = adds(caller)
    assert read(x).tolist() == [caller.size] * 4
    assert not caller.backend.supports("all_reduce", ops.as_op("avg"), x.dtype, False)
    assert not caller.backend.supports("all_reduce", ops.premul_sum(2.0), x.dtype, False)
    got = caller.empty(2, "int64")
    peer = 1 - caller.rank
    caller.backend.sendrecv(caller.buffer(np.full(2, caller.rank)), peer, got, peer, 0, FAR)
    assert read(got).tolist() == [peer] * 2


def old_and_late(comm: Any) -> str:
    caller = Caller(comm)
    adds(caller)
    caller.finish()
    if caller.rank == 1:
        return str(broken(caller))
    adds(caller, timeout=1.0)
    return str(broken(caller))


def test_a_deadline_in_a_version_that_blocks() -> None:
    for run in pools(Version27):
        for text in run(2, old_and_late):
            assert "waited 1 s for rank 1" in text


# -- ranks that are threads -----------------------------------------------------------------


def as_threads(comm: Any) -> None:
    """Be three ranks in one process, with a GPU each."""
    job, store = f"threads-{os.getpid()}-{time.monotonic_ns()}", MemoryStore()

    def world(rank: int) -> World:
        options = {"host": "threads", "device": str(rank)}
        return World(rank, 3, rank, 3, "here", "none", job, store=store, options=options)

    received = threading.Barrier(3)  # the failure must not come between the others' messages

    def rank_of(rank: int) -> None:
        backend = NcclBackend.connect(world(rank), FAR)
        caller = Caller(backend)
        assert caller.device.ordinal == rank
        assert backend.capabilities.in_process
        x = adds(caller)
        assert read(x).tolist() == [3] * 4
        got = caller.empty(2, "int64")
        to, source = (rank + 1) % 3, (rank - 1) % 3
        backend.sendrecv(caller.buffer(np.full(2, rank)), to, got, source, 0, FAR)
        assert read(got).tolist() == [source] * 2
        received.wait(60)
        if rank == 2:
            backend.abort(Failure("failed", 2, "no good\n"))
        assert "no good" in str(broken(caller))
        backend.close()

    side_by_side(*(lambda rank=rank: rank_of(rank) for rank in range(3)))
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "nccl" in name], names


def test_ranks_that_are_threads(nccl: Run) -> None:
    nccl(1, as_threads)


def dropped(comm: Any) -> None:
    """A transport that is not closed leaves no thread."""
    job = f"dropped-{os.getpid()}-{time.monotonic_ns()}"
    options = {"host": "threads"}
    world = World(0, 1, 0, 1, "here", "none", job, store=MemoryStore(), options=options)
    backend = NcclBackend.connect(world, FAR)
    adds(Caller(backend))
    del backend
    import gc

    gc.collect()
    watching = [each for each in threading.enumerate() if "nccl" in each.name]
    for thread in watching:  # one that is ending may have been seen
        thread.join(10)
    assert not [thread.name for thread in watching if thread.is_alive()]


def test_a_transport_that_is_dropped(nccl: Run) -> None:
    nccl(1, dropped)
