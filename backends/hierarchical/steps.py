"""What the steps of one call on two levels have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.algorithms import arithmetic
from collective.memory.buffer import Buffer
from collective.ops import ReduceOp, as_op

if TYPE_CHECKING:
    from types import TracebackType

    from collective.contract.work import Work
    from collective.memory.dtypes import DType
    from collective.request import Request

__all__ = ["Fold", "Named", "Steps", "end"]

# Distinct calls whose steps are remembered.
_REMEMBERED = 1024


#: Steps as calls of their own, by the call and the number of the step.
Named = dict[tuple["Request", int], "Request"]


class Steps:
    """The steps of one call: their names, their deadline, and what becomes of their errors.

    Args:
        named: the steps that are known, of one communicator.
        explained: returns what to raise for an error of a level, or None for the error itself.
        call: what the steps are of.
        timeout: seconds for all of them.
    """

    __slots__ = ("_call", "_end", "_explained", "_named", "_timeout")

    def __init__(
        self,
        named: Named,
        explained: Callable[[BaseException, object, float], BaseException | None],
        request: Request,
        timeout: float,
    ) -> None:
        self._named = named
        self._explained = explained
        self._call = request
        self._timeout = timeout
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        """Return the seconds to the deadline."""
        return max(0.0, self._end - time.monotonic())

    def call(self, number: int) -> Request:
        """Return step ``number`` as a call of its own: ranks must not mix up two steps."""
        found = self._named.get((self._call, number))
        if found is None:
            if len(self._named) >= _REMEMBERED:
                self._named.clear()
            found = self._named[self._call, number] = self._call.at(number)
        return found

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            explained = self._explained(error, self._call, self._timeout)
            if explained is not None:
                raise explained from error


_SUM = as_op("sum")


class Fold:
    """One reduction on two levels: scaled once, however often it is folded.

    Attributes:
        op: what both levels fold with.
    """

    __slots__ = ("_post", "_pre", "op")

    def __init__(self, op: ReduceOp, dtype: DType, size: int) -> None:
        self.op = op
        self._pre = self._post = None
        if op.name in ("avg", "premul_sum"):
            self.op = _SUM
            self._pre = arithmetic.pre(op, dtype, size)
            self._post = arithmetic.post(op, dtype, size)

    def enter(self, src: Buffer) -> Buffer:
        """Return what this rank contributes: ``src``, or new memory."""
        if self._pre is None:
            return src
        scaled = Buffer.empty(src.count, src.dtype)
        self._pre(src.array, scaled.array)
        return scaled

    def leave(self, part: Buffer) -> None:
        """Make a folded part, in place, the result."""
        if self._post is not None:
            self._post(part.array, part.array)


def end(work: Work[Any] | None) -> None:
    """Wait for what a transport may have left running."""
    if work is not None:
        work.wait()
