"""The ``nccl`` transport over the ABI fake: cases that test_conformance.py does not cover."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("tests.fakes")

from collective import cuda, ops
from collective.backends.nccl import NcclBackend
from collective.contract.backend import ANY_SOURCE
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    AllocationError,
    BackendUnavailableError,
    CollectiveTimeoutError,
    UnsupportedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import from_numpy, named
from collective.request import Request
from collective.start.stores import MemoryStore
from collective.testing import RanksFailedError
from tests.fakes import Fake, environment
from tests.support.nccl_processes import (
    FAR,
    Caller,
    FakeNccl,
    Pools,
    needs_compiler,
    pools,
    read,
    side_by_side,
)
from tests.support.nccl_programs import error_of, until
from tests.support.on_ranks import on_ranks

pytestmark = needs_compiler

CALL = Request("test")


nccl = pools(FakeNccl)


def numbers(rank: int, count: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Return the input of a rank: small whole numbers, which every dtype holds exactly."""
    return ((np.arange(count) * 7 + rank * 3) % 5 + 1).astype(dtype)


# -- collectives ------------------------------------------------------------------------


def adds(caller: Caller, timeout: float = FAR) -> Any:
    """Make a call that needs all ranks; return its output."""
    x = caller.buffer(np.ones(4))  # making a buffer waits for the stream
    caller.call("all_reduce", x, x, op=ops.as_op("sum"), timeout=timeout)
    return x


def connect(caller: Caller) -> None:
    """Make the communicator, so that later calls do not wait for the other ranks."""
    adds(caller)
    caller.finish()
    caller.backend.plan(Request("barrier"))(None, None, Deadline(FAR))


@pytest.mark.parametrize(
    "table",
    # In the first table all counts of rank 0 are equal; those of the other ranks are not.
    [[[2, 2, 2], [2, 0, 5], [2, 1, 0]], [[0] * 3] * 3, [[0, 3, 0], [0] * 3, [0] * 3]],
)
@on_ranks("nccl", size=3, shared=True)
def test_all_to_all_with_table_moves_pieces(comm: Any, table: list[list[int]]) -> None:
    caller = Caller(comm)
    rank, size = caller.rank, caller.size
    sends, receives = table[rank], [table[source][rank] for source in range(size)]

    def pieces(source: int) -> list[np.ndarray[Any, Any]]:
        return np.split(numbers(source, sum(table[source])), np.cumsum(table[source])[:-1])

    src, dst = caller.buffer(numbers(rank, sum(sends))), caller.empty(sum(receives), "float32")
    caller.call("all_to_all", src, dst, elements=sends, incoming=receives)
    np.testing.assert_array_equal(
        read(dst), np.concatenate([pieces(source)[rank] for source in range(size)])
    )


@on_ranks("nccl")
def test_supports_excludes_reductions_missing_in_nccl(comm: Any) -> None:
    caller = Caller(comm)
    backend, kind = caller.backend, named("float32")
    supported = [
        (op, dtype)
        for op in (*ops.NAMES,)
        for dtype in ("float32", "bfloat16", "int32", "bool", "uint16", "complex64")
        if backend.supports("all_reduce", ops.as_op(op), named(dtype), False)
    ]
    assert supported == [
        (op, dtype)
        for op in ("sum", "prod", "min", "max", "avg")
        for dtype in ("float32", "bfloat16", "int32")
    ]
    assert not backend.supports("all_reduce", ops.as_op("sum"), kind, True)
    assert not backend.supports("scan", ops.as_op("sum"), kind, False)
    assert not backend.supports("reduce", ops.user_op(max), kind, False)
    assert backend.supports("reduce", ops.premul_sum(2.0), kind, False)
    assert not backend.supports("reduce", ops.premul_sum(2.0), named("complex64"), False)
    x = caller.buffer(np.ones(3, np.float32))
    for call in (
        lambda: caller.call("all_reduce", x, x, op=ops.as_op("band")),
        lambda: caller.call("scan", x, x, op=ops.as_op("sum")),
    ):
        with pytest.raises(UnsupportedError, match="host's memory"):
            call()


@on_ranks("nccl", size=3, shared=True)
def test_batch_runs_all_its_calls(comm: Any) -> None:
    caller = Caller(comm)
    size, op = caller.size, ops.as_op("sum")
    buffers = [caller.buffer(numbers(caller.rank, n)) for n in (5, 1, 300)]
    with caller.backend.batch():
        for buffer in buffers:
            caller.call("all_reduce", buffer, buffer, op=op)
        caller.call("broadcast", buffers[1], buffers[1], root=size - 1)
    for buffer, n in zip(buffers[::2], (5, 300)):
        np.testing.assert_array_equal(read(buffer), sum(numbers(r, n) for r in range(size)))
    with caller.backend.batch():
        pass


# -- the host plane ---------------------------------------------------------------------


class NoGpu(FakeNccl):
    """Transport on ranks where neither CUDA nor NCCL can be loaded."""

    options: ClassVar[dict[str, str]] = {"devices": "cpu, cuda"}

    @classmethod
    def connect(cls, world: Any, deadline: Deadline) -> Any:
        import os

        backend = super().connect(world, deadline)
        os.environ["COLLECTIVE_CUDA_LIBRARY"] = os.environ["COLLECTIVE_NCCL_LIBRARY"] = "/none"
        return backend


def on_host(comm: Any) -> None:
    backend, size, rank = comm.inner.transport, comm.size, comm.rank
    x = Buffer(numbers(rank, 9), from_numpy(np.dtype("float32")))
    total = Buffer.empty(9, x.dtype)
    like = {"dtype": x.dtype, "shape": (9,), "op": ops.as_op("sum")}
    backend.plan(Request("all_reduce", ordered=True, **like))(x, total, Deadline(FAR))
    np.testing.assert_array_equal(total.array, sum(numbers(r, 9) for r in range(size)))
    backend.plan(Request("scan", **like))(x, total, Deadline(FAR))
    backend.plan(Request("barrier"))(None, None, Deadline(FAR))
    backend.agree(CALL, Deadline(FAR))
    backend.sendrecv(x, (rank + 1) % size, total, (rank - 1) % size, 3, Deadline(FAR))
    np.testing.assert_array_equal(total.array, numbers((rank - 1) % size, 9))
    assert backend.empty(64, CALL, Deadline(FAR)).nbytes == 64
    assert comm.all_reduce(np.ones(3)).tolist() == [size] * 3
    half = comm.split(rank % 2)
    assert half.all_reduce(np.ones(1)).item() == half.size


def test_host_calls_need_no_gpu() -> None:
    with Pools(NoGpu) as run:
        run(3, on_host)


# -- messages ---------------------------------------------------------------------------


@on_ranks("nccl")
def test_tags_are_received_out_of_order(comm: Any) -> None:
    caller = Caller(comm)
    tags = [5, 0, 2**31 - 1, 7, 2**40, -9]
    sent = {tag: numbers(at, 3 + at) for at, tag in enumerate(tags)}

    def send(tag: int) -> None:
        sender = caller.on(caller.device.new_stream())
        sender.backend.send(sender.buffer(sent[tag]), 1, tag, Deadline(FAR))
        sender.finish()

    if caller.rank == 0:
        side_by_side(*(lambda tag=tag: send(tag) for tag in tags))
    else:
        for tag in reversed(tags):
            received = caller.empty(sent[tag].size, "float32")
            assert caller.backend.recv(received, 0, tag, Deadline(FAR)) == 0
            np.testing.assert_array_equal(read(received), sent[tag])


@on_ranks("nccl")
def test_sendrecv_matches_plain_calls(comm: Any) -> None:
    """An empty message goes one way, data the other way; the peer uses send and recv."""
    caller = Caller(comm)
    some, nothing = caller.buffer(np.arange(3)), caller.empty(0, "int64")
    if caller.rank == 0:
        received = caller.empty(0, "int64")
        caller.backend.sendrecv(some, 1, received, 1, 2, Deadline(FAR))
        caller.backend.sendrecv(nothing, 1, some, 1, 2, Deadline(FAR))
        assert read(some).tolist() == [7, 8, 9]
    else:
        received = caller.empty(3, "int64")
        caller.backend.recv(received, 0, 2, Deadline(FAR))
        caller.backend.send(nothing, 0, 2, Deadline(FAR))
        assert read(received).tolist() == [0, 1, 2]
        caller.backend.recv(nothing, 0, 2, Deadline(FAR))
        caller.backend.send(caller.buffer(np.arange(7, 10)), 0, 2, Deadline(FAR))


@on_ranks("nccl", size=3)
def test_messages_of_all_pairs_and_tags_arrive(comm: Any) -> None:
    """Use all pairs and several tags at once, in threads that each wait for their message."""
    caller = Caller(comm)
    rank, size, tags = caller.rank, caller.size, range(3)
    others = [peer for peer in range(size) if peer != rank]

    def content(src: int, dst: int, tag: int, turn: int) -> np.ndarray[Any, Any]:
        return np.full(10 + tag, 1000 * src + 100 * dst + 10 * tag + turn)

    def send(dst: int, tag: int) -> None:
        caller_of_thread = caller.on(caller.device.new_stream())
        for turn in range(3):
            caller_of_thread.backend.send(
                caller_of_thread.buffer(content(rank, dst, tag, turn)), dst, tag, Deadline(FAR)
            )
        caller_of_thread.finish()

    def recv(src: int, tag: int) -> None:
        caller_of_thread = caller.on(caller.device.new_stream())
        for turn in range(3):
            expected = content(src, rank, tag, turn)
            received = caller_of_thread.empty(expected.size, "int64")
            caller_of_thread.backend.recv(received, src, tag, Deadline(FAR))
            np.testing.assert_array_equal(read(received), expected)

    def exchange(peer: int, tag: int) -> None:
        caller_of_thread = caller.on(caller.device.new_stream())
        for turn in range(3):
            src, expected = (content(*pair, tag, turn) for pair in ((rank, peer), (peer, rank)))
            received = caller_of_thread.empty(expected.size, "int64")
            caller_of_thread.backend.sendrecv(
                caller_of_thread.buffer(src), peer, received, peer, tag, Deadline(FAR)
            )
            np.testing.assert_array_equal(read(received), expected)

    side_by_side(
        *(lambda p=p, t=t: send(p, t) for p in others for t in tags),
        *(lambda p=p, t=t: recv(p, t) for p in others for t in tags),
        *(lambda p=p, t=t: exchange(p, t) for p in others for t in (7, 8)),
    )


@on_ranks("nccl", size=3)
def test_any_source_recv_returns_source(comm: Any) -> None:
    caller = Caller(comm)
    if caller.rank:
        caller.backend.send(caller.buffer(np.full(2, caller.rank)), 0, 0, Deadline(FAR))
        caller.finish()
        return
    seen = []
    for _ in range(caller.size - 1):
        received = caller.empty(2, "int64")
        source = caller.backend.recv(received, ANY_SOURCE, 0, Deadline(FAR))
        assert read(received).tolist() == [source] * 2
        seen.append(source)
    assert sorted(seen) == [1, 2]


@on_ranks("nccl")
def test_receives_in_two_threads_do_not_block_each_other(comm: Any) -> None:
    """Receive a message whose stream waits for another message of the same direction.

    On rank 1 the stream of tag 1 reaches its call only when tag 2 has been received. If tag 1 were
    issued before it is ready, tag 2 would never be received.
    """
    caller = Caller(comm)
    if caller.rank == 0:
        first, second = (caller.on(caller.device.new_stream()) for _ in range(2))
        side_by_side(
            lambda: caller.backend.send(first.buffer(np.full(3, 1)), 1, 1, Deadline(FAR)),
            lambda: caller.backend.send(second.buffer(np.full(3, 2)), 1, 2, Deadline(FAR)),
        )
        return
    received = [caller.empty(3, "int64") for _ in range(2)]
    late = caller.device.new_stream()

    def second() -> None:
        time.sleep(0.05)
        caller.backend.recv(received[1], 0, 2, Deadline(FAR))
        late.wait(caller.stream.record())

    def first() -> None:
        caller_of_thread = caller.on(late)
        out = caller_of_thread.empty(3, "int64")
        caller.backend.recv(out, 0, 1, Deadline(FAR))
        assert read(out).tolist() == [1] * 3

    side_by_side(second, first)
    assert read(received[1]).tolist() == [2] * 3


# -- streams --------------------------------------------------------------------------


@on_ranks("nccl")
def test_side_streams_are_reused_and_bounded(comm: Any) -> None:
    """Calls within ``cuda.on`` use the other stream."""
    caller = Caller(comm)
    connect(caller)
    side = caller.backend.side_stream(caller.device)
    assert side is caller.backend.side_stream(caller.device)
    assert side is not caller.backend.side_stream(caller.device, "messages")
    x = caller.buffer(np.ones(10))
    caller.finish()
    fake = Fake()
    fake.clear_log()
    with cuda.on(side):
        caller.call("all_reduce", x, x, op=ops.as_op("sum"))
    assert f"{side.handle:#x}" in fake.log("ncclAllReduce")[-1]
    caller.stream.wait(side.record())
    assert read(x).tolist() == [caller.size] * 10
    # The number of side streams is bounded, for any number of tags.
    streams = [caller.backend.side_stream(caller.device, tag) for tag in range(1000)]
    assert len(caller.backend._sides) <= 128
    assert caller.backend.side_stream(caller.device, 999) is streams[-1]


@on_ranks("nccl")
def test_completed_calls_release_their_events(comm: Any) -> None:
    """Events of completed calls go back to the pool, and the watching thread sleeps."""
    caller = Caller(comm)
    connect(caller)
    x = caller.buffer(np.ones(10))
    for _ in range(100):
        caller.call("all_reduce", x, x, op=ops.as_op("sum"))
    caller.finish()
    watch = caller.backend._watch
    until(lambda: watch.asleep and not watch._new and not watch._pending)
    assert watch.unfinished() is None
    events_before = len(caller.device.events)
    for _ in range(3):
        caller.call("all_reduce", x, x, op=ops.as_op("sum"))
        caller.finish()
    assert len(caller.device.events) <= events_before + 1


# -- memory -----------------------------------------------------------------------------


@on_ranks("nccl")
def test_symmetric_memory_outlives_transport(comm: Any) -> None:
    caller = Caller(comm)
    backend = caller.backend
    array = backend.empty_device(4096 * 8, CALL, Deadline(FAR))
    assert (array.nbytes, array.dtype, array.device) == (4096 * 8, np.uint8, caller.device)
    x = Buffer(array.view(np.float64), named("float64"))
    x.array.fill_from_host(np.full(4096, caller.rank + 1.0))
    caller.call("all_reduce", x, x, op=ops.as_op("sum"))
    assert read(x)[-1] == sum(range(1, caller.size + 1))
    assert backend.empty_device(0, CALL, Deadline(FAR)).nbytes == 0
    survivor = backend.empty_device(64, CALL, Deadline(FAR))
    del array, x
    gc.collect()
    until(lambda: len(backend._blocks._out) == 1 and not backend._blocks._dropped)
    backend.close()
    # Arrays stay valid until they are dropped, and can be freed without a communicator.
    survivor.fill_from_host(np.arange(64, dtype=np.uint8))
    assert survivor.to_host()[-1] == 63
    del survivor
    gc.collect()
    assert not backend._blocks._out
    assert not backend._blocks._dropped


# -- other host planes ------------------------------------------------------------------


class OverGloo(FakeNccl):
    """Transport with gloo as its host plane, which has its own monitor."""

    options: ClassVar[dict[str, str]] = {"host": "gloo"}


def over_gloo(comm: Any) -> None:
    caller = Caller(comm)
    assert caller.backend.channel is caller.backend._plane.channel
    assert caller.backend.capabilities.across_hosts
    test_tags_are_received_out_of_order.program(comm)
    test_messages_of_all_pairs_and_tags_arrive.program(comm)
    half = Caller(caller.backend.group([1, 0], Deadline(FAR)))
    assert read(adds(half)).tolist() == [2] * 4
    half.backend.close()


def test_nccl_over_gloo_exchanges_messages() -> None:
    pytest.importorskip("torch")
    with Pools(OverGloo) as run:
        run(2, over_gloo)


# -- failures ---------------------------------------------------------------------------
# test_conformance.py and test_bad_input.py test the errors of a program whose peers die, abort or
# are missing.


def broken(caller: Caller) -> BaseException:
    """Wait until the transport is broken; return the error of a call."""
    until(lambda: caller.backend.channel.failure is not None)
    return error_of(lambda: adds(caller))


@on_ranks("nccl")
def test_message_of_another_length_raises(comm: Any) -> None:
    caller = Caller(comm)
    x = caller.buffer(np.ones(3 + caller.rank))
    call = (caller.backend.send, caller.backend.recv)[caller.rank]
    error = error_of(lambda: call(x, 1 - caller.rank, 0, Deadline(FAR)))
    assert "rank 0 sends 24 bytes, but rank 1 receives 32" in str(error)


@on_ranks("nccl")
def test_close_waits_for_running_call(comm: Any) -> None:
    """A rank that has done its part may close; the calls of the others succeed."""
    caller = Caller(comm)
    if caller.rank == 0:
        x = caller.buffer(np.full(3, 7))
        caller.call("broadcast", x, x, root=0)
        caller.backend.close()
    else:
        x = caller.buffer(np.zeros(3, np.int64))
        caller.call("broadcast", x, x, root=0)
        assert read(x).tolist() == [7] * 3


def closes_alone(comm: Any) -> float:
    caller = Caller(comm)
    connect(caller)
    since = time.monotonic()
    if caller.rank == 0:
        adds(caller)  # no other rank joins this call
        caller.backend.close()
        caller.stream.synchronize()
        names = [thread.name for thread in threading.enumerate()]
        assert not [name for name in names if "nccl" in name], names
    return time.monotonic() - since


def test_close_with_unjoined_call_returns(nccl: Pools) -> None:
    assert max(nccl(2, closes_alone)) < FAR


@on_ranks("nccl", size=3)
def test_host_failure_breaks_nccl_too(comm: Any) -> None:
    """A failure of the host plane breaks NCCL's part, also on ranks that only use NCCL."""
    caller = Caller(comm)
    connect(caller)
    if caller.rank == 0:
        error = error_of(lambda: caller.backend.plan(Request("barrier"))(None, None, Deadline(0.5)))
        assert isinstance(error, CollectiveTimeoutError)
    assert "waited 0.5 s" in str(broken(caller))


@on_ranks("nccl", size=3)
def test_allocation_failure_on_one_rank_raises_on_all(comm: Any) -> None:
    caller = Caller(comm)
    connect(caller)
    if caller.rank == 1:
        Fake().knob("alloc_fail_at", 1)
    error = error_of(lambda: caller.backend.empty_device(1 << 20, Request("empty"), Deadline(FAR)))
    assert isinstance(error, AllocationError), error
    assert "not enough memory on the GPU of rank 1" in str(error)
    adds(caller)  # the transport stays usable
    caller.finish()


class NoDriver(FakeNccl):
    """Transport whose rank 0 has no driver."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> NcclBackend:
        backend = super().connect(world, deadline)
        if world.rank == 0:
            os.environ["COLLECTIVE_CUDA_LIBRARY"] = "/nowhere/libcuda.so.1"
        return backend


def cannot(comm: Any) -> str:
    """Make a call that raises on every rank, and another one on the host; return the text."""
    backend = comm.inner.transport
    # A rank without a GPU has no GPU array to pass, so all ranks call _open() directly.
    texts = set()
    for _ in range(2):
        error = error_of(lambda: backend._open("all_reduce()", Deadline(FAR)))
        assert isinstance(error, BackendUnavailableError), error
        texts.add(str(error))
    assert len(texts) == 1
    backend.plan(Request("barrier"))(None, None, Deadline(FAR))
    return texts.pop()


# test_bad_input.py::test_unsuitable_library_or_gpu_is_refused_on_all_ranks has the other cases.
def test_rank_without_driver_is_named_on_all_ranks() -> None:
    with Pools(NoDriver) as run:
        for refusal in run(2, cannot):
            assert re.search(r"all_reduce\(\): rank 0: cuda: .*/nowhere/libcuda", refusal), refusal


class NeverADriver(FakeNccl):
    """Transport whose rank 0 has no driver when it connects."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Any:
        os.environ.update(environment(cls.version))
        if world.rank == 0:
            os.environ["COLLECTIVE_CUDA_LIBRARY"] = "/nowhere/libcuda.so.1"
        return super(FakeNccl, cls).connect(world, deadline)


def test_init_without_driver_on_one_rank_raises_on_all_ranks() -> None:
    with Pools(NeverADriver) as run, pytest.raises(RanksFailedError) as caught:
        run(2, on_host)
    for rank in range(2):
        text = rf"nccl: rank 0: cuda: /nowhere/libcuda\.so\.1 cannot be loaded.* \[rank {rank}\]"
        error = caught.value.errors[rank]
        assert isinstance(error, BackendUnavailableError), repr(error)
        assert re.search(text, str(error)), error


@on_ranks("nccl", size=1)
def test_dropped_transport_leaves_no_thread(comm: Any) -> None:
    """A transport that is dropped without close() leaves no thread."""
    job = f"dropped-{os.getpid()}-{time.monotonic_ns()}"
    options = {"host": "threads"}
    world = World(0, 1, 0, 1, "here", "none", job, store=MemoryStore(), options=options)
    backend = NcclBackend.connect(world, Deadline(FAR))
    adds(Caller(backend))
    del backend
    gc.collect()
    watching = [running for running in threading.enumerate() if "nccl" in running.name]
    for thread in watching:  # the list may contain a thread that is just ending
        thread.join(FAR)
    assert not [thread.name for thread in watching if thread.is_alive()]
