"""Calls that have been made before, as a training step makes the same ones again and again.

What is found out about one holds for the next. Where both arrays are contiguous views (of
symmetric memory, say), the buffers are kept, too, for as long as the arrays live: such a view
can be neither moved nor resized. An array that owns its memory could, and a buffer over it would
keep it alive. A framework's array on the CPU may get other memory at any time: it is kept for as
long as it lives, and compared with where it was. On a GPU memory is known by its address and
layout, and nothing is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collective.memory.arrays import Adapter, adapter_of, known_adapter
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType

from .plan import Plan

__all__ = ["REMEMBERED", "Prepared", "Repeated"]

Array = np.ndarray[Any, Any]

#: Distinct calls that are remembered. A program makes some dozens; one whose shapes keep
#: changing must not grow for ever.
REMEMBERED = 1024

#: Input, output and what makes the call on them.
Prepared = tuple[Buffer, Buffer, Plan]


class _Kept(NamedTuple):
    """A call on views that has been made before: what it took to make it."""

    x: Callable[[], Any]
    x_dtype: np.dtype[Any]
    x_shape: tuple[int, ...]
    out: Callable[[], Any]
    out_dtype: np.dtype[Any]
    out_shape: tuple[int, ...]
    prepared: Prepared


class _Settled(NamedTuple):
    """A call on a framework's arrays on the CPU that has been made twice before.

    The buffers keep the memory alive, so that nothing else can come to be at its address.
    """

    x: Callable[[], Any]
    x_place: Any
    out: Callable[[], Any]
    out_place: Any
    adapter: Adapter
    prepared: Prepared


class Repeated:
    """The calls of one communicator that are remembered."""

    def __init__(self) -> None:
        self._views: dict[Any, _Kept] = {}
        self._owned: dict[Any, tuple[DType, Plan]] = {}
        self._settled: dict[Any, _Settled] = {}
        # Made once so far, as most arrays of a framework are there for one call only; and
        # whether it has turned out since that such a call cannot be kept.
        self._seen: dict[Any, tuple[Callable[[], Any], bool]] = {}
        self._on_gpu: dict[Any, Prepared] = {}

    def find(self, key: Any, x: Any, out: Any) -> Prepared | None:
        """Return what was kept for this call, if the arrays are such.

        Args:
            key: the call without its arrays.
        """
        if type(x) is not np.ndarray or type(out) is not np.ndarray:
            if out is None:
                return None
            settled = self._settled.get((key, id(x), id(out)))
            if settled is None:
                return self._find_on_gpu(key, x, out)
            return self._still(settled, key, x, out)
        if x.base is None and out.base is None:
            return self._alike(key, x, out)
        kept = self._views.get((key, id(x), id(out)))
        if kept is None or kept.x() is not x or kept.out() is not out:
            return None
        if x.dtype is not kept.x_dtype or x.shape != kept.x_shape or not out.flags.writeable:
            return None
        if out is not x and (out.dtype is not kept.out_dtype or out.shape != kept.out_shape):
            return None
        return kept.prepared

    def _alike(self, key: Any, x: Array, out: Array) -> Prepared | None:
        """Return what was kept for a call on other arrays that own their memory, like these."""
        if out is x:
            found = self._owned.get((key, x.dtype, x.shape))
            if found is None or not x.flags.carray:
                return None
            dtype, plan = found
            src = Buffer(x if x.ndim == 1 else x.reshape(-1), dtype)
            return src, src, plan
        found = self._owned.get((key, x.dtype, x.shape, out.dtype, out.shape))
        if found is None or not (_is_own(x) and _is_own(out)):
            return None
        dtype, plan = found
        src = Buffer(x if x.ndim == 1 else x.reshape(-1), dtype)
        # Each in memory of its own, they do not overlap.
        return src, Buffer(out if out.ndim == 1 else out.reshape(-1), dtype), plan

    def keep(self, key: Any, x: Any, out: Any, src: Buffer, dst: Buffer, plan: Plan) -> None:
        """Keep ``plan`` for the next such call, if both arrays are as :meth:`_kept` wants."""
        if type(x) is not np.ndarray or type(out) is not np.ndarray:
            if out is None:
                return
            if isinstance(src.array, np.ndarray):
                self._settle(key, x, out, src, dst, plan)
            else:
                self._keep_on_gpu(key, x, out, src, dst, plan)
            return
        if x.base is None and out.base is None:
            if _is_own(x) and _is_own(out) and _is_all_of(src, x) and _is_all_of(dst, out):
                if len(self._owned) >= REMEMBERED:
                    self._owned.clear()
                likeness: tuple[Any, ...] = (key, x.dtype, x.shape)
                if out is not x:
                    likeness += (out.dtype, out.shape)
                self._owned[likeness] = src.dtype, plan
            return
        for array, buffer in ((x, src), (out, dst)):
            if not array.flags.carray:
                return
            base = buffer.array.base
            if base is None or base is x or base is out or base is not array.base:
                return
        if len(self._views) >= REMEMBERED:
            self._views.clear()
        src.memo, dst.memo = {}, {}
        name = key, id(x), id(out)

        def forget(_: object) -> None:
            self._views.pop(name, None)

        self._views[name] = _Kept(
            weakref.ref(x, forget), x.dtype, x.shape,
            weakref.ref(out, forget), out.dtype, out.shape, (src, dst, plan),
        )  # fmt: skip

    # -- of a framework, on the CPU -------------------------------------------------------

    def _still(self, settled: _Settled, key: Any, x: Any, out: Any) -> Prepared | None:
        """Return what was kept if the arrays are the same, where and as they were."""
        if settled.x() is x and settled.out() is out:
            place = settled.adapter.place
            if place(x) == settled.x_place and (out is x or place(out) == settled.out_place):
                return settled.prepared
        self._settled.pop((key, id(x), id(out)), None)  # lets go of memory it no longer has
        return None

    def _settle(self, key: Any, x: Any, out: Any, src: Buffer, dst: Buffer, plan: Plan) -> None:
        adapter = known_adapter(x)
        x_place = None if adapter is None else adapter.place(x)
        if adapter is None or x_place is None or known_adapter(out) is not adapter:
            return
        name = key, id(x), id(out)
        seen = self._seen.get(name)
        if seen is None or seen[0]() is not x:
            if len(self._seen) >= REMEMBERED:
                self._seen.clear()
            self._seen[name] = weakref.ref(x), False
            return
        if seen[1]:
            return
        out_place = adapter.place(out)
        source = _alias(adapter, x, src)
        target = None if out_place is None else _alias(adapter, out, dst)
        if source is None or target is None:
            self._seen[name] = seen[0], True
            return
        if dst is src:
            target = source
        del self._seen[name]
        if len(self._settled) >= REMEMBERED:
            self._settled.clear()

        def forget(_: object) -> None:
            self._settled.pop(name, None)

        self._settled[name] = _Settled(
            weakref.ref(x, forget), x_place, weakref.ref(out, forget), out_place, adapter,
            (source, target, plan),
        )  # fmt: skip

    # -- on a GPU -------------------------------------------------------------------------

    def _find_on_gpu(self, key: Any, x: Any, out: Any) -> Prepared | None:
        if not self._on_gpu:
            return None
        adapter = known_adapter(x)
        prepared = self._on_gpu.get(_place(adapter, key, x, out))
        if prepared is None or adapter is None:
            return None
        source: Any = prepared[0].array
        target: Any = prepared[1].array
        source.stream = target.stream = adapter.current_stream(source.device, source.stream)
        return prepared

    def _keep_on_gpu(
        self, key: Any, x: Any, out: Any, src: Buffer, dst: Buffer, plan: Plan
    ) -> None:
        adapter = known_adapter(x)
        name = _place(adapter, key, x, out)
        if name is None or adapter is None:
            return
        source: Any = src.array
        target: Any = dst.array
        if known_adapter(out) is not adapter or source.stream != target.stream:
            return  # on streams of their own, of which each has to wait for the other
        bare = []
        for given, buffer in ((x, src), (out, dst)):
            array: Any = adapter_of(given).view(given)[0]
            if buffer.address != array.address or not array.flags.carray:
                return  # packed for this call
            bare.append(Buffer(_ownerless(buffer.array), buffer.dtype))
        if len(self._on_gpu) >= REMEMBERED:
            self._on_gpu.clear()
        if src is dst:
            bare[1] = bare[0]
        self._on_gpu[name] = bare[0], bare[1], plan


def _alias(adapter: Adapter, x: Any, buffer: Buffer) -> Buffer | None:
    """Return a buffer over the memory of ``x`` that does not refer to ``x``.

    None unless it is the same as ``buffer``, which may have been packed for one call.
    """
    array = adapter.alias(x)
    if array is None:
        return None
    found = Buffer(array.reshape(-1), buffer.dtype)
    if found.address != buffer.address or found.count != buffer.count:
        return None
    found.memo = {}
    return found


def _place(adapter: Any, key: Any, x: Any, out: Any) -> Any:
    """Return by what a call on arrays of a GPU is known, None if they are not such."""
    where = None if adapter is None else adapter.place(x)
    if where is None or out is x:
        return where and (key, where)
    other = adapter if type(out) is type(x) else known_adapter(out)
    target = None if other is None else other.place(out)
    return target and (key, where, target)


def _ownerless(array: Any) -> Any:
    """Return the same memory, kept alive by the caller alone."""
    return type(array)(array.address, array.shape, array.dtype, array.device, array.stream)


def _is_own(array: Array) -> bool:
    flags = array.flags
    return bool(flags.carray and flags.owndata)


def _is_all_of(buffer: Buffer, array: Array) -> bool:
    """Whether a buffer is what :meth:`Calls._alike` would make of the array."""
    mine = buffer.array is array or buffer.array.base is array
    return mine and buffer.count == array.size and buffer.dtype.storage is array.dtype
