"""The ``nccl`` transport over the ABI fake: its streams, and what is on them beside each other.

What a communicator's calls have on which stream: test_nccl_stream_calls.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fakes")

from fakes import Fake
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
