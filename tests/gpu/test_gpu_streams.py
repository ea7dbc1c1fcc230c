"""``nccl`` on real GPUs: what is enqueued when, on which stream, and what becomes of memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collective import cuda
from collective.deadline import Deadline
from collective.errors import CollectiveError
from collective.memory.device_array import DeviceArray
from collective.memory.device_copies import PlainSpace
from tests.support.nccl_processes import Pools, pools
from tests.support.real_gpu import OnGpus, sizes, why_not

if why_not():
    pytest.skip(why_not(), allow_module_level=True)

# How long the work is that others have to wait for, by copies of how many bytes: so many that
# they are not too many for the queue of a stream, behind which the host would wait.
SLOW_S = float(os.environ.get("GPU_TESTS_SLOW_S", "0.2"))
BYTES, MOST_BYTES, COPIES = 1 << 24, 1 << 30, 200
COUNT = 1 << 16


ranks = pools(OnGpus, timeout=120.0)


SIZE = max(sizes())


class Gpu:
    """A rank's GPU, a stream, and a way to keep that busy."""

    def __init__(self, comm: Any) -> None:
        self.device = comm.transport.device
        self.stream = self.device.new_stream()
        self._values: dict[float, DeviceArray] = {}
        self._nbytes = BYTES
        while True:
            self._room = cuda.allocate(self.device, 2 * self._nbytes, self.stream)
            self._copies = math.ceil(SLOW_S / self._seconds())
            if self._copies <= COPIES or self._nbytes == MOST_BYTES:
                break
            self._nbytes *= 4
        x = self.array(0.0)
        comm.all_reduce(x, out=x)  # connects the ranks
        comm.barrier()

    def _seconds(self) -> float:
        """Return how long a copy takes."""
        self._copy(self.stream)
        self.stream.synchronize()
        since = time.monotonic()
        for _ in range(4):
            self._copy(self.stream)
        self.stream.synchronize()
        return (time.monotonic() - since) / 4

    def _copy(self, stream: cuda.Stream) -> None:
        cuda.copy(self._room.address, self._room.address + self._nbytes, self._nbytes, stream)

    def keep_busy(self, stream: cuda.Stream, times: int = 1) -> None:
        """Put work for some time on a stream."""
        for _ in range(times * self._copies):
            self._copy(stream)

    def array(self, value: float, stream: cuda.Stream | None = None) -> DeviceArray:
        """Return a new array, of one value."""
        stream = stream or self.stream
        address, owner = PlainSpace().empty(4 * COUNT, self.device, stream)
        made = DeviceArray(address, (COUNT,), "float32", self.device, stream, owner=owner)
        made.fill_from_host(np.full(COUNT, value, np.float32))
        return made

    def later(self, value: float) -> DeviceArray:
        """Return the same without waiting for the stream on the host."""
        source = self._values.get(value)
        if source is None:
            source = self._values[value] = self.array(value, self.device.new_stream())
        address, owner = PlainSpace().empty(source.nbytes, self.device, self.stream)
        cuda.copy(address, source.address, source.nbytes, self.stream)
        return DeviceArray(address, (COUNT,), "float32", self.device, self.stream, owner=owner)


def values(array: DeviceArray) -> list[float]:
    """Return the values that occur in an array, when its stream is done."""
    return sorted({float(value) for value in array.to_host()})


def seen(comm: Any, look: Callable[[int], bool]) -> bool:
    """Tell whether all ranks see something beside work of some length: the host may be slow."""
    return any(all(comm.all_gather_object(look(times))) for times in (1, 2, 4, 4))


def returns_at_once(comm: Any) -> None:
    gpu = Gpu(comm)
    x = gpu.array(comm.rank + 1.0)

    def look(times: int) -> bool:
        y = gpu.array(0.0)
        gpu.keep_busy(gpu.stream, times)
        comm.all_reduce(x, out=y)
        early = not gpu.stream.record().query()
        assert values(y) == [sum(range(1, comm.size + 1))]
        return early

    assert seen(comm, look), "the call has waited for its stream"


def test_a_call_returns_when_it_is_enqueued(ranks: Pools) -> None:
    ranks(SIZE, returns_at_once)


def follows_its_stream(comm: Any) -> None:
    """What is before the call on the stream is done before it, what is after it afterwards."""
    gpu = Gpu(comm)
    first, second = gpu.array(1.0), gpu.array(5.0)
    x, got = gpu.array(0.0), gpu.array(0.0)
    gpu.keep_busy(gpu.stream)
    cuda.copy(x.address, first.address, x.nbytes, gpu.stream)
    comm.all_reduce(x, out=x)
    cuda.copy(got.address, x.address, x.nbytes, gpu.stream)
    cuda.copy(x.address, second.address, x.nbytes, gpu.stream)
    comm.all_reduce(x, out=x)
    assert (values(got), values(x)) == ([comm.size], [5.0 * comm.size])


def test_calls_take_their_turn_on_the_callers_stream(ranks: Pools) -> None:
    ranks(SIZE, follows_its_stream)


def in_the_background(comm: Any) -> None:
    """Asynchronous: after the caller's stream as it is now; beside what comes on it later."""
    gpu = Gpu(comm)
    x = gpu.array(2.0)

    def look(times: int) -> bool:
        y, got = gpu.array(0.0), gpu.array(0.0)
        work = comm.all_reduce(x, out=y, async_op=True)
        gpu.keep_busy(gpu.stream, times)
        busy = gpu.stream.record()
        work.synchronize()
        early = not busy.query()
        work.wait()
        cuda.copy(got.address, y.address, y.nbytes, gpu.stream)
        assert values(got) == [2.0 * comm.size]
        assert busy.query()
        return early

    assert seen(comm, look), "the call was on the caller's stream"


def test_a_call_in_the_background(ranks: Pools) -> None:
    ranks(SIZE, in_the_background)


def waits_for_the_background(comm: Any) -> None:
    """``wait()`` has the caller's stream wait, and the host not."""
    gpu = Gpu(comm)
    x = gpu.array(3.0)

    def look(times: int) -> bool:
        y, got = gpu.array(0.0), gpu.array(0.0)
        gpu.keep_busy(gpu.stream, times)  # what the call comes after
        work = comm.all_reduce(x, out=y, async_op=True)
        work.wait()
        early = not work.done()
        cuda.copy(got.address, y.address, y.nbytes, gpu.stream)
        assert values(got) == [3.0 * comm.size]
        assert work.done()
        return early

    assert seen(comm, look), "wait() has waited on the host"


def test_wait_makes_the_stream_wait(ranks: Pools) -> None:
    ranks(SIZE, waits_for_the_background)


def in_place_in_turn(comm: Any) -> None:
    """Several on the way that write to the same memory: each finds what the last one left."""
    gpu = Gpu(comm)
    x = gpu.array(1.0)
    gpu.keep_busy(gpu.stream)
    works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(3)]
    works[-1].wait()
    assert values(x) == [float(comm.size**3)]


def test_calls_in_the_background_take_their_turn(ranks: Pools) -> None:
    ranks(SIZE, in_place_in_turn)


def drops_arrays(comm: Any) -> None:
    """Memory of a call on its way goes to nobody else, though the program has dropped it."""
    gpu = Gpu(comm)
    works = []
    for turn in range(20):
        if not turn:
            gpu.keep_busy(gpu.stream)
        works.append(comm.all_reduce(gpu.later(turn + 1.0), async_op=True))
        # As large as what was dropped: the allocator would give it that.
        gpu.later(-1.0)
    for turn, work in enumerate(works):
        assert values(work.wait()) == [(turn + 1.0) * comm.size]


def test_arrays_that_are_dropped_stay_until_the_end(ranks: Pools) -> None:
    ranks(SIZE, drops_arrays)


def exchanges(comm: Any) -> None:
    """Messages, both directions at once, each after what was on its stream."""
    gpu = Gpu(comm)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    source, x, y = gpu.array(10.0 + comm.rank), gpu.array(0.0), gpu.array(0.0)
    gpu.keep_busy(gpu.stream)
    cuda.copy(x.address, source.address, x.nbytes, gpu.stream)
    comm.sendrecv(x, right, left, out=y, tag=3)
    assert values(y) == [10.0 + left]
    for tag in (7, 5):
        works = [comm.send(x, right, tag=tag, async_op=True)]
        works.append(comm.recv(y, left, tag=tag, async_op=True))
        for work in works:
            work.wait()
        assert values(y) == [10.0 + left]


def test_messages(ranks: Pools) -> None:
    ranks(SIZE, exchanges)


def leaves(comm: Any) -> None:
    """A rank goes away: the others' kernels come to their end, and they are told why."""
    gpu = Gpu(comm)
    x = gpu.array(1.0)
    if comm.rank == comm.size - 1:
        comm.close()
        return
    failed = None
    try:
        comm.all_reduce(x, out=x)
        comm.transport.synchronize_event(gpu.stream.record(), "all_reduce", Deadline(60.0))
    except CollectiveError as error:
        failed = error
    assert failed is not None
    assert f"rank {comm.size - 1}" in str(failed), failed
    gpu.stream.synchronize()


def test_a_rank_that_leaves(ranks: Pools) -> None:
    ranks(SIZE, leaves)


class Torch:
    def __init__(self, device: cuda.Device) -> None:
        self.module = pytest.importorskip("torch")
        self.device = f"cuda:{device.ordinal}"

    def side(self) -> Any:
        return self.module.cuda.stream(self.module.cuda.Stream(self.device))

    def full(self, value: float) -> Any:
        return self.module.full((COUNT,), value, device=self.device)

    def values(self, x: Any) -> list[float]:
        found: list[float] = x.unique().tolist()
        return found


class Cupy(Torch):
    def __init__(self, device: cuda.Device) -> None:
        self.module = pytest.importorskip("cupy")
        self.device = device.ordinal
        self.module.cuda.Device(device.ordinal).use()

    def side(self) -> Any:
        return self.module.cuda.Stream(non_blocking=True)

    def full(self, value: float) -> Any:
        return self.module.full(COUNT, value, "float32")

    def values(self, x: Any) -> list[float]:
        found: list[float] = self.module.unique(x).tolist()
        return found


def trains(comm: Any, kind: type[Torch]) -> None:
    """As a training loop does: computes, reduces in the background, computes with the result."""
    framework = kind(comm.transport.device)
    with framework.side():
        x = framework.full(1.0)
        for _ in range(10):
            gradient = x * 2.0
            work = comm.all_reduce(gradient, op="avg", async_op=True)
            del gradient
            noise = framework.full(-7.0) * 3.0
            x = x + work.wait()
            del noise
        assert framework.values(x) == [3.0**10]
        parts = comm.all_gather(framework.full(float(comm.rank)))
        assert framework.values(parts) == [float(rank) for rank in range(comm.size)]
        tree = comm.all_reduce({"w": framework.full(1.0), "b": framework.full(2.0)})
        assert framework.values(tree["w"]) == [comm.size]
        assert framework.values(tree["b"]) == [2.0 * comm.size]
        assert framework.values(comm.all_reduce(framework.full(1.0), order="rank")) == [comm.size]


@pytest.mark.parametrize("kind", [Torch, Cupy], ids=lambda kind: kind.__name__.lower())
def test_a_frameworks_arrays_and_streams(ranks: Pools, kind: type[Torch]) -> None:
    module = pytest.importorskip(kind.__name__.lower())
    if not module.cuda.is_available():
        pytest.skip(f"{kind.__name__}: needs a build with CUDA, and a GPU")
    ranks(SIZE, trains, kind)
