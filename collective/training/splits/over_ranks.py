"""One forward pass over ranks: what goes in, what parameters go through, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collective.training.splits.blocks import Step, Value, lengths_of
from collective.training.splits.chained import Chained
from collective.training.splits.exchanges import Exchanges
from collective.training.splits.filters import Filters
from collective.training.splits.layered import BlockGrid, Layered
from collective.training.splits.options import check_same

__all__ = ["OverRanks"]


class OverRanks:
    """Makes the calls of a forward pass on this rank's block of every array.

    A framework adds statistics and random numbers.

    Args:
        grid: who has which block.
        layered: makes the calls.
        exchanges: what the framework does between ranks.
        parameters: of the model; their gradients are summed together.
        from_pieces: whether the input is this rank's rows.
        to_pieces: whether results are.
        filters: which parameters this rank has a piece of.
    """

    def __init__(
        self,
        grid: BlockGrid,
        layered: Layered | Chained,
        exchanges: Exchanges,
        parameters: Sequence[Any],
        *,
        from_pieces: bool,
        to_pieces: bool,
        filters: Filters | None,
    ) -> None:
        self._grid, self._layered, self._exchanges = grid, layered, exchanges
        self._filters = filters
        self._parameters = list(parameters)
        self._from_pieces, self._to_pieces = from_pieces, to_pieces
        self._versions: dict[tuple[int, bool], dict[int, Any]] = {}

    def enter(self, x: Any) -> Value:
        """Bring the input in: a piece of it, or, if that is how it is given, all of it."""
        if self._from_pieces:
            return self._layered.enter_piece(self._exchanges.entering(x), lengths_of(x.shape))
        if self._grid.comm.check == "always":
            check_same(self._grid.comm, self._exchanges.on_host(x))
        return self.enter_whole(x)

    def enter_whole(self, x: Any) -> Value:
        """Bring in what every rank has all of."""
        value = Value(lengths_of(x.shape), array=self._exchanges.entering(x))
        self._layered.enter(value)
        return value

    def add(self, step: Step, lengths: Sequence[int]) -> Value:
        """Put a layer behind the values that it takes; return what it makes."""
        return self._layered.add(step, lengths)

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return all of the values, on every rank."""
        return [self._layered.whole(value) for value in values]

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return what the forward pass gives: pieces, or all of it."""
        if self._to_pieces:
            return [self._layered.piece(value) for value in values]
        return self.whole(values)

    # -- parameters ------------------------------------------------------------------------

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        """Return what gives a layer on ``value`` its parameters, with gradients that are summed.

        Args:
            in_part: whether each rank computes a part of the layer's channels.
        """
        axes = len(value.lengths)

        def share(x: Any) -> Any:
            if not self._exchanges.has_gradient(x):
                return x
            found = self._version(axes, in_part).get(id(x))
            return self._through([x], axes, in_part)[0] if found is None else found

        return share

    def layout(self, weight: Any, bias: Any) -> str | None:
        """Return how the filters of a layer are shared by the ranks; None if every rank has all."""
        return None if self._filters is None else self._filters.layout(weight, bias)

    def parameter(self, x: Any) -> Any:
        """Return all of a parameter, joined from what the ranks have of it."""
        share = None if self._filters is None else self._filters.share(x)
        if share is None or self._filters is None:
            return x
        # Every rank has the same gradient of it, or that is summed before it gets here.
        return self._exchanges.joined(x, self._filters.group, share.dimension, share.counts)

    def _version(self, axes: int, in_part: bool) -> dict[int, Any]:
        """Return, by the ``id`` of a parameter, the array whose gradient is that of all ranks."""
        known = self._versions.get((axes, in_part))
        if known is None:
            wanted = [each for each in self._parameters if self._exchanges.has_gradient(each)]
            if in_part and self._filters is not None:  # each rank's is a gradient of its own
                wanted = [each for each in wanted if self._filters.share(each) is None]
            found = self._through(wanted, axes, in_part)
            known = self._versions[axes, in_part] = dict(zip(map(id, wanted), found))
        return known

    def _through(self, arrays: Sequence[Any], axes: int, in_part: bool) -> Sequence[Any]:
        groups = [*self._grid.groups[:axes], self._grid.channel_group if in_part else None]
        for group in groups:
            if group is not None and arrays:
                arrays = self._exchanges.used_together(arrays, group)
        return arrays
