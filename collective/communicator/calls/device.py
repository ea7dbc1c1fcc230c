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
        x, out: the arrays, which are kept until the call is over.
        finish: returns the result, if it is a new array.
    """

    def __init__(
        self, call: Call, planned: Planned, src: Spot, dst: Spot | None, x: Any, out: Any,
        finish: Callable[[], Any] | None,
    ) -> None:  # fmt: skip
        self.path = call.path
        self.operation = call.operation
        self._planned = planned
        self._src = src
        self._dst = dst
        self._x = x
        self._out = out
        self._finish = finish

    @property
    def near(self) -> Near:  # type: ignore[override]
        """The input; looked at only if the call is not run at once."""
        return Near(self._src, adapter_of(self._x))

    def run(self, deadline: Deadline) -> Any:
        self.path.carry(self._planned, self._src, self._dst, deadline)
        return self._out if self._finish is None else self._finish()


def spot_of(path: Path, x: Any) -> Spot | None:
    """Return where a plain array on this rank's GPU is."""
    adapter = known.get(type(x))
    spot = None if adapter is None else adapter.spot(x)
    # The long way, which comes first, has found out whose GPU it is.
    return spot if spot is not None and spot.device is path.gpu else None


def straight(call: Call, x: Any, out: Any) -> Call | None:
    """Return a call as :class:`Straight` if it has a plan, and its result is plain as well.

    That is so where the result is on the input's stream, and apart from the input or the input
    itself. Calls on the transport must be enqueued.
    """
    src = spot_of(call.path, x)
    if src is None:
        return None
    planned, shape = call.known_plan(src)
    if planned is None or not planned.takes_gpus:
        return None
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
