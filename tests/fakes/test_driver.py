"""The ABI fake's CUDA driver: delayed streams, poison, events, memory and arrays."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from tests.fakes import (
    POISON,
    Fake,
    FakeArray,
    compiler,
    current_stream,
    set_current_stream,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT = 1, 2, 201
INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 400, 600, 700
u64, size_t, handle = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p


@pytest.fixture
def fake():
    library = Fake()
    library.context(0)
    library.clear_log()
    yield library
    library.knob("hold", 0)
    library.reset_error()


@pytest.fixture
def held(fake):
    """Let no work that moves data begin until ``hold`` is 0."""
    fake.knob("hold", 1)
    return fake


def copy(fake, dst, src, nbytes, stream):
    fake.cuda("cuMemcpyAsync", u64(dst), u64(src), size_t(nbytes), handle(stream))


def event(fake, device=0):
    created = handle()
    with fake.active(device):
        fake.cuda("cuEventCreate", ctypes.byref(created), 2)
    return created


def allocate(fake, nbytes, device=0):
    address = u64()
    with fake.active(device):
        fake.cuda("cuMemAlloc_v2", ctypes.byref(address), size_t(nbytes))
    return address.value


def code_of(fake, name, *arguments):
    with pytest.raises(OSError, match=name) as caught:
        fake.cuda(name, *arguments)
    return caught.value.errno


def is_poison(array):
    return bool((np.ascontiguousarray(array).view(np.uint8) == POISON).all())


# Deferral and poison


def test_read_before_copy_is_done_returns_poison(fake):
    source = FakeArray.of(np.arange(100))
    source.get()
    target = FakeArray.of(np.zeros(100, int))
    target.get()
    fake.knob("hold", 1)
    copy(fake, target.address, source.address, 800, target.stream)
    assert is_poison(target.peek())
    fake.knob("hold", 0)
    assert np.array_equal(target.get(), np.arange(100))


def test_input_of_waiting_work_is_not_poisoned(held):
    values = [np.full(50, n) for n in (1, 2)]
    first, second = (FakeArray.of(v) for v in values)
    result = FakeArray.of(np.zeros(50, int))
    copy(held, result.address, first.address, 400, first.stream)
    copy(held, first.address, second.address, 400, first.stream)
    held.knob("hold", 0)
    assert np.array_equal(result.get(), values[0])
    assert np.array_equal(first.get(), values[1])


def test_copy_2d_leaves_bytes_between_rows(fake):
    source = FakeArray.of(np.arange(12, dtype=np.uint8).reshape(3, 4))
    target = FakeArray.of(np.zeros((3, 8), np.uint8))
    target.get()
    struct = (u64 * 16)()
    device_memory, width = 2, 4
    struct[2], struct[4], struct[6] = device_memory, source.address, 4
    struct[9], struct[11], struct[13] = device_memory, target.address, 8
    struct[14], struct[15] = width, 3
    fake.knob("hold", 1)
    fake.cuda("cuMemcpy2DAsync_v2", struct, handle(target.stream))
    assert is_poison(target.peek()[:, :4])
    assert not target.peek()[:, 4:].any()
    fake.knob("hold", 0)
    expected = np.zeros((3, 8), np.uint8)
    expected[:, :4] = np.arange(12).reshape(3, 4)
    assert np.array_equal(target.get(), expected)
    struct[13] = 3
    assert code_of(fake, "cuMemcpy2DAsync_v2", struct, handle(target.stream)) == INVALID_VALUE


# Order between streams


def test_event_orders_two_streams(held):
    first, second = held.stream(0), held.stream(0)
    source = FakeArray.of(np.arange(10), stream=first)
    target = FakeArray.of(np.zeros(10, int), stream=second)
    happened, later = event(held), event(held)
    held.cuda("cuEventRecord", happened, handle(first))
    held.cuda("cuStreamWaitEvent", handle(second), happened, 0)
    copy(held, target.address, source.address, 80, second)
    held.cuda("cuEventRecord", later, handle(second))
    assert code_of(held, "cuEventQuery", happened) == NOT_READY
    assert code_of(held, "cuStreamQuery", handle(second)) == NOT_READY
    held.knob("hold", 0)
    held.cuda("cuEventSynchronize", later)
    held.cuda("cuEventQuery", happened)
    assert np.array_equal(target.peek(), np.arange(10))
    held.cuda("cuEventDestroy_v2", later)
    assert code_of(held, "cuEventQuery", later) == INVALID_HANDLE


def test_stream_does_not_pass_awaited_event(fake):
    one, two, happened = fake.stream(0), fake.stream(0), event(fake)
    order, passed = [], threading.Event()
    host_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @host_function
    def first(_):
        passed.wait(0.2)  # enough time for a stream that wrongly does not wait
        order.append(1)

    @host_function
    def second(_):
        order.append(2)
        passed.set()

    fake.cuda("cuLaunchHostFunc", handle(one), first, None)
    fake.cuda("cuEventRecord", happened, handle(one))
    fake.cuda("cuStreamWaitEvent", handle(two), happened, 0)
    fake.cuda("cuLaunchHostFunc", handle(two), second, None)
    fake.synchronize(two)
    fake.synchronize(one)
    assert order == [1, 2]


def test_wait_covers_only_earlier_record(held):
    first, second = held.stream(0), held.stream(0)
    again = event(held)
    # The event was never recorded, so there is no wait.
    held.cuda("cuStreamWaitEvent", handle(second), again, 0)
    held.synchronize(second)
    held.cuda("cuEventRecord", again, handle(second))
    held.cuda("cuStreamWaitEvent", handle(second), again, 0)
    waiting = FakeArray.of(np.arange(3), stream=first)
    # This record is not done, but no stream waits for it.
    held.cuda("cuEventRecord", again, handle(first))
    held.synchronize(second)
    held.knob("hold", 0)
    waiting.get()


def test_event_is_refused_on_stream_of_another_device(fake):
    other = event(fake, device=1)
    assert code_of(fake, "cuEventRecord", other, handle(current_stream(0))) == INVALID_HANDLE
    fake.cuda("cuEventRecord", other, handle(current_stream(1)))
    fake.cuda("cuStreamWaitEvent", handle(current_stream(0)), other, 0)
    fake.synchronize(current_stream(0))


def test_host_functions_run_in_order(fake):
    seen = []
    stream = fake.stream(0)
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append(data))
    for number in range(1, 6):
        fake.cuda("cuLaunchHostFunc", handle(stream), called, handle(number))
    fake.synchronize(stream)
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_need_current_context(fake, stream):
    assert code_of(fake, "cuStreamSynchronize", handle(stream)) == INVALID_CONTEXT
    with fake.active(1):
        fake.cuda("cuStreamSynchronize", handle(stream))
        context = handle()
        fake.cuda("cuStreamGetCtx", handle(stream), ctypes.byref(context))
        assert context.value == fake.context(1)


def test_handles_0_and_1_share_queue(held):
    source = FakeArray.of(np.arange(4))
    with held.active(0):
        copy(held, source.address, source.address, 4, 1)
        assert code_of(held, "cuStreamQuery", handle(0)) == NOT_READY
        held.cuda("cuStreamQuery", handle(2))
        held.knob("hold", 0)
        held.cuda("cuStreamSynchronize", handle(0))
        held.cuda("cuStreamQuery", handle(1))


def test_destroyed_stream_finishes_its_work_and_is_invalid(held):
    stream = held.stream(0)
    target = FakeArray.of(np.arange(7), stream=stream)
    done = event(held)
    held.cuda("cuEventRecord", done, handle(stream))
    held.cuda("cuStreamDestroy_v2", handle(stream))
    assert code_of(held, "cuStreamQuery", handle(stream)) == INVALID_HANDLE
    held.knob("hold", 0)
    held.cuda("cuEventSynchronize", done)
    assert np.array_equal(target.peek(), np.arange(7))
    target.forget()


# Memory


def test_pointer_attributes_know_only_fake_memory(fake):
    address = allocate(fake, 100, device=2)
    attribute = ctypes.c_int(-1)
    attribute_kind, attribute_ordinal = 2, 9
    get = "cuPointerGetAttribute"
    fake.cuda(get, ctypes.byref(attribute), attribute_ordinal, u64(address + 99))
    assert attribute.value == 2
    fake.cuda(get, ctypes.byref(attribute), attribute_kind, u64(address))
    assert attribute.value == 2
    pinned = handle()
    with fake.active(1):
        fake.cuda("cuMemHostAlloc", ctypes.byref(pinned), size_t(10), 0)
    fake.cuda(get, ctypes.byref(attribute), attribute_kind, u64(pinned.value))
    assert attribute.value == 1
    host = np.empty(10)
    for unknown in (host.ctypes.data, address + 100):
        assert code_of(fake, get, ctypes.byref(attribute), 9, u64(unknown)) == INVALID_VALUE
    fake.cuda("cuMemFreeHost", pinned)
    fake.cuda("cuMemFree_v2", u64(address))
    assert code_of(fake, "cuMemFree_v2", u64(address)) == INVALID_VALUE


def test_use_after_free_sets_sticky_error(fake):
    stream = fake.stream(0)
    block = u64()
    fake.cuda("cuMemAllocAsync", ctypes.byref(block), size_t(64), handle(stream))
    target = FakeArray.of(np.zeros(8), stream=stream)
    copy(fake, target.address, block.value, 64, stream)
    fake.cuda("cuMemFreeAsync", block, handle(stream))
    fake.synchronize(stream)  # freeing after the copy on the same stream is valid
    fake.cuda("cuMemAllocAsync", ctypes.byref(block), size_t(64), handle(stream))
    fake.knob("hold", 1)
    late = fake.stream(0)
    copy(fake, target.address, block.value, 64, late)
    fake.cuda("cuMemFreeAsync", block, handle(stream))
    fake.cuda("cuStreamSynchronize", handle(stream))
    fake.knob("hold", 0)
    assert code_of(fake, "cuStreamSynchronize", handle(late)) == ILLEGAL_ADDRESS
    assert fake.log("use after free")


def test_dropped_array_is_poisoned_in_stream_order(held):
    array = FakeArray.of(np.arange(16))
    memory, address, stream = array.memory(), array.address, array.stream
    target = FakeArray.of(np.zeros(16, int))
    copy(held, target.address, address, 128, stream)
    del array
    held.knob("hold", 0)
    held.synchronize(stream)
    assert is_poison(memory)
    assert np.array_equal(target.get(), np.arange(16))


def test_allocation_fails_by_knob_and_when_memory_is_full(fake):
    fake.knob("alloc_fail_at", 2)
    block = u64()
    with fake.active(3):
        fake.cuda("cuMemAlloc_v2", ctypes.byref(block), size_t(8))
        arguments = ctypes.byref(block), size_t(8)
        assert code_of(fake, "cuMemAlloc_v2", *arguments) == OUT_OF_MEMORY
        fake.cuda("cuMemAlloc_v2", *arguments)
        assert code_of(fake, "cuMemAlloc_v2", arguments[0], size_t(1 << 33)) == OUT_OF_MEMORY
    assert code_of(fake, "cuMemAlloc_v2", *arguments) == INVALID_CONTEXT
    with pytest.raises(KeyError):
        fake.knob("no_such_knob", 1)


# Arrays


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a,
        lambda a: a.T,
        lambda a: a[::-1],
        lambda a: a[::2, 1::3],
        lambda a: a[:, :0],
        lambda a: np.broadcast_to(a[0], (3, 6)),
        lambda a: a[1, 2],
    ],
)
def test_arrays_of_any_strides_keep_their_values(view):
    values = view(np.arange(24, dtype="f4").reshape(4, 6))
    array = FakeArray.of(values, device=1)
    interface = array.__cuda_array_interface__
    strides = np.asarray(values).strides
    assert np.array_equal(array.get(), values)
    assert (interface["strides"] or np.empty(interface["shape"], "f4").strides) == strides
    assert interface["stream"] == current_stream(1)
    assert interface["version"] == 3


def test_bytes_between_elements_stay_poison():
    array = FakeArray.of(np.arange(8, dtype=np.uint8)[::4])
    array.get()
    assert array.memory().tolist() == [0, POISON, POISON, POISON, 4]


def test_set_current_stream_changes_stream_of_new_arrays(fake):
    stream = fake.stream(0)
    set_current_stream(stream)
    try:
        assert FakeArray((2,)).stream == stream
    finally:
        set_current_stream(None)
    assert FakeArray((2,)).stream != stream
