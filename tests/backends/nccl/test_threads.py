"""``nccl`` on the ABI fake: ranks as threads with one GPU each, and calls from other threads."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.interpreter import ROOT

pytest.importorskip("tests.fakes")

from collective import cuda
from collective.backends.nccl import NcclBackend
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    DeviceError,
)
from collective.testing import RankPool, parametrize_with_checks
from tests.fakes import Fake, FakeArray, set_current_stream
from tests.support.fake_gpu import gpu
from tests.support.launches import launches  # noqa: F401
from tests.support.nccl_processes import Pools, needs_compiler, pools
from tests.support.nccl_programs import (
    FAR,
    Gpus,
    calls_of_nccl,
    copied,
    error_of,
    framework,
    held,
    is_poison,
    new_stream,
    of_fake,
    ordinal_of,
    peek,
    read,
    settled,
    until,
    warm,
)

__all__ = ["gpu"]  # a fixture

pytestmark = needs_compiler


class AsThreads(NcclBackend):
    """``"cpu:threads,cuda:nccl"``: ranks are threads, and each rank has the GPU of its number."""

    capabilities = replace(NcclBackend.capabilities, in_process=True)

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> AsThreads:
        options = {"host": "threads", "devices": "cpu,cuda"}
        return super().connect(replace(world, options={**world.options, **options}), deadline)


@pytest.fixture
def threads(gpu: Fake) -> Iterator[Any]:
    """Run a function on ranks that are threads of this process."""
    started: list[RankPool] = []

    def run(size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
        pool = RankPool(size, AsThreads, timeout=40.0)
        started.append(pool)
        return pool.run(function, *args, **options)

    gpu.clear_log()
    yield run
    for pool in started:
        pool.close()
    until(lambda: not [t for t in threading.enumerate() if "nccl" in t.name], 10.0)


nccl = pools(Gpus)


def everyone(comm: Any, count: int = 6) -> np.ndarray[Any, Any]:
    return np.stack([np.arange(count, dtype=np.float32) + 10 * r for r in range(comm.size)])


# -- ranks that are threads -----------------------------------------------------------------------


# Checks of each kind of call, and of a call in which one rank is missing.
CHECKS = tuple(
    f"check_{name}"
    for name in """
    all_gather all_reduce_in_place all_to_all async async_many broadcast empty failed_peer gather
    late_peer messages_among_collectives order_rank reduce_scatter sendrecv split structures
""".split()
)


@pytest.mark.usefixtures("gpu")
@parametrize_with_checks(AsThreads, sizes=(3,), kind="cuda", checks=CHECKS)
def test_nccl_with_thread_ranks_passes_suite(check: Callable[[], None]) -> None:
    check()


def streams_of_threads(comm: Any) -> None:
    """Check that each thread has its own current stream and GPU, and disturbs no other thread."""
    warm_up = of_fake(comm, np.ones(1, np.float32))
    comm.all_reduce(warm_up, out=warm_up)
    read(warm_up)
    rank = comm.rank
    set_current_stream(Fake().stream(rank), rank)
    every = everyone(comm)
    x = FakeArray.of(every[rank], rank)
    stream = f"stream={x.stream:#x}"
    comm.barrier()
    for _ in range(5):
        before = len([line for line in calls_of_nccl() if stream in line])
        y = comm.all_reduce(x)
        after = len([line for line in calls_of_nccl() if stream in line])
        assert after == before + 1
        np.testing.assert_array_equal(copied(comm, y, x.stream).get(), every.sum(0))
    works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(3)]
    works[-1].wait()
    copy = copied(comm, x, x.stream)
    np.testing.assert_array_equal(copy.get(), every.sum(0) * comm.size**2)
    # After the call the thread has the same current context as before.
    fake = Fake()
    with fake.active((rank + 1) % 4):
        comm.all_reduce(x)
        context = ctypes.c_void_p()
        fake.cuda("cuCtxGetCurrent", ctypes.byref(context))
        assert context.value == fake.context((rank + 1) % 4)
    set_current_stream(None, rank)
    comm.barrier()
    settled(comm)


def test_thread_ranks_keep_own_streams_and_contexts(threads: Any) -> None:
    threads(3, streams_of_threads)


def another_threads_gpu(comm: Any) -> None:
    assert comm.inner.transport.device.ordinal == comm.rank
    there = FakeArray.of(np.ones(3, np.float32), (comm.rank + 1) % 4)
    error = error_of(lambda: comm.all_reduce(there))
    assert type(error) is DeviceError, repr(error)
    text = f"an array on cuda:{comm.rank + 1}; this rank's GPU is cuda:{comm.rank}"
    assert text in str(error)
    comm.barrier()
    x = of_fake(comm, np.ones(3, np.float32))
    assert read(comm.all_reduce(x)).tolist() == [comm.size] * 3


def test_gpu_of_another_thread_is_refused(threads: Any) -> None:
    threads(2, another_threads_gpu)


def test_thread_ranks_run_under_launcher(launches: Any) -> None:  # noqa: F811
    """Run ``collective run`` with ``cpu:threads,cuda:nccl``, as a user would."""
    path = launches.directory / "program.py"
    path.write_text(
        f"import os, sys, tempfile\nsys.path[:0] = [{str(ROOT)!r}]\n"
        f"tempfile.tempdir = {tempfile.gettempdir()!r}\n"  # where the fake has been built
        "import numpy as np\nfrom tests.fakes import FakeArray, environment\nimport collective\n"
        "os.environ.update(environment())\n"
        "with collective.init('cpu:threads,cuda:nccl') as comm:\n"
        "    x = FakeArray.of(np.ones(3, np.float32), comm.local_rank)\n"
        "    y = comm.all_reduce(x)\n"
        "    print(comm.backend, y.device.ordinal, y.to_host().tolist())\n"
    )
    result = launches.run("-n", "3", "--backend", "threads", str(path))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}] nccl {rank} [3.0, 3.0, 3.0]" for rank in range(3)
    ]
    assert result.stderr == ""


# -- calls from other threads of a rank -----------------------------------------------------------


def in_thread(function: Any) -> Any:
    """Run a function in a new thread; return its result or raise its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((function(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(2 * FAR)
    assert results, "the thread hangs"
    value, error = results[0]
    if error is not None:
        raise error
    return value


def from_elsewhere(comm: Any) -> None:
    """Make the first call and later calls from a thread that has no CUDA context."""
    every = everyone(comm)
    x = of_fake(comm, every[comm.rank])

    def steps() -> None:
        y = comm.all_reduce(x)
        np.testing.assert_array_equal(read(y), every.sum(0))
        a = new_stream(comm)
        z = FakeArray((6,), "float32", device=ordinal_of(comm), stream=a)
        with held():
            z.set(every[comm.rank])
            work = comm.all_reduce(z, out=z, async_op=True)
            work.wait()
            copy = copied(comm, z, a)
        np.testing.assert_array_equal(copy.get(), every.sum(0))
        np.testing.assert_array_equal(read(comm.scan(x)), every[: comm.rank + 1].sum(0))
        big = comm.empty(8, like="cuda")
        comm.all_reduce(big, out=big)

    in_thread(steps)
    work = in_thread(lambda: comm.all_reduce(x, async_op=True))
    with held():
        second = in_thread(lambda: comm.all_reduce(x, async_op=True))
        result = second.wait()
        assert is_poison(result)
        after = copied(comm, result, x.stream)
    np.testing.assert_array_equal(after.get(), every.sum(0))
    np.testing.assert_array_equal(peek(work.synchronize()), every.sum(0))
    del work, second, result
    gc.collect()
    settled(comm)


def test_calls_from_another_thread_succeed(nccl: Pools) -> None:
    nccl(2, from_elsewhere)


def waits_elsewhere(comm: Any) -> None:
    """Check that ``wait()`` orders the stream that is current in the thread that calls it."""
    warm(comm)
    import torch

    every = everyone(comm)
    own_stream, other_stream = new_stream(comm), new_stream(comm)

    def current(stream: int) -> Any:
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=ordinal_of(comm)))

    with framework(comm, "torch") as fw:
        with current(own_stream):
            x = fw.of(every[comm.rank])
            y = fw.of(np.zeros(6, np.float32))
            with held():
                work = comm.all_reduce(x, out=y, async_op=True)

        def elsewhere() -> Any:
            with current(other_stream), Fake().turned("delay_us", 5000, back=300):
                work.wait()
                stored = FakeArray((6,), "float32", device=ordinal_of(comm), stream=other_stream)
                stream = comm.inner.transport.device.stream(other_stream)
                cuda.copy(stored.address, y.data_ptr(), 24, stream)
                return stored.get()

        np.testing.assert_array_equal(in_thread(elsewhere), every.sum(0))
        settled(comm)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_wait_orders_current_stream_of_waiting_thread(nccl: Pools) -> None:
    nccl(2, waits_elsewhere)


def forked(comm: Any) -> int:
    """Fork, and return the exit code of a child that drops its copies of the arrays."""
    warm(comm)
    x = of_fake(comm, np.ones(3, np.float32))
    y = comm.all_reduce(x)
    child = os.fork()
    if not child:
        try:
            x.forget()
            del x, y, comm
            gc.collect()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert read(comm.all_reduce(x)).tolist() == [comm.size] * 3
    assert read(y).tolist() == [comm.size] * 3
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_leaves_gpu_alone(nccl: Pools) -> None:
    assert nccl(2, forked) == [0, 0]
