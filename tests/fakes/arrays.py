"""Array of an unknown framework, in the fake's device memory and on a stream."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from typing import Any

import numpy as np

from tests.fakes.handle import Fake

_streams: dict[int, int] = {}  # by device: the stream of threads that have set no other stream
_threads = threading.local()
_lock = threading.Lock()


def current_stream(device: int = 0) -> int:
    """Return the handle of the stream that new arrays on this device use."""
    chosen: int | None = getattr(_threads, "streams", {}).get(device)
    if chosen is not None:
        return chosen
    with _lock:
        if device not in _streams:
            _streams[device] = Fake().stream(device)
        return _streams[device]


def set_current_stream(stream: int | None, device: int = 0) -> None:
    """Set the stream of this thread's new arrays on a device; None restores the default stream."""
    _threads.streams = {**getattr(_threads, "streams", {}), device: stream}


def _extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return how many bytes an array spans before its first element, and from there on."""
    if 0 in shape:
        return 0, 0
    reach = [(n - 1) * step for n, step in zip(shape, strides)]
    before = -sum(r for r in reach if r < 0)
    return before, sum(r for r in reach if r > 0) + itemsize


class FakeArray:
    """Device memory with a shape, as frameworks export it.

    A copy on the array's stream writes the contents, so a read without waiting for the stream
    returns poison. When the array is dropped, its memory is freed in the order of the stream.

    Attributes:
        address: address of the first element, as an int.
        device: ordinal of the device.
        stream: handle of the array's stream, as in __cuda_array_interface__.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any = "float32",
        strides: tuple[int, ...] | None = None,
        device: int = 0,
        stream: int | None = None,
    ) -> None:
        self.shape, self.dtype, self.device = tuple(shape), np.dtype(dtype), device
        self.stream = current_stream(device) if stream is None else stream
        self.strides = np.empty(shape, self.dtype).strides if strides is None else tuple(strides)
        self.readonly = False
        self._fake = Fake()
        self._before, after = _extent(self.shape, self.strides, self.dtype.itemsize)
        self._nbytes = self._before + after
        self._block = 0
        if self._nbytes:
            block = ctypes.c_uint64()
            handle = ctypes.c_void_p(self.stream)
            with self._fake.active(device):
                arguments = ctypes.byref(block), ctypes.c_size_t(self._nbytes), handle
                self._fake.cuda("cuMemAllocAsync", *arguments)
            self._block = block.value
            self._freed = weakref.finalize(self, _free, self._block, self.stream, device)
            self._freed.atexit = False
        self.address = self._block + self._before if self._block else 0

    @classmethod
    def of(cls, array: Any, device: int = 0, stream: int | None = None) -> FakeArray:
        """Return an array with the values and the strides of a NumPy array.

        The bytes between the elements are poison, and should stay poison.
        """
        array = np.asarray(array)
        copy = cls(array.shape, array.dtype, array.strides, device, stream)
        copy.set(array)
        return copy

    def set(self, values: Any) -> None:
        """Overwrite the elements by a copy on the array's stream."""
        if not self._nbytes:
            return
        staged = np.full(self._nbytes, 0xCB, np.uint8)
        self._view(staged)[...] = values
        staging = ctypes.c_void_p(staged.ctypes.data)
        with self._fake.active(self.device):
            arguments = ctypes.c_uint64(self._block), staging, ctypes.c_size_t(self._nbytes)
            self._fake.cuda("cuMemcpyHtoDAsync_v2", *arguments, ctypes.c_void_p(self.stream))
        _keep_until_done(staged, self.stream, self.device)

    def get(self) -> np.ndarray[Any, Any]:
        """Return a copy as a NumPy array, once the stream is done."""
        self._fake.synchronize(self.stream, self.device)
        return self.peek()

    def peek(self) -> np.ndarray[Any, Any]:
        """Return a copy as a NumPy array, without waiting for the stream."""
        return self._view(self.memory()).copy()

    def memory(self) -> np.ndarray[Any, Any]:
        """Return the current bytes that the array spans, with the gaps between elements."""
        if not self._nbytes:
            return np.empty(0, np.uint8)
        return np.ctypeslib.as_array((ctypes.c_uint8 * self._nbytes).from_address(self._block))

    def forget(self) -> None:
        """Keep the memory: do not free it when the array is dropped."""
        self._freed.detach()

    def _view(self, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if not self._nbytes:
            return np.empty(self.shape, self.dtype)
        return np.ndarray(self.shape, self.dtype, memory.data, self._before, self.strides)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        contiguous = np.empty(self.shape, self.dtype).strides == self.strides
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, self.readonly),
            "strides": None if contiguous else self.strides,
            "stream": self.stream,
            "version": 3,
        }


def _free(block: int, stream: int, device: int) -> None:
    fake = Fake()
    with fake.active(device):
        fake.cuda("cuMemFreeAsync", ctypes.c_uint64(block), ctypes.c_void_p(stream))


_staged: list[
    tuple[Any, Any]
] = []  # host memory, and the event after which the memory may be freed


def _keep_until_done(memory: Any, stream: int, device: int) -> None:
    fake = Fake()
    event = ctypes.c_void_p()
    with fake.active(device):
        fake.cuda("cuEventCreate", ctypes.byref(event), 2)
        fake.cuda("cuEventRecord", event, ctypes.c_void_p(stream))
    with _lock:
        waiting = []
        for entry in [*_staged, (memory, event)]:
            if fake.library.cuEventQuery(entry[1]):
                waiting.append(entry)
            else:
                fake.library.cuEventDestroy_v2(entry[1])
        _staged[:] = waiting
