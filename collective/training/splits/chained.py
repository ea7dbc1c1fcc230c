"""Cut over ranks, with one exchange for many layers.

Each rank fetches at once all rows of the input that its block of the result depends on, and
computes what layers make of them by itself, the inner rows near its ends twice: fewer messages for
more arithmetic (J. Demmel et al., "Avoiding Communication in Sparse Matrix Computations", 2008).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .blocks import Step, Value, order, wanted
from .exchanges import Exchanges
from .layered import BlockGrid, Layered, fetch
from .serial import Serial, read_by
from .windows import pieces

__all__ = ["Chained"]


class Chained:
    """Records calls, and makes them on this rank's block where a result is needed.

    Collective: the ranks make the same calls in the same order.
    """

    def __init__(self, arrays: Exchanges, grid: BlockGrid, recompute: bool) -> None:
        self._arrays = arrays
        self._grid = grid
        self._layered = Layered(arrays, grid)
        self._serial = Serial(arrays, (1,) * len(grid.parts), 1, recompute)

    def enter(self, value: Value) -> None:
        """Take this rank's rows of a value that every rank has whole."""
        self._layered.enter(value)

    def enter_piece(self, array: Any, lengths: Sequence[int]) -> Value:
        """Take rows that the ranks have each of an array, in their order."""
        return self._layered.enter_piece(array, lengths)

    def add(self, step: Step, lengths: Sequence[int]) -> Value:
        """Record a call; one that reads axes whole ends the chain."""
        if all(len(source.lengths) == len(lengths) for source in step.sources):
            return Value(lengths, step)
        for source in step.sources:
            self._compute(source)
        return self._layered.add(step, lengths)

    def whole(self, value: Value) -> Any:
        """Return all of a value, on every rank."""
        self._compute(value)
        return self._layered.whole(value)

    def piece(self, value: Value) -> Any:
        """Return this rank's rows of a value."""
        self._compute(value)
        return value.piece

    def added(self, array: Any, axes: Sequence[int]) -> Any:
        """Return the sum of what the ranks along some axes computed of their rows."""
        return self._layered.added(array, axes)

    def joined(self, array: Any, axis: int, n: int) -> Any:
        """Join the ranks' rows along an axis that has ``n`` of them."""
        return self._layered.joined(array, axis, n)

    def _compute(self, target: Value) -> None:
        values = order([target])
        if not values:
            return
        given = read_by(values)
        mine = wanted(values, {target: self._grid.block(target.lengths)})
        inputs = [value.piece for value in given]
        have = [self._grid.block(value.lengths) for value in given]
        for axis, group in enumerate(self._grid.groups[: len(target.lengths)]):
            if group is None:
                continue
            theirs = [
                wanted(values, {target: block}) for block in self._grid.along(axis, target.lengths)
            ]
            for at, value in enumerate(given):
                own = pieces(value.lengths[axis], self._grid.parts[axis])
                want = [each[value][axis] for each in theirs]
                inputs[at] = fetch(self._arrays, inputs[at], axis, own, want, group)
                block = have[at]
                have[at] = (*block[:axis], mine[value][axis], *block[axis + 1 :])
        (target.piece,) = self._serial.block(values, {target: mine[target]}, given, inputs, have)
