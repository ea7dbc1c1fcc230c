"""Classes of a GPU, its streams and its events; :mod:`collective.cuda` returns their objects."""

from __future__ import annotations

import contextlib
from ctypes import c_int, c_void_p, create_string_buffer
from typing import Any

from .library import INVALID_CONTEXT, NOT_READY, Driver, Entered, Function

# Values of CUdevice_attribute.
_MAX_PITCH, _MEMORY_POOLS = 11, 115
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
#: Handles up to this value are names, not streams: 0 and 1 name the default stream of the current
#: context, and 2 names the default stream of the current context and thread.
LAST_NAME = 2
# Maximum number of the callers' streams that a device remembers.
_REMEMBERED = 1024


class Device:
    """A GPU. :func:`device` makes the objects.

    Attributes:
        ordinal: number of the GPU in this process.
        name: name of the model.
        bus_id: address on the PCI bus, the same in all processes of the host.
        max_pitch: largest number of bytes from row to row in :func:`copy_2d`.
    """

    def __init__(self, loaded: Driver, ordinal: int) -> None:
        self.driver = loaded
        self.ordinal = ordinal
        number, name = c_int(), create_string_buffer(256)
        bus, what = create_string_buffer(32), f"cuda:{ordinal}"
        loaded.check(loaded.cuDeviceGet(number, ordinal), what)
        loaded.check(loaded.cuDeviceGetName(name, len(name), number.value), what)
        loaded.check(loaded.cuDeviceGetPCIBusId(bus, len(bus), number.value), what)
        self.name = name.value.decode(errors="replace")
        self.bus_id = bus.value.decode(errors="replace").lower()
        self.max_pitch = self._attribute(number.value, _MAX_PITCH) or 0x7FFFFFFF
        self.has_pools = bool(self._attribute(number.value, _MEMORY_POOLS))
        self._streams: dict[int, Stream] = {}
        # Unused CUevents. list.append and list.pop need no lock.
        self.events: list[int] = []

    def _attribute(self, number: int, which: int) -> int:
        value = c_int()
        self.driver.check(
            self.driver.cuDeviceGetAttribute(value, which, number), f"cuda:{self.ordinal}"
        )
        return value.value

    @property
    def context(self) -> int:
        """The primary context; the first use makes it."""
        return self.driver.primary(self.ordinal)

    def active(self) -> Entered:
        """Make the GPU's primary context current in this thread, for a ``with`` body.

        After the body, the earlier context is current again.
        """
        return Entered(self.driver, self.driver.primary(self.ordinal))

    def stream(self, handle: int) -> Stream:
        """Return the object for a stream that the caller has made and keeps alive.

        Args:
            handle: a CUstream; 0 or 1 for the legacy default stream, 2 for the thread's.
        """
        stream = self._streams.get(handle)
        if stream is None:
            if len(self._streams) >= _REMEMBERED:
                self._streams.clear()
            kind = _DefaultStream if handle <= LAST_NAME else Stream
            stream = self._streams[handle] = kind(self, handle)
        return stream

    def new_stream(self) -> Stream:
        """Return a new stream, which does not wait for the default stream.

        The stream is destroyed when the object is dropped. Work that is on it is still done.
        """
        handle = c_void_p()
        with self.active():
            code = self.driver.cuStreamCreate(handle, _NON_BLOCKING)
        self.driver.check(code, f"{self}: new stream")
        return _OwnStream(self, handle.value or 0)

    def new_event(self) -> int:
        """Return a new CUevent, which will belong to the pool."""
        handle = c_void_p()
        with self.active():
            code = self.driver.cuEventCreate(handle, _NO_TIMING)
        self.driver.check(code, f"{self}: new event")
        return handle.value or 0

    def __str__(self) -> str:
        return f"cuda:{self.ordinal}"

    def __repr__(self) -> str:
        return f"Device(cuda:{self.ordinal}, {self.name!r}, {self.bus_id})"


class Event:
    """A point in a stream's work. :meth:`Stream.record` makes the objects.

    The CUevent comes from a pool of the device. It goes back there by :meth:`release`, or
    when the object is dropped.

    Attributes:
        device: GPU of the event.
        handle: the CUevent.
    """

    __slots__ = ("_driver", "device", "handle")

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self.handle = handle
        self._driver = device.driver

    def query(self) -> bool:
        """Tell, without waiting, whether the work before the event is done."""
        query = self._driver.cuEventQuery
        code = query(self.handle)
        return not code or _ready(code, query, self.handle, self.device)

    def synchronize(self) -> None:
        """Wait until the work before the event is done.

        Other threads can run meanwhile. Signal handlers run only after the wait.
        """
        code = self._driver.cuEventSynchronize(self.handle)
        if code == INVALID_CONTEXT:
            with self.device.active():
                code = self._driver.cuEventSynchronize(self.handle)
        if code:
            self._driver.fail(code, f"{self.device}: event")

    def release(self) -> None:
        """Give the event back to the pool; the caller must not use it afterwards.

        Streams that already wait for the event still wait for the same point.
        """
        handle = self.handle
        if handle:
            self.handle = 0
            self.device.events.append(handle)

    __del__ = release

    def __repr__(self) -> str:
        return f"Event({self.device}, {self.handle:#x})"


class Stream:
    """Queue of work of a GPU. Objects are equal if they stand for the same queue.

    Attributes:
        device: the GPU.
        handle: the CUstream.
    """

    __slots__ = ("__weakref__", "_driver", "_events", "device", "handle")

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self.handle = handle
        self._driver = device.driver
        self._events = device.events

    def record(self) -> Event:
        """Return an event behind all work that is on the stream now."""
        try:
            event = self._events.pop()
        except IndexError:
            event = self.device.new_event()
        code = self._driver.cuEventRecord(event, self.handle)
        if code:
            self._again(code, self._driver.cuEventRecord, event, self.handle)
        return Event(self.device, event)

    def wait(self, event: Event) -> None:
        """Make work that is enqueued from now on wait for the event; return at once."""
        code = self._driver.cuStreamWaitEvent(self.handle, event.handle, 0)
        if code:
            self._again(code, self._driver.cuStreamWaitEvent, self.handle, event.handle, 0)

    def wait_for(self, other: Stream) -> None:
        """Make work that is enqueued from now on wait for all work that is on ``other`` now."""
        if other is not self and other != self:
            event = other.record()
            self.wait(event)
            event.release()

    def synchronize(self) -> None:
        """Wait until all work is done.

        Other threads can run meanwhile. Signal handlers run only after the wait.
        """
        code = self._driver.cuStreamSynchronize(self.handle)
        if code:
            self._again(code, self._driver.cuStreamSynchronize, self.handle)

    def query(self) -> bool:
        """Tell, without waiting, whether all work is done."""
        query = self._driver.cuStreamQuery
        code = query(self.handle)
        return not code or _ready(code, query, self.handle, self.device)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Enqueue a copy of at least 1 byte; :func:`collective.cuda.copy` also takes 0 bytes."""
        code = self._driver.cuMemcpyAsync(dst, src, nbytes, self.handle)
        if code:
            self._again(code, self._driver.cuMemcpyAsync, dst, src, nbytes, self.handle)

    def copy_2d(self, what: int) -> None:
        """Enqueue the copy that a CUDA_MEMCPY2D at address ``what`` describes."""
        code = self._driver.cuMemcpy2DAsync_v2(what, self.handle)
        if code:
            self._again(code, self._driver.cuMemcpy2DAsync_v2, what, self.handle)

    def _again(self, code: int, function: Function, *args: Any) -> None:
        """Repeat a call that failed because this thread has no context; raise other errors."""
        if code == INVALID_CONTEXT:
            with self.device.active():
                code = function(*args)
        if code:
            name = getattr(function, "__name__", "")
            self._driver.fail(code, f"{self.device}: {name} on stream {self.handle:#x}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        # Handles 0 and 1 name the same queue.
        return self.device is other.device and (self.handle or 1) == (other.handle or 1)

    def __hash__(self) -> int:
        return hash((self.device.ordinal, self.handle or 1))

    def __repr__(self) -> str:
        return f"Stream({self.device}, {self.handle:#x})"


class _DefaultStream(Stream):
    """Default stream, whose handle is only a name: it means the stream of the current context.

    So each method makes the context of its GPU current.
    """

    __slots__ = ("_context",)

    def __init__(self, device: Device, handle: int) -> None:
        super().__init__(device, handle)
        self._context = device.context

    def record(self) -> Event:
        if self._driver.current() == self._context:
            return Stream.record(self)
        with self.device.active():
            return Stream.record(self)

    def wait(self, event: Event) -> None:
        if self._driver.current() == self._context:
            Stream.wait(self, event)
            return
        with self.device.active():
            Stream.wait(self, event)

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        with self.device.active():
            super().copy(dst, src, nbytes)

    def copy_2d(self, what: int) -> None:
        with self.device.active():
            super().copy_2d(what)

    def synchronize(self) -> None:
        with self.device.active():
            super().synchronize()

    def query(self) -> bool:
        with self.device.active():
            return super().query()


class _OwnStream(Stream):
    """Stream that is destroyed with its object."""

    __slots__ = ()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._driver.cuStreamDestroy_v2(self.handle)


def _ready(code: int, query: Function, handle: int, device: Device) -> bool:
    """Return the result of a query; repeat it if it failed because this thread has no context."""
    if code == INVALID_CONTEXT:
        with device.active():
            code = query(handle)
    if code == NOT_READY:
        return False
    if code:
        device.driver.fail(code, f"{device}: query")
    return True
