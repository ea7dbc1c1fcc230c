"""Calls on arrays of a GPU that were planned before, and go straight to the transport."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from collective.deadline import Deadline
from collective.memory.arrays import adapter_of, known

from ..path import Path
from ..planned import Planned
from ..streams import Near
from .call import Call

if TYPE_CHECKING:
    from collective.memory.buffer import Spot

__all__ = ["Straight", "spot_of", "straight"]


class Straight(Call):
    """Call on arrays of a GPU that has a plan already, and goes straight to the transport.

    A call on a GPU's memory is only enqueued, so most of what it takes is finding out about its
    arrays. The arguments of such a call were checked when its plan was made; the plan is found by
    their values, and the spots of the arrays are enough to run it. A call that is not plain, or
    must be refused, is prepared at length.

    Args:
        call: the call.
        planned: its plan.
        src, dst: the spots of its arrays; ``dst`` is None where this rank gets no result.
        finish: returns the result, if it is a new array.
    """

    def __init__(
        self, call: Call, planned: Planned, src: Spot, dst: Spot | None, x: Any, out: Any,
        finish: Callable[[], Any] | None,
    ) -> None:  # fmt: skip
        super().__init__(call.path)
        self.operation = call.operation
        self._call = call
        self._planned = planned
        self._src = src
        self._dst = dst
        # The arrays are kept until it is over.
        self._arrays = x, out
        self._finish = finish
        self.near = Near(src, adapter_of(x))

    def run(self, deadline: Deadline) -> Any:
        self.path.carry(self._planned, self._src, self._dst, deadline)
        return self._arrays[1] if self._finish is None else self._finish()


def spot_of(path: Path, x: Any) -> Spot | None:
    """Return where a plain array on this rank's GPU is, if calls on it are enqueued there."""
    if not path.enqueues:
        return None
    adapter = known.get(type(x))
    spot = None if adapter is None else adapter.spot(x)
    # The long way, which comes first, has found out whose GPU it is.
    return spot if spot is not None and spot.device is path.gpu else None


def straight(call: Call, x: Any, out: Any) -> Call | None:
    """Return a call as :class:`Straight` if it has a plan, and its result is plain as well.

    That is so where the result is on the input's stream, and apart from the input or the input
    itself.
    """
    src = spot_of(call.path, x)
    planned = None if src is None else call.plan_of_spot(src)
    if src is None or planned is None or not planned.takes_gpus:
        return None
    shape = call.shape_of_spot(src)
    dst: Spot | None = src
    finish: Callable[[], Any] | None = None
    if shape is None:
        dst = out = None
    elif out is None:
        adapter = adapter_of(x)
        result = adapter.empty(shape, src.dtype, src.device, src.stream)
        dst = adapter_of(result).spot(result)
        finish = partial(adapter.wrap, result, src.dtype)
    elif out is not x or src.shape != shape:
        kind = known.get(type(out))
        dst = None if kind is None else kind.spot(out)
    if shape is not None and dst is not src:
        if dst is None or dst.shape != shape or dst.dtype is not src.dtype:
            return None
        size, distance = src.dtype.storage.itemsize, dst.address - src.address
        if dst.stream is not src.stream or -size * dst.count < distance < size * src.count:
            return None
    return Straight(call, planned, src, dst, x, out, finish)
