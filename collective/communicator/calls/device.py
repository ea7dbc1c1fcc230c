"""Calls on GPU arrays that were planned before, and go directly to the transport."""

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
    """Call on GPU arrays that has a plan already, and goes directly to the transport.

    A call on GPU memory is only enqueued, so most of its time would go into inspecting its arrays.
    The arguments of such a call were checked when its plan was made. The plan is found by their
    values, and the spots (address, dtype and shape) of the arrays are enough to run it. A call that
    is not plain, or must be refused, is prepared in full instead.

    Args:
        call: the call.
        planned: plan of the call.
        src, dst: spots of its arrays; ``dst`` is None if this rank gets no result.
        x, out: the arrays, which this object keeps alive until the call is over.
        finish: function that returns the result, if the result is a new array.
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
        """The call's input; needed only if the call is not run at once."""
        return Near(self._src, adapter_of(self._x))

    def run(self, deadline: Deadline) -> Any:
        self.path.carry(self._planned, self._src, self._dst, deadline)
        return self._out if self._finish is None else self._finish()


def spot_of(path: Path, x: Any) -> Spot | None:
    """Return the spot of a plain array on this rank's GPU; None for any other value."""
    adapter = known.get(type(x))
    spot = None if adapter is None else adapter.spot(x)
    # path.gpu is set once a call that was prepared in full has had an array on this rank's GPU.
    return spot if spot is not None and spot.device is path.gpu else None


def straight(call: Call, x: Any, out: Any) -> Call | None:
    """Return a call as :class:`Straight` if it has a plan and its result is plain; else None.

    The result is plain if it is on the input's stream, and either is the input itself or does not
    overlap the input. The transport must enqueue calls.
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
