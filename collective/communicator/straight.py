"""Calls on arrays of a GPU that were planned before, and go straight to the transport."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from collective.memory.arrays import adapter_of, known

from .calls import Calls

if TYPE_CHECKING:
    from collective.memory.buffer import Spot

    from .plan import Planned

__all__ = ["StraightCalls"]


class StraightCalls(Calls):
    """The part of a communicator that spares repeated calls what others need.

    A call on a GPU's memory is only enqueued, so what is found out about its arrays is most of what
    it takes. What such a call is has been checked when its plan was made; the plan is found by the
    values that were, and of the arrays their spots are enough. Whatever is not plain, and all that
    is to be refused, takes the long way and is looked at there.
    """

    def _spot(self, x: Any) -> Spot | None:
        """Return where a plain array on this rank's GPU is, if calls on it are enqueued there."""
        if not self._enqueues:
            return None
        adapter = known.get(type(x))
        found = None if adapter is None else adapter.spot(x)
        # The long way, which comes first, has found out whose GPU it is.
        return found if found is not None and found.device is self._gpu else None

    def _straight(
        self,
        planned: Planned | None,
        src: Spot,
        shape: tuple[int, ...] | None,
        x: Any,
        out: Any,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        """Make a call if it has a plan, and its result is plain as well.

        That is so where the result is on the input's stream, and apart from the input or the
        input itself.

        Args:
            src: the spot of ``x``.
            shape: of this rank's result; None if it gets none.
            x, out, timeout, async_op: as the caller has them.

        Returns:
            What the method returns, or NotImplemented if no call was made.
        """
        if planned is None or not planned.takes_gpus:
            return NotImplemented
        dst: Spot | None = src
        finish: Callable[[], Any] | None = None
        if shape is None:
            dst = out = None
        elif out is None:
            adapter = adapter_of(x)
            made = adapter.empty(shape, src.dtype, src.device, src.stream)
            dst = adapter_of(made).spot(made)
            finish = partial(adapter.wrap, made, src.dtype)
        elif out is not x or src.shape != shape:
            kind = known.get(type(out))
            dst = None if kind is None else kind.spot(out)
        if shape is not None and dst is not src:
            if dst is None or dst.shape != shape or dst.dtype is not src.dtype:
                return NotImplemented
            size, distance = src.dtype.storage.itemsize, dst.address - src.address
            if dst.stream is not src.stream or -size * dst.count < distance < size * src.count:
                return NotImplemented
        seconds = self.timeout if timeout is None else self._seconds(timeout)
        if async_op or self._lane.queue or self._broken is not None:
            # The arrays are kept until it is over: by what it calls.
            run = partial(self._carry_arrays, (x, out), finish, planned, src, dst, seconds)
            return self._go(planned.request.operation, run, async_op, src, adapter_of(x))
        self._carry(planned, src, dst, seconds)
        return out if finish is None else finish()

    def _carry_arrays(
        self, arrays: tuple[Any, Any], finish: Callable[[], Any] | None, *call: Any
    ) -> Any:
        self._carry(*call)
        return arrays[1] if finish is None else finish()
