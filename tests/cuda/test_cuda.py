"""The CUDA driver: devices, streams, events, copies and memory, over the ABI fake."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import sys
import threading

import numpy as np
import pytest

from collective import cuda
from collective.cuda import library as cuda_driver
from collective.cuda import pinning as pinned
from collective.errors import (
    AllocationError,
    BackendError,
    BackendUnavailableError,
    DeviceError,
)
from tests import fakes
from tests.support.fake_stream_gate import Gate
from tests.support.interpreter import printed

POISON = fakes.POISON


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    for name, value in fakes.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "_devices", {})
    handle = fakes.Fake()
    handle.clear_log()
    handle.knob("delay_us", 0)
    yield handle
    gc.collect()
    handle.knob("delay_us", 40)


@pytest.fixture
def device(fake: fakes.Fake) -> cuda.Device:
    return cuda.device(0)


@pytest.fixture
def gate(fake: fakes.Fake):
    new_gate = Gate()
    yield new_gate
    new_gate.open()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def run(code: str, **environment: str) -> str:
    """Run Python code in a new process, and return its output."""
    return printed("-c", code, PYTHONPATH=os.pathsep.join(sys.path), **environment)


# -- the driver ------------------------------------------------------------------------------


def test_missing_driver_has_no_gpus_and_error_has_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("COLLECTIVE_CUDA_LIBRARY", str(tmp_path / "libcuda.so.1"))
    assert cuda.device_count() == 0
    with pytest.raises(BackendUnavailableError, match=r"NVIDIA's driver.*nvidia-smi") as caught:
        cuda.driver()
    assert isinstance(caught.value.__cause__, OSError)


def test_driver_without_gpus_error_names_possible_cause():
    printed = run(
        "from collective import cuda\n"
        "print(cuda.device_count())\n"
        "try: cuda.device(0)\n"
        "except ImportError as error: print(error)",
        **fakes.environment(devices=0),
    )
    assert printed.startswith("0\n")
    assert re.search(r"no CUDA-capable device.*CUDA_VISIBLE_DEVICES", printed)


def test_driver_is_loaded_once_and_has_version(fake):
    assert cuda.driver() is cuda.driver()
    assert cuda.driver().version == 13000


def test_package_import_does_not_load_driver():
    code = (
        "import collective\n"
        "from collective.cuda import library as cuda_driver\n"
        "print(cuda_driver._drivers, 'libfake' in open('/proc/self/maps').read())"
    )
    assert run(code, **fakes.environment()) == "{} False\n"


def test_missing_driver_function_raises_when_called(fake, monkeypatch):
    prototypes = {**cuda_driver._PROTOTYPES, "cuNothing": ()}
    monkeypatch.setattr(cuda_driver, "_PROTOTYPES", prototypes)
    loaded = cuda_driver.Driver(fakes.library_path())
    with pytest.raises(BackendUnavailableError, match=r"has no cuNothing.*Update it"):
        loaded.cuNothing()  # type: ignore[attr-defined]


def test_driver_errors_contain_text_and_code(device):
    with pytest.raises(BackendError, match=r"cuda:0.*invalid resource handle") as caught:
        device.stream(0xDEAD0).record()
    assert (caught.value.backend, caught.value.code) == ("cuda", 400)


def test_broken_context_error_says_so():
    code = (
        "from tests.support.fake_stream_gate import Gate\n"
        "from collective import cuda\n"
        "device = cuda.device(0)\n"
        "stream, gate = device.new_stream(), Gate()\n"
        "memory, host = cuda.allocate(device, 64, stream), cuda.pinned(64)\n"
        "address = memory.address\n"
        "gate.hold(stream)\n"
        "del memory\n"
        "cuda.copy(host.__array_interface__['data'][0], address, 64, stream)\n"
        "try:\n"
        "    gate.open()\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.code, error)\n"
    )
    printed = run(code, **fakes.environment())
    assert printed.startswith("BackendError 700 ")
    assert "broken the GPU's context" in printed


# -- devices ---------------------------------------------------------------------------------


def test_device_is_cached_and_has_properties(fake):
    second = cuda.device(1)
    assert cuda.device(1) is second
    assert second.ordinal == 1
    assert second.name == "Fake GPU 1"
    assert second.bus_id == "0000:02:00.0"
    assert str(second) == "cuda:1"


@pytest.mark.parametrize("ordinal", [4, -1])
def test_missing_device_error_lists_existing_devices(fake, ordinal):
    with pytest.raises(DeviceError, match=rf"cuda:{ordinal}: .* cuda:0 to cuda:3"):
        cuda.device(ordinal)


def test_active_restores_previous_context(fake):
    loaded = cuda.driver()
    first, second = cuda.device(0), cuda.device(1)
    assert loaded.current() == 0
    with first.active():
        assert loaded.current() == first.context
        with second.active(), second.active():
            assert loaded.current() == second.context
        assert loaded.current() == first.context
    assert loaded.current() == 0


def test_active_restores_context_after_error(fake):
    with pytest.raises(ZeroDivisionError), cuda.device(1).active():
        raise ZeroDivisionError
    assert cuda.driver().current() == 0


def test_device_repr_makes_no_context(monkeypatch):
    code = (
        "from tests import fakes\n"
        "from collective import cuda\n"
        "print(repr(cuda.device(0)), len(fakes.Fake().log('PrimaryCtxRetain')))\n"
        "with cuda.device(0).active(): pass\n"
        "with cuda.device(0).active(): pass\n"
        "print(len(fakes.Fake().log('PrimaryCtxRetain')))\n"
    )
    printed = run(code, **fakes.environment())
    assert printed == "Device(cuda:0, 'Fake GPU 0', 0000:01:00.0) 0\n1\n"


# -- streams and events ------------------------------------------------------------------------


def test_streams_of_same_queue_are_equal(device):
    stream = device.new_stream()
    assert device.stream(stream.handle) == stream
    assert hash(device.stream(stream.handle)) == hash(stream)
    assert device.stream(0) == device.stream(1) != device.stream(2)
    assert device.stream(0) != cuda.device(1).stream(0)
    assert device.stream(stream.handle) is device.stream(stream.handle)


def test_event_is_done_after_earlier_work(fake, device, gate):
    stream = device.new_stream()
    gate.hold(stream)
    event = stream.record()
    assert not event.query()
    assert not stream.query()
    gate.open()
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()


def test_stream_waits_for_event_of_another_device(fake, gate):
    first, second = cuda.device(0), cuda.device(1)
    first_stream, second_stream = first.new_stream(), second.new_stream()
    gate.hold(first_stream)
    event = first_stream.record()
    second_stream.wait(event)
    event.release()
    assert not second_stream.query()
    gate.open()
    second_stream.synchronize()
    assert first_stream.query()


def test_released_event_is_reused_without_ending_waits(fake, device, gate):
    stream, other = device.new_stream(), device.new_stream()
    gate.hold(stream)
    event = stream.record()
    handle = event.handle
    other.wait(event)
    event.release()
    event.release()  # a second release has no effect
    again = device.new_stream().record()
    assert again.handle == handle
    again.synchronize()
    assert stream.record().handle != handle
    assert not other.query()
    gate.open()
    other.synchronize()


def test_released_event_is_invalid(device):
    event = device.new_stream().record()
    event.release()
    with pytest.raises(BackendError, match="invalid resource handle"):
        event.query()


def test_dropped_event_returns_to_pool(fake, device):
    stream = device.new_stream()
    for _ in range(50):
        stream.record()
    assert len(fake.log("cuEventCreate")) == 1


def test_only_own_stream_is_destroyed_when_dropped(fake, device):
    stream = device.new_stream()
    handle = stream.handle
    device.stream(handle)
    assert not fake.log("cuStreamDestroy")
    del stream
    assert len(fake.log("cuStreamDestroy")) == 1


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_belong_to_their_device(fake, handle, gate):
    first, second = cuda.device(0), cuda.device(1)
    stream = second.stream(handle)
    with first.active():
        gate.hold(stream)
        event = stream.record()  # an event of another context would be refused
        assert not event.query()
        assert not stream.query()
        assert first.stream(handle).query()
        gate.open()
        stream.synchronize()
        assert event.query()
        stream.wait(event)
        assert cuda.driver().current() == first.context


def test_threads_without_context_can_use_all_calls(fake, device):
    stream = device.new_stream()
    problems: list[BaseException] = []

    def use() -> None:
        try:
            for queue in (stream, device.stream(0), device.stream(2), device.new_stream()):
                memory = cuda.allocate(device, 64, queue)
                host = cuda.pinned(64)
                host[:] = 7
                cuda.copy(memory.address, address(host), 64, queue)
                cuda.copy_2d(address(host), 8, memory.address, 16, 4, 2, queue)
                event = queue.record()
                queue.wait(event)
                event.synchronize()
                event.query()
                queue.query()
                queue.synchronize()
                cuda.owner_of(memory.address)
            assert cuda.driver().current() == 0
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not problems


def test_call_without_context_is_repeated_with_context(device, monkeypatch):
    """The real driver may require a context where the fake does not."""
    loaded, stream = cuda.driver(), device.new_stream()
    memory, host = cuda.allocate(device, 64, stream), cuda.pinned(64)
    event = stream.record()

    def strict(name: str) -> None:
        real = getattr(loaded, name)

        def function(*args: object) -> int:
            return real(*args) if loaded.current() else cuda_driver.INVALID_CONTEXT

        monkeypatch.setattr(loaded, name, function)

    for name in (
        "cuEventRecord cuEventQuery cuEventSynchronize cuStreamWaitEvent cuStreamQuery "
        "cuStreamSynchronize cuMemcpyAsync cuMemcpy2DAsync_v2 cuPointerGetAttribute "
        "cuMemFreeAsync cuMemAllocAsync cuMemHostAlloc"
    ).split():
        strict(name)
    stream.record().release()
    stream.wait(event)
    cuda.copy(memory.address, address(host), 64, stream)
    cuda.copy_2d(address(host), 8, memory.address, 16, 4, 2, stream)
    stream.synchronize()
    event.synchronize()
    assert event.query()
    assert stream.query()
    assert cuda.owner_of(memory.address) == 0
    assert loaded.current() == 0


def test_stream_override_is_limited_to_thread_and_block(device):
    usual, other = device.new_stream(), device.new_stream()
    seen = []
    with cuda.on(other):
        thread = threading.Thread(target=lambda: seen.append(cuda.effective_stream(usual)))
        thread.start()
        thread.join()
        with cuda.on(usual):
            assert cuda.effective_stream(other) is usual
        assert cuda.effective_stream(usual) is other
    assert cuda.effective_stream(usual) is usual
    assert seen == [usual]


# -- copies and memory -------------------------------------------------------------------------


def test_copy_runs_later_in_stream_order(fake, device, gate):
    stream = device.new_stream()
    memory = cuda.allocate(device, 1000, stream)
    host, back = cuda.pinned(1000), cuda.pinned(1000)
    host[:] = np.arange(1000) % 199
    gate.hold(stream)
    cuda.copy(memory.address, address(host), 1000, stream)
    cuda.copy(address(back), memory.address, 1000, stream)
    assert (back == POISON).all()  # the host reads before the copies are done
    gate.open()
    stream.synchronize()
    assert (back == host).all()


def test_copy_2d_leaves_bytes_between_rows(device):
    stream = device.new_stream()
    source, target = cuda.pinned(60), cuda.pinned(60)
    source[:], target[:] = np.arange(60), 99
    cuda.copy_2d(address(target), 20, address(source), 15, 10, 3, stream)
    stream.synchronize()
    expected = np.full((3, 20), 99, np.uint8)
    expected[:, :10] = source[:45].reshape(3, 15)[:, :10]
    assert (target.reshape(3, 20) == expected).all()


def test_empty_copies_make_no_driver_calls(fake, device):
    stream = device.new_stream()
    cuda.copy(0, 0, 0, stream)
    cuda.copy_2d(0, 4, 0, 4, 4, 0, stream)
    cuda.copy_2d(0, 4, 0, 4, 0, 4, stream)
    assert not fake.log("cuMemcpy")


def test_owner_of_address_is_its_gpu(fake):
    second = cuda.device(1)
    memory = cuda.allocate(second, 16, second.new_stream())
    assert cuda.owner_of(memory.address) == 1
    assert cuda.owner_of(memory.address + 15) == 1
    assert cuda.owner_of(address(cuda.pinned(16))) is None
    assert cuda.owner_of(address(np.empty(16))) is None


def test_owner_of_stream_is_its_gpu(fake):
    second = cuda.device(1)
    stream = second.new_stream()
    assert cuda.owner_of_stream(stream.handle) == 1
    with cuda.device(0).active():
        assert cuda.owner_of_stream(stream.handle) == 1
        assert cuda.owner_of_stream(0) == 0
    with second.active():
        assert [cuda.owner_of_stream(name) for name in range(3)] == [1, 1, 1]
    assert cuda.owner_of_stream(0) is None


def test_memory_is_freed_after_streams_that_use_it(fake, device, gate):
    stream, other = device.new_stream(), device.new_stream()
    memory = cuda.allocate(device, 64, stream)
    host = cuda.pinned(64)
    stream.synchronize()
    source = cuda.pinned(64)
    source[:] = 5
    cuda.copy(memory.address, address(source), 64, stream)
    stream.synchronize()
    gate.hold(other)
    cuda.copy(address(host), memory.address, 64, other)
    memory.used_on(other)
    del memory
    *_, waited, freed = fake.log("stream=")
    assert waited.startswith(f"cuStreamWaitEvent(stream={stream.handle:#x}")
    assert freed.startswith("cuMemFreeAsync")
    assert not stream.query()
    gate.open()
    stream.synchronize()
    other.synchronize()
    assert (host == 5).all()


def test_empty_allocation_makes_no_driver_calls(fake, device):
    memory = cuda.allocate(device, 0, device.new_stream())
    assert (memory.address, memory.nbytes) == (0, 0)
    del memory
    assert not fake.log("cuMem")


def test_full_gpu_raises_allocation_error(fake, device):
    stream = device.new_stream()
    with pytest.raises(AllocationError, match=r"cuda:0: 8589934592 bytes: out of memory"):
        cuda.allocate(device, 8 << 30, stream)
    assert cuda.allocate(device, 8, stream).address


def test_gpu_without_memory_pools_allocates_and_frees(fake, device, monkeypatch):
    monkeypatch.setattr(device, "has_pools", False)
    stream = device.new_stream()
    memory = cuda.allocate(device, 64, stream)
    assert cuda.owner_of(memory.address) == 0
    del memory
    assert not fake.log("Async")
    assert len(fake.log("cuMemFree(")) == 1


# -- pinned memory -----------------------------------------------------------------------------


@pytest.fixture
def pool(fake: fakes.Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinned, "_pool", pinned._FreeBlocks())
    return pinned._pool


def test_pinned_memory_is_reused_after_last_view_is_dropped(fake, pool):
    first = cuda.pinned(5000)
    where = address(first)
    view = first[100:].view(np.uint16).reshape(-1, 2)
    del first
    assert address(cuda.pinned(5000)) != where
    del view
    assert address(cuda.pinned(8192)) == where  # a block of the same size class
    assert len(fake.log("cuMemHostAlloc(bytes=8192")) == 2


@pytest.mark.parametrize(("nbytes", "block"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)])
def test_pinned_blocks_are_powers_of_two(fake, pool, nbytes, block):
    assert cuda.pinned(nbytes).shape == (nbytes,)
    assert pool.nbytes == block
    assert f"bytes={block}" in fake.log("cuMemHostAlloc")[0]


def test_pinned_pool_is_bounded(fake, pool, monkeypatch):
    monkeypatch.setattr(pinned, "_KEPT", 3 * 4096)
    held = [cuda.pinned(1) for _ in range(5)]
    held.clear()
    assert pool.nbytes == 3 * 4096
    assert len(fake.log("cuMemFreeHost")) == 2


def test_large_pinned_blocks_are_not_kept(fake, pool, monkeypatch):
    monkeypatch.setattr(pinned, "LARGEST", 1 << 16)
    held = cuda.pinned((1 << 16) + 1)
    assert "bytes=65537" in fake.log("cuMemHostAlloc")[0]
    del held
    assert pool.nbytes == 0
    assert len(fake.log("cuMemFreeHost")) == 1


def test_pinned_without_lockable_pages_returns_ordinary_memory(fake, pool):
    held = cuda.pinned(9000)
    del held  # the block is in the pool, and is freed first when memory runs out
    loaded = cuda.driver()
    real, requests = loaded.cuMemHostAlloc, []

    def refuse(*args: object) -> int:
        requests.append(args)
        return 2

    loaded.cuMemHostAlloc = refuse
    try:
        memory = cuda.pinned(100)
    finally:
        loaded.cuMemHostAlloc = real
    assert len(requests) == 2
    assert pool.nbytes == 0
    assert memory.shape == (100,)
    assert cuda.owner_of(address(memory)) is None
    assert not pinned.is_pinned(memory)
    assert pinned.is_pinned(cuda.pinned(100)[3:7])


def test_pinned_without_memory_raises_allocation_error(fake, pool, monkeypatch):
    def full(*_: object) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(cuda.driver(), "cuMemHostAlloc", lambda *_: 2)
    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(AllocationError, match="100 bytes"):
        cuda.pinned(100)


def test_pinned_in_thread_makes_no_context_on_another_gpu():
    code = (
        "import threading\n"
        "from tests import fakes\n"
        "from collective import cuda\n"
        "with cuda.device(2).active(): pass\n"
        "thread = threading.Thread(target=lambda: cuda.pinned(10))\n"
        "thread.start(), thread.join()\n"
        "print(fakes.Fake().log('PrimaryCtxRetain'))\n"
    )
    assert run(code, **fakes.environment()) == "['cuDevicePrimaryCtxRetain(dev=2)']\n"


# -- forks -------------------------------------------------------------------------------------


def _in_child(pipe) -> None:
    printed = []
    device = cuda.device(0)  # the device object of the parent
    for use in (
        cuda.driver,
        cuda.device_count,
        device.new_stream,
        device.stream(0).record,
        lambda: cuda.pinned(10),
        lambda: cuda.device(3),
        lambda: cuda.allocate(device, 10, device.stream(1)),
    ):
        try:
            use()
            printed.append("nothing")
        except BackendError as error:
            printed.append(str(error))
    pipe.send(printed)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_raises_error_about_fork(fake):
    device = cuda.device(0)
    stream = device.new_stream()
    held = [cuda.allocate(device, 10, stream), cuda.pinned(10), stream.record()]
    device.stream(0).record()
    device.stream(1)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    child = context.Process(target=_in_child, args=(sender,))
    child.start()
    assert receiver.poll(60)
    texts = receiver.recv()
    child.join()
    assert child.exitcode == 0
    assert len(texts) == 7
    assert all(re.search(r"fork.*'spawn'", text) for text in texts), texts
    stream.synchronize()
    assert held[2].query()  # the parent can still use CUDA
