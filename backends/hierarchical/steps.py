"""What the steps of one call on two levels have in common."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from collective.algorithms import arithmetic
from collective.memory.buffer import Buffer
from collective.ops import ReduceOp, as_op

if TYPE_CHECKING:
    from types import TracebackType

    from collective.call import Call
    from collective.contract.work import Work
    from collective.memory.dtypes import DType

    from .collectives import TwoLevel

__all__ = ["Fold", "Steps", "end"]

# Distinct calls whose steps are remembered.
_REMEMBERED = 1024


class Steps:
    """The steps of one call: their names, their deadline, and what becomes of their errors."""

    __slots__ = ("_backend", "_call", "_end", "_timeout")

    def __init__(self, backend: TwoLevel, call: Call, timeout: float) -> None:
        self._backend = backend
        self._call = call
        self._timeout = timeout
        self._end = time.monotonic() + timeout

    def left(self) -> float:
        """Return the seconds to the deadline."""
        return max(0.0, self._end - time.monotonic())

    def call(self, number: int) -> Call:
        """Return step ``number`` as a call of its own: ranks must not mix up two steps."""
        known: dict[tuple[Call, int], Call] = self._backend.__dict__.setdefault("_named", {})
        found = known.get((self._call, number))
        if found is None:
            if len(known) >= _REMEMBERED:
                known.clear()
            found = known[self._call, number] = self._call.at(number)
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
            told = self._backend.told(error, self._call, self._timeout)
            if told is not None:
                raise told from error


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
