"""The ``nccl`` transport over the ABI fake: what happens when, on which stream.

The fake does work on streams late, and fills what is to be written with poison until then: who
reads without having waited reads poison.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fakes")

from fakes import Fake
from gpu_programs import held, is_poison, peek
from nccl_callers import FAR, Caller, FakeNccl, Run, needs_compiler, pools, read, side_by_side

from collective import cuda, ops
from collective.memory.buffer import Buffer
from collective.memory.device_array import DeviceArray
from collective.request import Request

pytestmark = needs_compiler

SUM = ops.as_op("sum")
FAST_US = FakeNccl.knobs["delay_us"]


@pytest.fixture(scope="module")
def nccl() -> Iterator[Run]:
    yield from pools(FakeNccl)


def connect(caller: Caller) -> None:
    """Make the communicator, so that later calls do not wait for the other ranks."""
    x = caller.buffer(np.ones(1))
    caller.call("all_reduce", x, x, op=SUM)
    caller.finish()
    caller.backend.plan(Request("barrier"))(None, None, FAR)


def as_on(buffer: Buffer, stream: Any) -> Buffer:
    """Return the same memory as used on another stream."""
    array = buffer.array
    made = DeviceArray(array.address, array.shape, array.dtype, array.device, stream, owner=array)
    return Buffer(made, buffer.dtype)


def returns_at_once(comm: Any) -> None:
    caller = Caller(comm)
    connect(caller)
    src, dst = caller.buffer(np.full(100, 1.0)), caller.empty(100, "float64")
    caller.finish()
    with held():
        caller.call("all_reduce", src, dst, op=SUM)
        assert is_poison(dst.array)
        # The caller's stream comes after it, and other streams do where they wait for that.
        other = caller.device.new_stream()
        other.wait(caller.stream.record())
    assert read(as_on(dst, other)).tolist() == [caller.size] * 100


def test_a_call_returns_when_it_is_enqueued(nccl: Run) -> None:
    nccl(2, returns_at_once)


def follows_the_caller(comm: Any) -> None:
    """What is on the caller's stream before the call is done before it, and after it after."""
    caller = Caller(comm)
    connect(caller)
    first, second = (caller.buffer(np.full(50, caller.rank + n)) for n in (0, 10))
    x, got = caller.empty(50, "int64"), caller.empty(50, "int64")
    caller.finish()
    with held():
        cuda.copy(x.address, first.address, x.nbytes, caller.stream)
        caller.call("all_reduce", x, x, op=SUM)
        cuda.copy(got.address, x.address, x.nbytes, caller.stream)
        cuda.copy(x.address, second.address, x.nbytes, caller.stream)
        caller.call("all_reduce", x, x, op=SUM)
    assert read(got).tolist() == [sum(range(caller.size))] * 50
    assert read(x).tolist() == [sum(range(caller.size)) + 10 * caller.size] * 50


def test_calls_take_their_turn_on_the_callers_stream(nccl: Run) -> None:
    nccl(3, follows_the_caller)


def current_streams(comm: Any) -> None:
    """Within ``cuda.on`` the other stream is used."""
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
        caller.call("all_reduce", x, x, op=SUM)
    assert f"{side.handle:#x}" in fake.log("ncclAllReduce")[-1]
    caller.stream.wait(side.record())
    assert read(x).tolist() == [caller.size] * 10
    # There are not more of them than that, however many tags there are.
    kept = [caller.backend.side_stream(caller.device, tag) for tag in range(1000)]
    assert len(caller.backend._sides) <= 128
    assert caller.backend.side_stream(caller.device, 999) is kept[-1]


def test_streams_beside_the_callers(nccl: Run) -> None:
    nccl(2, current_streams)


def in_background(comm: Any) -> None:
    """A call on a side stream and work on the caller's run side by side."""
    caller = Caller(comm)
    connect(caller)
    side = caller.backend.side_stream(caller.device)
    x, y = caller.buffer(np.ones(10)), caller.buffer(np.full(10, 5.0))
    side.wait(caller.stream.record())
    with cuda.on(side):
        caller.call("all_reduce", x, x, op=SUM)
    done = side.record()
    caller.call("broadcast", y, y, root=0)
    caller.backend.synchronize_event(done, "wait", FAR)
    assert peek(x.array).tolist() == [caller.size] * 10
    assert read(y).tolist() == [5.0] * 10


def test_a_call_in_the_background(nccl: Run) -> None:
    nccl(2, in_background)


def messages_wait(comm: Any) -> None:
    """A message is sent after what is before it on the stream, and read after it has come."""
    caller = Caller(comm)
    peer = 1 - caller.rank
    source, x = caller.buffer(np.full(20, caller.rank + 1)), caller.buffer(np.zeros(20, np.int64))
    got, copy = caller.empty(20, "int64"), caller.empty(20, "int64")
    caller.finish()
    with Fake().turned("delay_us", 20_000, back=FAST_US):
        for turn in range(3):
            cuda.copy(x.address, source.address, x.nbytes, caller.stream)
            if turn == 2:
                caller.backend.sendrecv(x, peer, got, peer, 0, FAR)
            else:
                steps = [
                    lambda: caller.backend.send(x, peer, 0, FAR),
                    lambda: caller.backend.recv(got, peer, 0, FAR),
                ]
                for step in steps if caller.rank == turn else reversed(steps):
                    step()
            cuda.copy(copy.address, got.address, got.nbytes, caller.stream)
            assert read(copy).tolist() == [peer + 1] * 20


def test_messages_take_their_turn_on_the_callers_stream(nccl: Run) -> None:
    nccl(2, messages_wait)


def with_collectives(comm: Any) -> None:
    """A receive that is asked for before a collective, and sent before or after it.

    MPI_Irecv, MPI_Allreduce, MPI_Wait: the collective must not come behind the message, nor the
    message behind a collective that its sender makes after it.
    """
    caller = Caller(comm)
    connect(caller)
    x = caller.buffer(np.ones(10))
    if caller.rank == 0:
        side = caller.on(caller.device.new_stream())
        one, two = (side.buffer(np.full(5, n)) for n in (1, 2))
        two_on = as_on(two, caller.device.new_stream())
        caller.finish()

        def late() -> None:
            caller.backend.send(two_on, 1, 2, FAR)

        def main() -> None:
            caller.backend.send(one, 1, 1, FAR)
            caller.call("all_reduce", x, x, op=SUM)

        side_by_side(late, main)
        # It is freed in the order of the stream that it was allocated on.
        side.stream.wait(two_on.stream.record())
    else:
        streams = [caller.device.new_stream() for _ in range(2)]
        got = [caller.on(stream).empty(5, "int64") for stream in streams]
        before = caller.stream.record()

        def first() -> None:
            time.sleep(0.1)  # its note comes, and nobody has asked for it yet
            streams[0].wait(before)
            caller.backend.recv(got[0], 0, 1, FAR)

        def second(after: Any) -> None:
            streams[1].wait(after)
            caller.backend.recv(got[1], 0, 2, FAR)

        caller.call("all_reduce", x, x, op=SUM)
        after = caller.stream.record()
        side_by_side(first, lambda: second(after))
        assert [read(each).tolist() for each in got] == [[1] * 5, [2] * 5]
    assert read(x).tolist() == [2] * 10


def test_messages_beside_collectives(nccl: Run) -> None:
    nccl(2, with_collectives)


def keeps_nothing(comm: Any) -> None:
    """Events go back to the pool, and the thread goes to sleep."""
    caller = Caller(comm)
    connect(caller)
    x = caller.buffer(np.ones(10))
    for _ in range(100):
        caller.call("all_reduce", x, x, op=SUM)
    caller.finish()
    watch = caller.backend._watch
    end = time.monotonic() + FAR
    while watch._new or watch._pending or not watch.asleep:
        assert time.monotonic() < end, "it goes on looking"
        time.sleep(0.01)
    assert watch.unfinished() is None
    made = len(caller.device.events)
    for _ in range(3):
        caller.call("all_reduce", x, x, op=SUM)
        caller.finish()
    assert len(caller.device.events) <= made + 1


def test_what_is_over_is_let_go(nccl: Run) -> None:
    nccl(2, keeps_nothing)
