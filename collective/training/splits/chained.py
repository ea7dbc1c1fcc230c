"""Cuts over ranks with one exchange for many layers.

Each rank fetches, in one exchange, all rows of the input that its block of the result depends on.
Then it computes the layers without further messages. Rows near the ends of a block are computed on
two ranks: fewer messages for more arithmetic (J. Demmel et al., "Avoiding Communication in Sparse
Matrix Computations", 2008).
"""

from __future__ import annotations

from typing import Any

from .arrays import Arrays
from .blocks import Step, Value, order, wanted
from .layered import BlockGrid, Layered, fetch
from .serial import Serial, read_by
from .windows import pieces

__all__ = ["Chained"]


class Chained(Layered):
    """Recorder of calls, which computes them on this rank's block when a result is needed.

    Collective: the ranks make the same calls in the same order.
    """

    def __init__(self, arrays: Arrays, grid: BlockGrid, recompute: bool) -> None:
        super().__init__(arrays, grid)
        self._recompute = recompute
        self._serial = Serial(arrays, (1,) * len(grid.parts), 1, recompute)

    def add(self, step: Step) -> Value:
        """Record a call; a call that reads whole axes ends the chain."""
        if all(len(source.lengths) == len(step.lengths) for source in step.sources):
            return Value(step.lengths, step)
        for source in step.sources:
            self._compute(source)
        return super().add(step)

    def whole(self, value: Value) -> Any:
        """Return the whole array of a value, on every rank."""
        self._compute(value)
        return super().whole(value)

    def piece(self, value: Value) -> Any:
        """Return this rank's rows of a value."""
        self._compute(value)
        return super().piece(value)

    def _compute(self, target: Value) -> None:
        values = order([target])
        if not values:
            return
        sources = read_by(values)
        mine = wanted(values, {target: self._grid.block(target.lengths)})
        inputs = [value.piece for value in sources]
        have = [self._grid.block(value.lengths) for value in sources]
        for axis, group in enumerate(self._grid.groups[: len(target.lengths)]):
            if group is None:
                continue
            theirs = [
                wanted(values, {target: block}) for block in self._grid.along(axis, target.lengths)
            ]
            for at, value in enumerate(sources):
                own = pieces(value.lengths[axis], self._grid.parts[axis])
                want = [peer[value][axis] for peer in theirs]
                inputs[at] = fetch(self._arrays, inputs[at], axis, own, want, group)
                block = have[at]
                have[at] = (*block[:axis], mine[value][axis], *block[axis + 1 :])
        (target.piece,) = self._serial.block(
            values, {target: mine[target]}, sources, inputs, have, self._recompute
        )
