"""A communicator whose arrays are the host's, and whose calls are made in the memory of a GPU.

For the conformance suite, whose arrays are NumPy's: every array of a call is copied to the GPU,
with its strides and overlaps, the call is made there, and what it wrote is copied back when it
is over. So the library is given device pointers and streams only.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from collective import cuda, request
from collective.communicator import Communicator
from collective.contract.work import Work
from collective.errors import CollectiveError
from collective.memory import arrays, device_layout, nested
from collective.memory.arrays import Adapter, adapter_like, adapter_of
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import DType
from collective.testing import opening

__all__ = ["use"]

Array = np.ndarray[Any, Any]

_ALIGNED = 64
_CALLS = """
    send recv sendrecv broadcast reduce all_reduce scatter gather all_gather reduce_scatter
    all_to_all scan
""".split()


@functools.cache
def use() -> None:
    """Have the ranks of this process mirror their arrays from now on."""
    arrays._by_type[Mirror] = arrays._by_name["mirror"] = _Mirrors()
    opening.Communicator = Mirroring  # type: ignore[attr-defined]
    # In reports of where a call was made this file passes for one of the library's.
    request._PACKAGE = (request._PACKAGE, __file__)  # type: ignore[assignment]


class Mirror:
    """An array on the GPU, and the one that it mirrors, if it is no result.

    Results are NumPy's where they have come as an object: a structure that was sent.
    """

    def __init__(self, array: DeviceArray | Array, dtype: DType, given: Any = None) -> None:
        self.array = array
        self.dtype = dtype
        self.given = given


class _Mirrors(Adapter):
    """Lets the library take mirrors for arrays of one more framework."""

    name = "mirror"

    def view(self, x: Mirror) -> tuple[Any, DType]:
        return x.array, x.dtype

    def output(self, x: Mirror) -> tuple[Any, DType]:
        adapter_of(x.given).output(x.given)  # which refuses what is read-only
        return self.view(x)

    def wrap(self, array: DeviceArray | Array, dtype: DType) -> Mirror:
        return Mirror(array, dtype)

    def empty(self, shape: Any, dtype: DType, device: Any, stream: Any = None) -> DeviceArray:
        made: DeviceArray = super().empty(shape, dtype, device, _stream(device))
        return made

    def current_stream(self, device: cuda.Device, stream: Any = None) -> cuda.Stream:
        return _stream(device)


class _Span:
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
        return np.ndarray(
            host.shape, host.dtype, copied.data, host.ctypes.data - self.low, host.strides
        )


class _Arrays:
    """The arrays of one call."""

    def __init__(self, x: Any, out: Any, like: Any, stream: cuda.Stream) -> None:
        self._stream = stream
        self._adapters = [adapter_like(like)] if like is not None else []
        inputs, outs = (list(filter(_mirrored, nested.flatten(each))) for each in (x, out))
        leaves = [*inputs, *outs]
        hosts = [adapter_of(leaf).view(leaf) for leaf in leaves]
        self._spans = self._copied([_bounds(host) for host, _ in hosts])
        mirrors = iter(
            [self._mirror(leaf, host, dtype) for leaf, (host, dtype) in zip(leaves, hosts)]
        )
        self.x, self.out = (self._replaced(given, mirrors) for given in (x, out))
        self._given = {id(self.x): x, id(self.out): out}
        self._adapters += map(adapter_of, inputs)
        self._outs = [host for host, _ in hosts[len(inputs) :]]

    def _copied(self, bounds: list[tuple[int, int]]) -> list[_Span]:
        """Copy to the GPU what the arrays span, once where they overlap."""
        merged: list[list[int]] = []
        for low, high in sorted(each for each in bounds if each[0] < each[1]):
            for work in list(_flying):
                if work.writes(low, high):
                    # What it holds is still to come.
                    with suppress(CollectiveError):
                        work.wait()
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
            else:
                merged.append([low, high])
        return [_Span(low, high, self._stream) for low, high in merged]

    def _mirror(self, given: Any, host: Array, dtype: DType) -> Mirror:
        address, owner = 0, None
        for span in self._of(host):
            address = span.there.address + host.ctypes.data - span.low
            owner = span.there
        array = DeviceArray(
            address, host.shape, host.dtype, self._stream.device, self._stream,
            strides=host.strides, owner=owner, writeable=host.flags.writeable,
        )  # fmt: skip
        return Mirror(array, dtype, given)

    @staticmethod
    def _replaced(given: Any, mirrors: Any) -> Any:
        leaves = [next(mirrors) if _mirrored(leaf) else leaf for leaf in nested.flatten(given)]
        return nested.rebuild(given, iter(leaves))

    def _of(self, host: Array) -> list[_Span]:
        low, high = _bounds(host)
        return [span for span in self._spans if span.low <= low < high <= span.high]

    def writes(self, low: int, high: int) -> bool:
        """Tell whether the call writes to these bytes of the host."""
        return any(start < high and low < end for start, end in map(_bounds, self._outs))

    def finish(self, result: Any) -> Any:
        """Copy back what was written, and return the result as the host's."""
        copied = [span.there.to_host() for span in self._spans]
        for span, after in zip(self._spans, copied):
            expected = span.before
            for host in self._outs:
                if span in self._of(host):
                    span.elements(expected, host)[...] = span.elements(after, host)
            assert (expected == after).all(), "the call has written beside its out"
            for host in self._outs:
                if span in self._of(host):
                    host[...] = span.elements(after, host)
        if id(result) in self._given:
            return self._given[id(result)]
        leaves = nested.flatten(result)
        adapters = self._adapters or [adapter_like("numpy")]
        if len(adapters) != len(leaves):
            adapters = adapters[:1] * len(leaves)
        return nested.rebuild(result, map(_as_the_hosts, leaves, adapters))


class MirroredWork(Work[Any]):
    """A call on its way; its arrays are copied back by whoever first learns that it is over."""

    def __init__(self, work: Work[Any], arrays: _Arrays) -> None:
        super().__init__(work._what)
        self._work = work
        self._arrays: _Arrays | None = arrays
        _flying.add(self)

    def writes(self, low: int, high: int) -> bool:
        return self._arrays is not None and self._arrays.writes(low, high)

    def wait(self, timeout: float | None = None) -> Any:
        result = self._work.synchronize(timeout)
        if self._arrays is not None:
            self._result = self._arrays.finish(result)
            self._arrays = None
        return self._result

    def done(self) -> bool:
        if not self._work.done():
            return False
        with suppress(CollectiveError):
            self.wait()
        return True

    def exception(self) -> BaseException | None:
        return self._work.exception()


_flying: weakref.WeakSet[MirroredWork] = weakref.WeakSet()


class Mirroring(Communicator):
    """A communicator as the suite knows it, whose calls are made on the GPU."""

    def empty(self, shape: Any, dtype: Any = "float32", like: Any = None) -> Any:
        if self._on_host:
            return super().empty(shape, dtype, like)
        adapter = adapter_like("numpy" if like is None else like)
        made = super().empty(shape, dtype, "mirror")
        return adapter.wrap(_host_window(made.array), made.dtype)

    def _child(self, backend: Any, members: Sequence[int]) -> Communicator:
        child = super()._child(backend, members)
        child.__class__ = Mirroring
        return child


def _mirroring(method: Callable[..., Any]) -> Any:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Mirroring, *args: Any, **options: Any) -> Any:
        given = signature.bind(self, *args, **options).arguments
        x, out, like = (given.get(name) for name in ("x", "out", "like"))
        inner = isinstance(like, str) and like == "mirror"
        if self._on_host or inner or any(type(each) is Mirror for each in nested.flatten([x, out])):
            return method(self, *args, **options)  # a step of a call
        stream = _stream(self._backend.device)
        moved = _Arrays(x, out, like, stream)
        for name, value in (("x", moved.x), ("out", moved.out), ("like", "mirror")):
            if name in given or (name == "like" and name in signature.parameters):
                given[name] = value
        rest = {name: value for name, value in given.items() if name != "self"}
        result = method(self, **rest)
        if isinstance(result, Work):
            return MirroredWork(result, moved)
        self._backend.synchronize_event(stream.record(), method.__name__, None)
        return moved.finish(result)

    return call


for _name in _CALLS:
    setattr(Mirroring, _name, _mirroring(getattr(Communicator, _name)))


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


@functools.cache
def _stream(device: cuda.Device) -> cuda.Stream:
    """Return the current stream of these arrays: one that waits for no other by itself."""
    return device.new_stream()


def _mirrored(leaf: Any) -> bool:
    return leaf is not None and type(leaf) is not Mirror and arrays.is_array(leaf)


def _bounds(host: Array) -> tuple[int, int]:
    return device_layout.bounds(host.ctypes.data, host.shape, host.strides, host.itemsize)


def _as_the_hosts(leaf: Any, adapter: Adapter) -> Any:
    if type(leaf) is not Mirror or leaf.given is not None:
        return getattr(leaf, "given", leaf)
    array = leaf.array if isinstance(leaf.array, np.ndarray) else leaf.array.to_host()
    return adapter.wrap(array, leaf.dtype)
