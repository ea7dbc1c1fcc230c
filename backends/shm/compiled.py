"""All-reduces in C: the same steps over the same words, without Python in between.

A small one is what :class:`~.small.SmallAllReduce` does, through the same slots, so that a rank
without the native core understands one that has it. A large one of ordinary memory is staged
through the slots, which all ranks have to do: they find out when they connect whether they can.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import native
from collective.algorithms import arithmetic

from .control import BROKEN, LINE, POSTED, SLOT_BYTES, Control
from .symmetric import address_of

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer
    from collective.native._core import Shared
    from collective.request import Request

__all__ = ["Compiled"]

Array = np.ndarray[Any, Any]

# How often C looks at a word before it yields the processor: some microseconds of a core of one's
# own, and a moment of one that the peer needs.
_LOOKS, _LOOKS_CROWDED = 4000, 50


class Compiled:
    """A control segment as C sees it, and plans over it."""

    def __init__(self, control: Control) -> None:
        self._control = control
        layout = control.layout
        places = []
        for rank in range(control.size):
            line = 8 * LINE * (1 + rank)
            counters = [line + 8 * (POSTED + 8 * each) for each in range(3)]
            places.append([line, *counters, layout.slots[0][rank], layout.slots[1][rank]])
        looks = _LOOKS_CROWDED if control.crowded else _LOOKS
        made = native.shared(
            control.segment.map, control.rank, places, SLOT_BYTES, looks, partial(_wait, control)
        )
        assert made is not None  # or nobody would make this
        self._shared = made

    def folds(self, request: Request) -> bool:
        """Tell whether C can fold what a reduction asks for."""
        op, dtype = request.op, request.dtype
        return (
            op.function is None and dtype is not None and self._shared.folds(_name(op), dtype.code)
        )

    def small(self, request: Request) -> _SmallInC:
        """Return a plan of an all-reduce that fits into the slots and scales no input."""
        return _SmallInC(self._control, self._shared, request)

    def large(self, request: Request) -> _LargeInC:
        """Return a plan of an all-reduce of any length, for when all ranks have arrived."""
        return _LargeInC(self._control, self._shared, request)


def _name(op: Any) -> str:
    # Both are sums to a fold, with something done before or after.
    return "sum" if op.name in ("avg", "premul_sum") else str(op.name)


def _wait(control: Control, rank: int, offset: int, value: int) -> None:
    """Wait for a word that a rank writes, as the steps in Python do."""
    words, at, line = control.words, offset // 8, (1 + rank) * LINE
    # All have to arrive. Of a block, others may have no need any more.
    ranks = range(control.size) if at == line else (rank,)
    control.wait(
        lambda: words[at] >= value,
        lambda: [r for r in ranks if words[(1 + r) * LINE + at - line] < value],
        control.request,
        control.timeout,
    )


class _Reduction:
    """What both plans know of a request."""

    __slots__ = ("_control", "_divide", "_fold", "_pre", "_request", "_shared")

    def __init__(self, control: Control, shared: Shared, request: Request) -> None:
        op, dtype = request.op, request.dtype
        assert dtype is not None
        self._control = control
        self._shared = shared
        self._request = request
        self._fold = _name(op), dtype.code
        self._pre = arithmetic.pre(op, dtype, control.size)
        # What else is done to results, a fold in C of several ranks has done already.
        self._divide = arithmetic.post(op, dtype, control.size) if op.name == "avg" else None


class _SmallInC(_Reduction):
    __slots__ = ()

    def __call__(self, src: Buffer, dst: Buffer, timeout: float) -> None:
        control, request, out = self._control, self._request, dst.array
        if control.words[BROKEN]:
            raise control.failure(request)
        step = control.begin(request, timeout)
        reduced = self._shared.small_all_reduce(src.array, out, *self._fold, step, request.digest)
        if not reduced:
            raise control.disagreement(request, timeout)
        if self._divide is not None:
            with np.errstate(all="ignore"):
                self._divide(out, out)


class _LargeInC(_Reduction):
    __slots__ = ()

    def __call__(self, src: Buffer, dst: Buffer, timeout: float) -> None:
        source, out = src.array, dst.array
        if self._pre is not None:
            source = np.empty_like(source)
            with np.errstate(all="ignore"):
                self._pre(src.array, source)
        elif np.may_share_memory(source, out) and address_of(source) != address_of(out):
            source = source.copy()
        self._control.timeout = timeout
        self._shared.all_reduce(source, out, *self._fold, self._divide is not None)
