"""Kinds of arrays in the memory of GPUs: of no framework (``cuda``), and CuPy's.

The memory that a call's arrays span is copied to the GPU, with gaps, strides and overlaps.
Afterwards the arrays that the call has written are copied back, and the memory beside them must be
unchanged. So a transport's library gets only pointers to the GPU's memory, and streams.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective import Communicator
from collective.inner import Deadline, DeviceArray, adapter_like, cuda, dtypes
from collective.memory import arrays, device_layout

from .frameworks import framework
from .kinds import Kind, Loan

Array = np.ndarray[Any, Any]

_ALIGNED = 64


@dataclass(frozen=True)
class OnDevice(Kind):
    """Kind whose arrays are copies in the memory of a rank's GPU."""

    def loan(self, comm: Communicator, hosts: Sequence[Array], written: Sequence[bool]) -> Loan:
        return _Copies(self, comm, hosts)

    def empty(self, comm: Communicator, shape: Any, dtype: Any) -> Array:
        if not comm.inner.transport.enqueues:
            # This transport allocates memory of the host.
            made: Array = comm.empty(shape, dtype)
            return made
        made = comm.empty(shape, dtype, like=_one(self.name, comm))
        on_gpu, kind = arrays.adapter_of(made).view(made)
        return _as_numpy(_host_window(on_gpu), kind)


def on_device(name: str) -> OnDevice:
    """Return the :class:`OnDevice` of a name, ``"cuda"`` or ``"cupy"``."""

    def read(x: Any) -> Array:
        array, dtype = arrays.adapter_of(x).view(x)
        return _as_numpy(array.to_host(), dtype)

    def of(x: Array) -> Any:
        raise TypeError(f"{name}: an array of this kind needs the GPU of a rank")

    return OnDevice(name, of, read, framework(name).type, name)


def _as_numpy(array: Any, dtype: Any) -> Array:
    """Return NumPy's array of ``dtype``, given an array in the storage of ``dtype``."""
    wrapped: Array = adapter_like("numpy").wrap(array, dtype)
    return wrapped


class _Extent:
    """A range of the host's bytes, and a copy of them on the GPU."""

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
        """Return the elements of ``host``, given a copy of the range's bytes."""
        offset = host.ctypes.data - self.low
        return np.ndarray(host.shape, host.dtype, copied.data, offset, host.strides)


class _Copies(Loan):
    """Copies on the GPU of the arrays of one call, and of the bytes between their elements."""

    def __init__(self, kind: OnDevice, comm: Communicator, hosts: Sequence[Array]) -> None:
        self._comm = comm
        # An array and not the name: only an array tells the call on which GPU results should be.
        self.like = _one(kind.name, comm)
        seen = [arrays.adapter_of(host).view(host) for host in hosts]
        self._hosts = [host for host, _ in seen]
        self._stream = _stream(kind.name, _device_of(comm))
        self._spans = self._copied([_bounds(host) for host in self._hosts])
        self.made = []
        for host, dtype in seen:
            made = adapter_like(kind.name).wrap(self._there(host), dtype)
            self.made.append(made)

    def _copied(self, bounds: list[tuple[int, int]]) -> list[_Extent]:
        """Copy the given address ranges to the GPU; ranges that overlap are copied once."""
        merged: list[list[int]] = []
        for low, high in sorted(span for span in bounds if span[0] < span[1]):
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
        backend = self._comm.inner.transport
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

# Memory of comm.empty(): address of the host's array -> the memory on the GPU that it stands for.
_windows: dict[int, DeviceArray] = {}


def _host_window(there: DeviceArray) -> Array:
    """Return an array of the host that stands for memory of the GPU, and keep both together."""
    raw = np.empty(there.nbytes + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    _windows[raw.ctypes.data + start] = there
    weakref.finalize(raw, _windows.pop, raw.ctypes.data + start).atexit = False
    window: Array = raw[start : start + there.nbytes].view(there.dtype).reshape(there.shape)
    return window


def _window(low: int, high: int) -> tuple[int, Any]:
    """Return the GPU's address for bytes of a host window, and the owner of the GPU's memory."""
    for start, there in list(_windows.items()):
        if start <= low and high <= start + there.nbytes:
            return there.address + low - start, there
    return 0, None


def _device_of(comm: Communicator) -> cuda.Device:
    """Return a rank's GPU: that of its transport, else a GPU by the local rank."""
    own: cuda.Device | None = getattr(comm.inner.transport, "device", None)
    return own or cuda.device(comm.local_rank % cuda.device_count())


def _one(name: str, comm: Communicator) -> Any:
    """Return an array of the kind with one element, in the memory of a rank's GPU."""
    device = _device_of(comm)
    stream = _stream(name, device)
    memory = cuda.allocate(device, 4, stream)
    array = DeviceArray(memory.address, (1,), np.float32, device, stream, owner=memory)
    return adapter_like(name).wrap(array, dtypes.from_numpy(array.dtype))


@functools.cache
def _stream(name: str, device: cuda.Device) -> cuda.Stream:
    """Return the stream for the arrays of a kind: a new one for ``cuda``, else the current one.

    A new stream does not synchronise with any other stream by itself.
    """
    return device.new_stream() if name == "cuda" else adapter_like(name).current_stream(device)


def _bounds(host: Array) -> tuple[int, int]:
    return device_layout.bounds(host.ctypes.data, host.shape, host.strides, host.itemsize)
