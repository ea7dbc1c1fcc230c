"""How a model is cut, in any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collective.communicator import Communicator

from .chained import Chained
from .exchanges import Exchanges
from .filters import Filters
from .in_turn import InTurn
from .layered import BlockGrid, Layered
from .options import check_axes, check_options
from .over_ranks import OverRanks

__all__ = ["Cuts"]


class Cuts:
    """What the options of ``Split`` say; see :class:`collective.adapters.torch.splits.Split`.

    Collective: with ``comm``.

    Raises:
        InvalidArgumentError: the numbers are not positive integers, the pieces are not as many as
            the ranks, or another option is none of its values.
    """

    def __init__(
        self, batch: int, channels: int, data: Sequence[int], comm: Communicator | None, *,
        recompute: bool, halo: str, inputs: str, outputs: str, filters: str,
    ) -> None:  # fmt: skip
        check_options(batch, channels, data, comm, halo, inputs, outputs, filters)
        self._batch, self._channels, self._data = batch, channels, tuple(data)
        self._recompute, self._halo = recompute, halo
        self._inputs, self._outputs = inputs, outputs
        self._own_filters = filters == "own"
        self._grid = None if comm is None else BlockGrid(comm, batch, channels, tuple(data))

    @property
    def filter_group(self) -> Communicator | None:
        """The ranks that share the filters, where each has its own alone."""
        return self._grid.channel_group if self._grid is not None and self._own_filters else None

    def executor(
        self, in_turn: Callable[..., InTurn], over_ranks: Callable[..., OverRanks],
        arrays: Exchanges, axes: int, parameters: Sequence[Any], ends: str | None,
        filters: Filters | None,
    ) -> Any:  # fmt: skip
        """Return what carries out a forward pass.

        Args:
            in_turn, over_ranks: the framework's own.
            arrays: what the framework does with its arrays.
            axes: how many data axes the input has.
            parameters: of the model.
            ends: what inputs and outputs are; None: what the options say.
            filters: which of the parameters this rank has a piece of.

        Raises:
            ShapeError: an axis is cut that the input does not have.
        """
        if self._grid is None:
            check_axes(self._data, axes)
            missing = axes - len(self._data)
            parts = (self._batch, *self._data, *(1,) * missing)[: axes + 1]
            return in_turn(arrays, parts, self._channels, self._recompute)
        grid = self._grid.reaching(axes)
        layered: Layered | Chained
        if self._halo == "layer":
            layered = Layered(arrays, grid)
        else:
            layered = Chained(arrays, grid, self._recompute)
        inputs, outputs = ends or self._inputs, ends or self._outputs
        return over_ranks(
            grid, layered, arrays, parameters, from_pieces=inputs == "pieces",
            to_pieces=outputs == "pieces", filters=filters,
        )  # fmt: skip
