"""How a model is cut, and what computes it so, in any framework."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.memory import nested

from .arrays import Arrays
from .chained import Chained
from .executors import Executor, InTurn, OverRanks
from .filters import Filters
from .layered import BlockGrid, Layered, check_axes
from .replicas import StateEntry, check_initialised, check_layout, check_settings, check_values
from .session import Session
from .settings import Settings

__all__ = ["Cuts", "Framework", "ModelCopy"]

_SAME_WEIGHTS = (
    "Every rank computes a part of one model: load the same weights on every rank, or make the "
    "Split with broadcast=True afterwards, which sends rank 0's to all."
)
_SAME_INPUTS = (
    "Every rank computes a part of one result: pass the same input on every rank, or with "
    "inputs='pieces' this rank's rows alone."
)


class Framework(NamedTuple):
    """What a framework adds.

    Attributes:
        arrays: what is done with its arrays.
        session: gets the functions that a model calls.
        filters: cuts a model's weights: ``filters(group, model)``.
        parameters: returns those of a model.
        state: returns what all ranks have alike of a model: ``state(model, filters)``.
        broadcast: gives all ranks rank 0's state of a model: ``broadcast(model, comm)``.
        follow: lets parameters that get values later have rank 0's then: ``follow(model, comm)``.
        root_fills: whether ``broadcast`` initialises parameters that rank 0 alone has initialised.
    """

    arrays: type[Arrays]
    session: type[Session]
    filters: Callable[[Communicator, Any], Filters]
    parameters: Callable[[Any], Iterator[Any]]
    state: Callable[[Any, Filters | None], list[StateEntry]]
    broadcast: Callable[[Any, Communicator], None]
    follow: Callable[[Any, Communicator], None]
    root_fills: bool


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
        InvalidArgumentError: an option is none of its values (:meth:`Settings.check`), or the
            pieces are not as many as the ranks.
        MismatchError: the ranks' options differ; on every rank.
    """

    def __init__(self, framework: Framework, settings: Settings, comm: Communicator | None) -> None:
        if comm is not None:  # first, or a rank with a wrong option would leave the others waiting
            check_settings(comm, vars(settings))
        settings.check(has_ranks=comm is not None)
        self._framework = framework
        self._settings = settings
        self._grid = (
            None
            if comm is None
            else BlockGrid(comm, settings.batch, settings.channels, tuple(settings.data))
        )

    def prepare(self, model: Any) -> Any:
        """Make a model the same on all ranks, and keep this rank's own filters of it.

        Collective: over ranks.

        Returns:
            Which parameters this rank has a piece of; None if it has all of each.

        Raises:
            MismatchError: the ranks' models differ; or, with ``broadcast=False``, their values do.
        """
        if self._grid is not None:
            framework, comm = self._framework, self._grid.comm
            entries = framework.state(model, None)
            check_layout(comm, entries, framework.root_fills and self._settings.broadcast)
            if self._settings.broadcast:
                framework.broadcast(model, comm)
            else:
                check_values(comm, entries, _SAME_WEIGHTS)
            framework.follow(model, comm)
        return self._filters_of(model)

    def check_replicas(self, model: Any, filters: Filters | None) -> None:
        """Check that all ranks have the same parameters and buffers.

        Collective: over ranks.

        Raises:
            MismatchError: they differ; on every rank.
        """
        if self._grid is not None:
            check_values(self._grid.comm, self._framework.state(model, filters), _SAME_WEIGHTS)

    def check_inputs(
        self, x: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, ends: str | None = None
    ) -> None:
        """Check that ranks which pass the same input, or the same piece of one, do so.

        Collective: over ranks.

        Args:
            x, args, kwargs: as of :meth:`computed`.
            ends: what the input is; None: what the options say.

        Raises:
            MismatchError: they differ; on every rank.
        """
        if self._grid is None:
            return
        in_pieces = (ends or self._settings.inputs) == "pieces"
        arrays = self._framework.arrays(x)
        entries = [
            StateEntry("the input", arrays.bare(x), piece=self._grid.at if in_pieces else None)
        ]
        named = [(f"argument {at}", each) for at, each in enumerate(args, start=1)]
        for name, argument in (*named, *kwargs.items()):
            leaves = filter(arrays.is_array, nested.flatten(argument))
            entries += [StateEntry(name, arrays.bare(leaf)) for leaf in leaves]
        check_values(self._grid.comm, entries, _SAME_INPUTS)

    def _filters_of(self, model: Any) -> Any:
        """Keep of a model's weights those of this rank's channels, if that is asked for."""
        if self._grid is None or self._settings.filters == "all":
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
            MismatchError: weights or inputs differ between ranks, where calls are compared; on
                every rank.
        """
        if self._grid is not None and self._grid.comm.check == "always":
            self.check_replicas(model, filters)
            self.check_inputs(x, args, kwargs, ends=ends)
        arrays = self._framework.arrays(x, kept)
        parameters = list(self._framework.parameters(model))
        executor = self._executor(arrays, x.ndim - 2, parameters, ends, filters)
        session = self._framework.session(executor, arrays, self._settings.strict, kept, filters)
        running = contextlib.nullcontext() if filters is None else filters.running()
        with running, session.calls_of(model):
            found = session.leave(model(session.enter(x), *args, **kwargs))
        return found, tuple(session.joined)

    def copies(self, model: Any, filters: Any) -> Iterator[ModelCopy]:
        """Yield a copy of a model with what computes it whole, and one with what splits it.

        Collective: over ranks with ``filters="own"``.

        Args:
            model: which ``filters`` has cut, if there are some.

        Raises:
            InvalidArgumentError: over ranks, a parameter has no values yet, which would be others
                in each copy.
        """
        if self._grid is not None:
            check_initialised(self._framework.state(model, filters))
        for is_split in (False, True):
            whole = copy.deepcopy(model) if filters is None else filters.whole_copy(model)
            own = self._filters_of(whole) if is_split else None
            split = partial(self.computed, whole, own, ends="whole")
            yield ModelCopy(whole, own, split if is_split else partial(_computed_whole, whole))

    def _executor(
        self, arrays: Arrays, axes: int, parameters: Sequence[Any], ends: str | None,
        filters: Filters | None,
    ) -> Executor:  # fmt: skip
        """Return what carries out a forward pass of an input with so many data axes."""
        settings = self._settings
        if self._grid is None:
            check_axes(settings.data, axes)
            missing = axes - len(settings.data)
            parts = (settings.batch, *settings.data, *(1,) * missing)[: axes + 1]
            return InTurn(arrays, parts, settings.channels, settings.recompute)
        grid = self._grid.reaching(axes)
        if settings.halo == "layer":
            layered = Layered(arrays, grid)
        else:
            layered = Chained(arrays, grid, settings.recompute)
        inputs, outputs = ends or settings.inputs, ends or settings.outputs
        return OverRanks(
            grid, layered, arrays, parameters, from_pieces=inputs == "pieces",
            to_pieces=outputs == "pieces", filters=filters,
        )  # fmt: skip


def _computed_whole(
    model: Any, x: Any, args: Sequence[Any], kwargs: dict[str, Any], kept: Any = None
) -> tuple[Any, tuple[str, ...]]:
    return model(x, *args, **kwargs), ()
