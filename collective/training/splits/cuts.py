"""How a model is cut, and what computes it so, in any framework."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError

from .arrays import Arrays
from .chained import Chained
from .executors import Executor, InTurn, OverRanks
from .filters import Filters
from .layered import BlockGrid, Layered, check_axes
from .session import Session

__all__ = ["Cuts", "Framework", "ModelCopy"]


class Framework(NamedTuple):
    """What a framework adds.

    Attributes:
        arrays: what is done with its arrays.
        session: gets the functions that a model calls.
        filters: cuts a model's weights: ``filters(group, model)``.
        parameters: returns those of a model.
    """

    arrays: type[Arrays]
    session: type[Session]
    filters: Callable[[Communicator, Any], Filters]
    parameters: Callable[[Any], Iterator[Any]]


class ModelCopy(NamedTuple):
    """A copy of a model, to be compared with another one.

    Attributes:
        model: with all weights, or those that this rank has.
        filters: which parameters this rank has a piece of.
        compute: returns what the model returns, and the calls that took whole arrays:
            ``compute(x, args, kwargs, kept)``.
    """

    model: Any
    filters: Filters | None
    compute: Callable[..., tuple[Any, tuple[str, ...]]]


class Cuts:
    """What the options of ``Split`` say; see :class:`collective.adapters.torch.splits.Split`.

    Collective: with ``comm``.

    Raises:
        InvalidArgumentError: a number of pieces is no positive integer, the pieces are not as many
            as the ranks, an option is none of its values or needs ranks, channels are cut in a
            chain, or filters without channels.
    """

    def __init__(
        self, framework: Framework, batch: int, channels: int, data: Sequence[int],
        comm: Communicator | None, *, recompute: bool, halo: str, inputs: str, outputs: str,
        filters: str, strict: bool,
    ) -> None:  # fmt: skip
        for name, parts in (("batch", [batch]), ("channels", [channels]), ("data", list(data))):
            if not parts or not all(isinstance(each, int) and each >= 1 for each in parts):
                given = data if name == "data" else parts[0]
                raise InvalidArgumentError(f"Split: {name}={given!r}; positive integers.")
        chosen = {
            # Whether rows travel before each layer, or once for a chain of them.
            "halo": (halo, ("layer", "chain")),
            # Whether an input or a result is whole on each rank, or in pieces.
            "inputs": (inputs, ("whole", "pieces")),
            "outputs": (outputs, ("whole", "pieces")),
            # Whether each rank keeps the filters of all channels, or those of its own.
            "filters": (filters, ("all", "own")),
        }
        for name, (value, known) in chosen.items():
            if value not in known:
                raise InvalidArgumentError(f"Split: {name}={value!r}; one of {', '.join(known)}.")
            if comm is None and value != known[0]:
                raise InvalidArgumentError(
                    f"Split: {name}={value!r} without comm; it says what ranks do. Pass comm=."
                )
        if halo == "chain" and channels > 1:
            raise InvalidArgumentError(
                f"Split: channels={channels} with halo='chain'; channels are mixed by layers, "
                "which a chain has many of. Use halo='layer'."
            )
        if filters == "own" and channels == 1:
            raise InvalidArgumentError(
                "Split: filters='own' with channels=1; a rank's own filters are those of its "
                "channels. Pass channels=."
            )
        self._framework = framework
        self._batch, self._channels, self._data = batch, channels, tuple(data)
        self._recompute, self._halo, self._strict = recompute, halo, strict
        self._inputs, self._outputs = inputs, outputs
        self._own_filters = filters == "own"
        self._grid = None if comm is None else BlockGrid(comm, batch, channels, tuple(data))

    def filters_of(self, model: Any) -> Any:
        """Keep of a model's weights those of this rank's channels, if that is asked for."""
        if self._grid is None or not self._own_filters:
            return None
        assert self._grid.channel_group is not None
        return self._framework.filters(self._grid.channel_group, model)

    def computed(
        self, model: Any, filters: Filters | None, x: Any, args: Sequence[Any],
        kwargs: dict[str, Any], kept: Any = None, *, ends: str | None = None,
    ) -> tuple[Any, tuple[str, ...]]:  # fmt: skip
        """Compute a model in pieces.

        Args:
            model: takes ``x``, which is cut, and further arguments.
            filters: which of its parameters this rank has a piece of.
            x, args, kwargs: what it takes.
            kept: counts what is kept for the backward pass.
            ends: what inputs and outputs are; None: what the options say.

        Returns:
            What the model returns, and the calls that took whole arrays.

        Raises:
            ShapeError: an axis is cut that the input does not have.
        """
        arrays = self._framework.arrays(x, kept)
        parameters = list(self._framework.parameters(model))
        executor = self._executor(arrays, x.ndim - 2, parameters, ends, filters)
        session = self._framework.session(executor, arrays, self._strict, kept, filters)
        running = contextlib.nullcontext() if filters is None else filters.running()
        with running, session.calls_of(model):
            found = session.leave(model(session.enter(x), *args, **kwargs))
        return found, tuple(session.joined)

    def copies(self, model: Any, filters: Any) -> Iterator[ModelCopy]:
        """Yield a copy of a model with what computes it whole, and one with what splits it.

        Collective: over ranks with ``filters="own"``.

        Args:
            model: which ``filters`` has cut, if there are some.
        """
        for is_split in (False, True):
            whole = copy.deepcopy(model) if filters is None else filters.whole_copy(model)
            own = self.filters_of(whole) if is_split else None
            split = partial(self.computed, whole, own, ends="whole")
            yield ModelCopy(whole, own, split if is_split else partial(_computed_whole, whole))

    def _executor(
        self, arrays: Arrays, axes: int, parameters: Sequence[Any], ends: str | None,
        filters: Filters | None,
    ) -> Executor:  # fmt: skip
        """Return what carries out a forward pass of an input with so many data axes."""
        if self._grid is None:
            check_axes(self._data, axes)
            missing = axes - len(self._data)
            parts = (self._batch, *self._data, *(1,) * missing)[: axes + 1]
            return InTurn(arrays, parts, self._channels, self._recompute)
        grid = self._grid.reaching(axes)
        if self._halo == "layer":
            layered = Layered(arrays, grid)
        else:
            layered = Chained(arrays, grid, self._recompute)
        inputs, outputs = ends or self._inputs, ends or self._outputs
        return OverRanks(
            grid, layered, arrays, parameters, from_pieces=inputs == "pieces",
            to_pieces=outputs == "pieces", filters=filters,
        )  # fmt: skip


def _computed_whole(
    model: Any, x: Any, args: Sequence[Any], kwargs: dict[str, Any], kept: Any = None
) -> tuple[Any, tuple[str, ...]]:
    return model(x, *args, **kwargs), ()
