"""Kinds of arrays in the memory of GPUs: of nobody's (``cuda``), and CuPy's.

What a call's arrays span is copied to the GPU, gaps, strides and overlaps included; afterwards what
was written is copied back, and nothing beside it may have changed. So a library is given nothing
but pointers to the GPU's memory, and streams.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective import cuda
from collective.communicator import Communicator
from collective.deadline import Deadline
from collective.memory import device_layout
from collective.memory.arrays import adapter_like, adapter_of
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import from_numpy

from .kinds import Kind, Loan

__all__ = ["OnDevice", "on_device"]

Array = np.ndarray[Any, Any]

_ALIGNED = 64


@dataclass(frozen=True)
class OnDevice(Kind):
    """A kind whose arrays are copies in the memory of a rank's GPU."""

    def loan(self, comm: Communicator, hosts: Sequence[Array]) -> Loan:
        return _Copies(self, comm, hosts)

    def empty(self, comm: Communicator, shape: Any, dtype: Any) -> Array:
        if not comm.transport.enqueues:
            made: Array = comm.empty(shape, dtype)  # the transport's own is the host's
            return made
        made = comm.empty(shape, dtype, like=_one(self.name, comm))
        there, kind = adapter_of(made).view(made)
        return _as_numpy(_host_window(there), kind)


def on_device(name: str) -> OnDevice:
    """Return the kind of that name."""

    def read(x: Any) -> Array:
        array, dtype = adapter_of(x).view(x)
        return _as_numpy(array.to_host(), dtype)

    def of(x: Array) -> Any:
        raise TypeError(f"{name}: its arrays are those of a rank")

    cls = DeviceArray if name == "cuda" else __import__("cupy").ndarray
    return OnDevice(name, of, read, cls, name)


def _as_numpy(array: Any, dtype: Any) -> Array:
    """Return a host's array with the type of its elements, of which its own is the storage."""
    found: Array = adapter_like("numpy").wrap(array, dtype)
    return found


class _Extent:
    """Bytes of the host, and as many on the GPU."""

    def __init__(self, low: int, high: int, stream: cuda.Stream) -> None:
        self.low, self.high = low, high
        address, owner = _window(low, high)
        if owner is None:
            owner = cuda.allocate(stream.device, high - low, stream)
            address = owner.address
        self.there = DeviceArray(
            address, (high - low,), np.uint8, stream.device, stream, owner=owner
        )
        self.before = np.empty(high - low, np.uint8)
        ctypes.memmove(self.before.ctypes.data, low, high - low)
        self.there.fill_from_host(self.before)

    def elements(self, copied: Array, host: Array) -> Array:
        """Return those of ``host`` in a copy of the bytes."""
        offset = host.ctypes.data - self.low
        return np.ndarray(host.shape, host.dtype, copied.data, offset, host.strides)


class _Copies(Loan):
    """The arrays of one call on the GPU, and what lies between their elements."""

    def __init__(self, kind: OnDevice, comm: Communicator, hosts: Sequence[Array]) -> None:
        self._comm = comm
        # By name it would not be told which GPU.
        self.like = _one(kind.name, comm)
        seen = [adapter_of(host).view(host) for host in hosts]
        self._hosts = [host for host, _ in seen]
        self._stream = _stream(kind.name, _device_of(comm))
        self._spans = self._copied([_bounds(host) for host in self._hosts])
        self.made = []
        for host, dtype in seen:
            made = adapter_like(kind.name).wrap(self._there(host), dtype)
            self.made.append(made)

    def _copied(self, bounds: list[tuple[int, int]]) -> list[_Extent]:
        """Copy to the GPU what the arrays span, once where they overlap."""
        merged: list[list[int]] = []
        for low, high in sorted(each for each in bounds if each[0] < each[1]):
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        return [_Extent(low, high, self._stream) for low, high in merged]

    def _there(self, host: Array) -> DeviceArray:
        address, owner = 0, None
        for span in self._of(host):
            address = span.there.address + host.ctypes.data - span.low
            owner = span.there
        return DeviceArray(
            address, host.shape, host.dtype, self._stream.device, self._stream,
            strides=host.strides, owner=owner, writeable=host.flags.writeable,
        )  # fmt: skip

    def _of(self, host: Array) -> list[_Extent]:
        low, high = _bounds(host)
        return [span for span in self._spans if span.low <= low < high <= span.high]

    def end(self, call: str) -> None:
        backend = self._comm.transport
        if backend.enqueues:
            backend.synchronize_event(self._stream.record(), call, Deadline.never())

    def take_back(self, hosts: Sequence[Array], written: Sequence[bool]) -> None:
        outs = [host for host, changed in zip(self._hosts, written) if changed]
        copied = [span.there.to_host() for span in self._spans]
        for span, after in zip(self._spans, copied):
            mine = [host for host in outs if span in self._of(host)]
            for host in mine:
                span.elements(span.before, host)[...] = span.elements(after, host)
            assert (span.before == after).all(), "the call has written beside its out"
            for host in mine:
                host[...] = span.elements(after, host)


# -- memory -----------------------------------------------------------------------------------

# Memory of comm.empty(): where the host's array is -> its part of the GPU.
_windows: dict[int, DeviceArray] = {}


def _host_window(there: DeviceArray) -> Array:
    """Return an array of the host for memory that NCCL knows; the latter is kept with it."""
    raw = np.empty(there.nbytes + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    _windows[raw.ctypes.data + start] = there
    weakref.finalize(raw, _windows.pop, raw.ctypes.data + start).atexit = False
    made: Array = raw[start : start + there.nbytes].view(there.dtype).reshape(there.shape)
    return made


def _window(low: int, high: int) -> tuple[int, Any]:
    """Return where on the GPU bytes of such an array are, and what keeps them there."""
    for start, there in list(_windows.items()):
        if start <= low and high <= start + there.nbytes:
            return there.address + low - start, there
    return 0, None


def _device_of(comm: Communicator) -> cuda.Device:
    """Return a rank's GPU: its transport's, or one for each rank of the host."""
    own: cuda.Device | None = getattr(comm.transport, "device", None)
    return own or cuda.device(comm.local_rank % cuda.device_count())


def _one(name: str, comm: Communicator) -> Any:
    """Return some array of the kind in the memory of a rank's GPU."""
    device = _device_of(comm)
    stream = _stream(name, device)
    memory = cuda.allocate(device, 4, stream)
    made = DeviceArray(memory.address, (1,), np.float32, device, stream, owner=memory)
    return adapter_like(name).wrap(made, from_numpy(made.dtype))


@functools.cache
def _stream(name: str, device: cuda.Device) -> cuda.Stream:
    """Return where the arrays are used: of nobody's, a stream that waits for no other by itself."""
    return device.new_stream() if name == "cuda" else adapter_like(name).current_stream(device)


def _bounds(host: Array) -> tuple[int, int]:
    return device_layout.bounds(host.ctypes.data, host.shape, host.strides, host.itemsize)
