"""``nccl`` on real GPUs: the order of work on streams, and the lifetime of memory."""

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

# SLOW_S: seconds of work that other work has to wait for. The work consists of copies of at least
# BYTES and at most MOST_BYTES each. Their size grows until COPIES of them are enough, because the
# host would wait if the queue of the stream were full.
SLOW_S = float(os.environ.get("GPU_TESTS_SLOW_S", "0.2"))
BYTES, MOST_BYTES, COPIES = 1 << 24, 1 << 30, 200
COUNT = 1 << 16


ranks = pools(OnGpus, timeout=120.0)


SIZE = max(sizes())


class Gpu:
    """A rank's GPU with a stream, and a way to keep a stream busy."""

    def __init__(self, comm: Any) -> None:
        self.device = comm.inner.transport.device
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
        """Return the duration of a copy in seconds."""
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
        """Enqueue work of ``times`` times SLOW_S seconds on a stream."""
        for _ in range(times * self._copies):
            self._copy(stream)

    def array(self, value: float, stream: cuda.Stream | None = None) -> DeviceArray:
        """Return a new array filled with one value."""
        stream = stream or self.stream
        address, owner = PlainSpace().empty(4 * COUNT, self.device, stream)
        new = DeviceArray(address, (COUNT,), "float32", self.device, stream, owner=owner)
        new.fill_from_host(np.full(COUNT, value, np.float32))
        return new

    def later(self, value: float) -> DeviceArray:
        """Return the same as :meth:`array`, but do not let the host wait for the stream."""
        source = self._values.get(value)
        if source is None:
            source = self._values[value] = self.array(value, self.device.new_stream())
        address, owner = PlainSpace().empty(source.nbytes, self.device, self.stream)
        cuda.copy(address, source.address, source.nbytes, self.stream)
        return DeviceArray(address, (COUNT,), "float32", self.device, self.stream, owner=owner)


def values(array: DeviceArray) -> list[float]:
    """Wait for an array's stream; return the distinct values in the array."""
    return sorted({float(value) for value in array.to_host()})


def seen(comm: Any, look: Callable[[int], bool]) -> bool:
    """Return whether ``look`` is true on all ranks; repeat with longer work if the host is slow."""
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


def test_all_reduce_returns_once_enqueued(ranks: Pools) -> None:
    ranks(SIZE, returns_at_once)


def follows_its_stream(comm: Any) -> None:
    """Check that the call runs after earlier and before later work on the caller's stream."""
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


def test_all_reduce_runs_in_order_on_caller_stream(ranks: Pools) -> None:
    ranks(SIZE, follows_its_stream)


def in_the_background(comm: Any) -> None:
    """Check that an asynchronous call waits only for work already on the caller's stream."""
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


def test_async_all_reduce_runs_beside_caller_stream(ranks: Pools) -> None:
    ranks(SIZE, in_the_background)


def waits_for_the_background(comm: Any) -> None:
    """Check that ``wait()`` lets the caller's stream wait but not the host."""
    gpu = Gpu(comm)
    x = gpu.array(3.0)

    def look(times: int) -> bool:
        y, got = gpu.array(0.0), gpu.array(0.0)
        gpu.keep_busy(gpu.stream, times)  # the call runs after this work
        work = comm.all_reduce(x, out=y, async_op=True)
        work.wait()
        early = not work.done()
        cuda.copy(got.address, y.address, y.nbytes, gpu.stream)
        assert values(got) == [3.0 * comm.size]
        assert work.done()
        return early

    assert seen(comm, look), "wait() has waited on the host"


def test_work_wait_blocks_stream_but_not_host(ranks: Pools) -> None:
    ranks(SIZE, waits_for_the_background)


def in_place_in_turn(comm: Any) -> None:
    """Check calls in flight that write to the same memory: each reads the previous result."""
    gpu = Gpu(comm)
    x = gpu.array(1.0)
    gpu.keep_busy(gpu.stream)
    works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(3)]
    works[-1].wait()
    assert values(x) == [float(comm.size**3)]


def test_async_all_reduces_run_in_order(ranks: Pools) -> None:
    ranks(SIZE, in_place_in_turn)


def drops_arrays(comm: Any) -> None:
    """Check that dropped arrays of calls in flight keep their memory until the calls end."""
    gpu = Gpu(comm)
    works = []
    for turn in range(20):
        if not turn:
            gpu.keep_busy(gpu.stream)
        works.append(comm.all_reduce(gpu.later(turn + 1.0), async_op=True))
        # This array is as large as the dropped one, so the allocator would reuse freed memory.
        gpu.later(-1.0)
    for turn, work in enumerate(works):
        assert values(work.wait()) == [(turn + 1.0) * comm.size]


def test_async_all_reduce_keeps_dropped_arrays_alive(ranks: Pools) -> None:
    ranks(SIZE, drops_arrays)


def exchanges(comm: Any) -> None:
    """Check messages in both directions at once, each after earlier work on its stream."""
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


def test_messages_follow_their_streams(ranks: Pools) -> None:
    ranks(SIZE, exchanges)


def leaves(comm: Any) -> None:
    """Check that after a rank leaves, the other ranks' kernels end and their errors name it."""
    gpu = Gpu(comm)
    x = gpu.array(1.0)
    if comm.rank == comm.size - 1:
        comm.close()
        return
    failed = None
    try:
        comm.all_reduce(x, out=x)
        comm.inner.transport.synchronize_event(gpu.stream.record(), "all_reduce", Deadline(60.0))
    except CollectiveError as error:
        failed = error
    assert failed is not None
    assert f"rank {comm.size - 1}" in str(failed), failed
    gpu.stream.synchronize()


def test_departed_rank_is_named_and_kernels_end(ranks: Pools) -> None:
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
    """Compute, reduce asynchronously and compute with the result, as a training loop does."""
    framework = kind(comm.inner.transport.device)
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
def test_framework_arrays_and_streams_train_correctly(ranks: Pools, kind: type[Torch]) -> None:
    module = pytest.importorskip(kind.__name__.lower())
    if not module.cuda.is_available():
        pytest.skip(f"{kind.__name__}: needs a build with CUDA, and a GPU")
    ranks(SIZE, trains, kind)
