"""What the steps of one call on two levels have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.algorithms.folds import Folding
from collective.memory.buffer import Buffer
from collective.ops import ReduceOp, as_op

if TYPE_CHECKING:
    from types import TracebackType

    from collective.contract.backend import Backend, Plan
    from collective.memory.dtypes import DType
    from collective.request import Request

__all__ = ["Steps", "folds"]


class Steps:
    """The steps of one request on two levels: their plans, deadline, and what errors become.

    One call at a time is made with it, in a ``with``.

    Args:
        explained: returns what to raise for an error of a level, or None for the error itself.
        request: what the steps are of.
    """

    __slots__ = ("_end", "_explained", "_plans", "_timeout", "request")

    def __init__(
        self,
        explained: Callable[[BaseException, object, float], BaseException | None],
        request: Request,
    ) -> None:
        self._explained = explained
        self.request = request
        self._plans: dict[int, Plan] = {}
        self._timeout = self._end = 0.0

    def within(self, timeout: float) -> Steps:
        """Begin a call that may take ``timeout`` seconds."""
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        return self

    def left(self) -> float:
        """Return the seconds to the deadline."""
        return max(0.0, self._end - time.monotonic())

    def run(
        self,
        number: int,
        level: Backend,
        operation: str,
        src: Buffer | None,
        dst: Buffer | None,
        **arguments: Any,
    ) -> None:
        """Make step ``number``, on one of the levels.

        Args:
            arguments: of :meth:`Request.step`, the same every time.
        """
        # By its number alone: levels, counts and roots follow from the request, and are the same
        # each time that a call is made for it.
        plan = self._plans.get(number)
        if plan is None:
            plan = level.plan(self.request.step(number, operation, **arguments))
            self._plans[number] = plan
        work = plan(src, dst, self.left())
        if work is not None:
            work.wait()

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            explained = self._explained(error, self.request, self._timeout)
            if explained is not None:
                raise explained from error


_SUM = as_op("sum")


def folds(op: ReduceOp, dtype: DType, size: int) -> tuple[ReduceOp, Folding]:
    """Return what both levels of a reduction fold with, and what scales once, around both."""
    if op.name in ("avg", "premul_sum"):
        return _SUM, Folding(op, dtype, size)
    return op, Folding(_SUM, dtype, size)  # which leaves inputs and results as they are
