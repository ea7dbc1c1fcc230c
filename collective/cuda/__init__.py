"""GPUs through the CUDA driver: devices, streams, events, copies and memory.

An address is an int, for GPU memory and for host memory: CUDA tells them apart. Work is
enqueued on a stream and done later, in the stream's order. Another stream or the host has to wait
for an event before it uses the result. The driver is loaded with the first use.
"""

from __future__ import annotations

import contextlib
import threading
from ctypes import addressof, c_int, c_void_p

from collective.errors import BackendUnavailableError, DeviceError

from . import library
from .library import INVALID_CONTEXT, INVALID_VALUE, Copy2D, Driver, Entered, check_driver
from .pinning import pinned
from .streams import LAST_NAME, Device, Event, Stream

__all__ = [
    "Device",
    "Event",
    "Memory",
    "Stream",
    "allocate",
    "check_driver",
    "copy",
    "copy_2d",
    "device",
    "device_count",
    "driver",
    "effective_stream",
    "forced",
    "on",
    "owner_of",
    "owner_of_stream",
    "pinned",
]

# Values of CUpointer_attribute, then of CUmemorytype.
_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9
_ON_DEVICE = 2

driver = library.load


def device_count() -> int:
    """Return the number of GPUs that this process may use; 0 without a driver."""
    try:
        loaded = driver()
    except BackendUnavailableError:
        return 0
    return _count(loaded)


def device(ordinal: int) -> Device:
    """Return a GPU, the same object for the same ordinal.

    Raises:
        DeviceError: this process has no such GPU.
        BackendUnavailableError: there is no driver.
    """
    gpu = _devices.get(ordinal)
    if gpu is None:
        with _devices_lock:
            gpu = _devices.get(ordinal)
            if gpu is None:
                gpu = _devices[ordinal] = _device(driver(), ordinal)
    return gpu


_devices: dict[int, Device] = {}
_devices_lock = threading.Lock()


def _count(loaded: Driver) -> int:
    count = c_int()
    loaded.check(loaded.cuDeviceGetCount(count), "devices")
    return count.value


def _device(loaded: Driver, ordinal: int) -> Device:
    count = _count(loaded)
    if not 0 <= ordinal < count:
        seen = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0" if count else "none"
        raise DeviceError(
            f"cuda:{ordinal}: this process sees {seen}. Choose one of them, or set "
            "CUDA_VISIBLE_DEVICES so that the process sees more GPUs."
        )
    return Device(loaded, ordinal)


class _Forced(threading.local):
    stream: Stream | None = None


#: ``forced.stream`` is the stream that this thread uses instead of arrays' own streams, or None.
forced = _Forced()


def effective_stream(stream: Stream) -> Stream:
    """Return the stream of :class:`on` in this thread; ``stream`` outside of it."""
    return forced.stream or stream


class on:  # a with statement reads it as a verb
    """Context manager that puts all work of this thread's device arrays on ``stream``."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> Stream:
        self._before = forced.stream
        forced.stream = self._stream
        return self._stream

    def __exit__(self, *_: object) -> None:
        forced.stream = self._before


def copy(dst: int, src: int, nbytes: int, stream: Stream) -> None:
    """Enqueue a copy between two addresses, in memory of any GPU or in pinned host memory."""
    if nbytes:
        stream.copy(dst, src, nbytes)


def copy_2d(
    dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: Stream
) -> None:
    """Enqueue a copy of ``rows`` rows of ``width`` bytes.

    Args:
        dst_pitch, src_pitch: bytes from the start of a row to the start of the next row, at least
            ``width`` and at most the device's ``max_pitch``.
    """
    if not width or not rows:
        return
    if rows == 1 or dst_pitch == src_pitch == width:
        stream.copy(dst, src, width * rows)
        return
    what = Copy2D()
    what.dst, what.dst_pitch = dst, dst_pitch
    what.src, what.src_pitch = src, src_pitch
    what.width, what.height = width, rows
    stream.copy_2d(addressof(what))


def owner_of(address: int) -> int | None:
    """Return the ordinal of the GPU that has the address; None for host memory."""
    loaded = driver()
    kind, ordinal = c_int(), c_int()
    code = _ask(loaded, kind, _MEMORY_TYPE, address)
    if code == INVALID_VALUE or (not code and kind.value != _ON_DEVICE):
        return None  # ordinary host memory, or pinned host memory
    loaded.check(code or _ask(loaded, ordinal, _DEVICE_ORDINAL, address), "owner of an address")
    return ordinal.value


def owner_of_stream(handle: int) -> int | None:
    """Return the ordinal of the GPU that has the stream.

    A default stream belongs to the GPU of the current context. If no context is current, return
    None for it.
    """
    loaded = driver()
    context, number = c_void_p(), c_int()
    if handle <= LAST_NAME:
        context.value = loaded.current()
    else:
        code = loaded.cuStreamGetCtx(handle, context)
        if code == INVALID_CONTEXT:
            with Entered(loaded, loaded.some()):
                code = loaded.cuStreamGetCtx(handle, context)
        loaded.check(code, "owner of a stream")
    if not context.value:
        return None
    with Entered(loaded, context.value):
        loaded.check(loaded.cuCtxGetDevice(number), "owner of a stream")
    return number.value


def _ask(loaded: Driver, answer: c_int, attribute: int, address: int) -> int:
    code = loaded.cuPointerGetAttribute(addressof(answer), attribute, address)
    if code == INVALID_CONTEXT:
        with Entered(loaded, loaded.some()):
            code = loaded.cuPointerGetAttribute(addressof(answer), attribute, address)
    return code


class Memory:
    """Memory of a GPU, made by :func:`allocate`. When dropped, it is freed in its stream's order.

    Attributes:
        address: address of the memory.
        nbytes: size in bytes.
        stream: stream on which the memory was allocated.
    """

    __slots__ = ("__weakref__", "_others", "address", "nbytes", "stream")

    def __init__(self, address: int, nbytes: int, stream: Stream) -> None:
        self.address = address
        self.nbytes = nbytes
        self.stream = stream
        self._others: set[Stream] = set()

    def used_on(self, stream: Stream) -> None:
        """Delay freeing until the work that is on ``stream`` at that time is done, too."""
        if stream != self.stream:
            self._others.add(stream)

    def __del__(self) -> None:
        # At exit the driver may be gone already. A forked child must not use the driver.
        with contextlib.suppress(Exception):
            if self.address:
                self._free()

    def _free(self) -> None:
        stream = self.stream
        for other in self._others:
            stream.wait_for(other)
        device = stream.device
        with device.active():
            if device.has_pools:
                device.driver.cuMemFreeAsync(self.address, stream.handle)
            else:
                stream.synchronize()
                device.driver.cuMemFree_v2(self.address)

    def __repr__(self) -> str:
        return f"Memory({self.nbytes} bytes of {self.stream.device})"


def allocate(device: Device, nbytes: int, stream: Stream) -> Memory:
    """Return uninitialised memory of ``device``, for use in ``stream``'s order.

    Other streams may use the memory after an event of ``stream``; the caller must name them with
    ``used_on``. Memory of zero bytes has the address 0.

    Raises:
        AllocationError: the GPU has too little memory.
    """
    if not nbytes:
        return Memory(0, 0, stream)
    address, loaded = c_void_p(), device.driver
    with device.active():
        if device.has_pools:
            code = loaded.cuMemAllocAsync(address, nbytes, stream.handle)
        else:
            code = loaded.cuMemAlloc_v2(address, nbytes)
    if code:
        loaded.fail(code, f"{device}: {nbytes} bytes")
    return Memory(address.value or 0, nbytes, stream)
