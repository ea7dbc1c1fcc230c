"""Cuts of a model, and their computation, in any framework."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError
from collective.memory import nested
from collective.training.replicas import (
    StateEntry,
    check_initialised,
    check_layout,
    check_settings,
    check_values,
)

from .arrays import Arrays
from .filters import Filters
from .layered import BlockGrid, Executor, OverRanks, check_axes
from .report import Computation, MemoryReport, Verification
from .serial import InTurn
from .session import SplitSession

# Values of the options that need ranks; the first value is the default.
_CHOICES = {
    # Whether an input or a result is whole on each rank, or in pieces.
    "inputs": ("whole", "pieces"),
    "outputs": ("whole", "pieces"),
    # Whether each rank keeps the filters of all channels, or only of its own channels.
    "filters": ("all", "own"),
}


@dataclass(frozen=True)
class Settings:
    """How a model is split; see :class:`collective.adapters.torch.splits.Split`."""

    batch: int
    channels: int
    data: Sequence[int]
    recompute: bool
    inputs: str
    outputs: str
    filters: str
    strict: bool
    broadcast: bool

    def check(self, has_ranks: bool) -> None:
        """Check the options, separately and in combination.

        Args:
            has_ranks: whether the pieces are for ranks, and not computed in turn on one device.

        Raises:
            InvalidArgumentError: a number of pieces is no positive integer, ``data`` is no sequence
                of positive integers, an option has an unknown value or needs ranks, or
                ``filters="own"`` is used without a cut of the channels.
        """
        self._check_parts()
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise InvalidArgumentError(
                    f"Split: {name}={value!r} (expected one of {', '.join(known)})."
                )
            if not has_ranks and value != known[0]:
                raise InvalidArgumentError(
                    f"Split: {name}={value!r} without comm, but this option is for ranks. Pass "
                    "comm=."
                )
        if self.filters == "own" and self.channels == 1:
            raise InvalidArgumentError(
                "Split: filters='own' with channels=1, but a rank's own filters are the filters of "
                "its channels. Pass channels= as well."
            )

    def _check_parts(self) -> None:
        for name, value in (("batch", self.batch), ("channels", self.channels)):
            if not _is_count(value):
                raise InvalidArgumentError(
                    f"Split: {name}={value!r}, expected a positive integer: the number of pieces."
                )
        try:
            counts = list(self.data)
        except TypeError:
            counts = []
        if not counts or not all(map(_is_count, counts)):
            example = f"data=({self.data},)" if _is_count(self.data) else "data=(4, 2)"
            raise InvalidArgumentError(
                f"Split: data={self.data!r}, expected a sequence of positive integers: the number "
                f"of pieces of each data axis. For example, pass {example}."
            )


def _is_count(value: Any) -> bool:
    """Return whether a value is a positive integer; True and False do not count."""
    if isinstance(value, bool):
        return False
    try:
        return operator.index(value) >= 1
    except TypeError:
        return False


_SAME_WEIGHTS = (
    "Every rank computes a part of one model. Load the same weights on every rank, or make the "
    "Split with broadcast=True afterwards, which sends rank 0's weights to all ranks."
)
_SAME_INPUTS = (
    "Every rank computes a part of one result. Pass the same input on every rank, or, with "
    "inputs='pieces', only this rank's rows."
)


Compute = Callable[..., tuple[Any, tuple[str, ...]]]


class Framework(NamedTuple):
    """Parts that a framework adds.

    Attributes:
        arrays: class of the operations on its arrays.
        session: class that intercepts the functions that a model calls.
        filters: function that cuts a model's weights: ``filters(group, model)``.
        parameters: function that returns a model's parameters.
        state: function that returns the state of a model that all ranks have in common:
            ``state(model, filters)``.
        broadcast: function that gives all ranks rank 0's state of a model:
            ``broadcast(model, comm)``.
        follow: function that makes parameters which get values later take rank 0's values then:
            ``follow(model, comm)``.
        root_fills: whether ``broadcast`` initialises parameters that only rank 0 has initialised.
        computation: function that computes a copy of a model in float64, for a comparison:
            ``computation(model, filters, compute, x, args)``. ``compute(x, args, kwargs, kept)``
            returns the model's result, and the names of the calls that took whole arrays.
        memory: function that returns the bytes that a copy keeps for its backward pass, by layer;
            those of the largest piece that is computed again; the names of the calls that took
            whole arrays; and the bytes of the parameters: ``memory(model, compute, x, args,
            kwargs)``.
    """

    arrays: type[Arrays]
    session: type[SplitSession]
    filters: Callable[[Communicator, Any], Filters]
    parameters: Callable[[Any], Iterator[Any]]
    state: Callable[[Any, Filters | None], list[StateEntry]]
    broadcast: Callable[[Any, Communicator], None]
    follow: Callable[[Any, Communicator], None]
    root_fills: bool
    computation: Callable[[Any, Filters | None, Compute, Any, Sequence[Any]], Computation]
    memory: Callable[..., tuple[dict[str, int], int, tuple[str, ...], int]]


class Cuts:
    """Computation of a model by the options of ``Split``.

    See :class:`collective.adapters.torch.splits.Split` for the options.

    Collective: with ``comm``, every rank makes it.

    Raises:
        InvalidArgumentError: an option has an unknown value (:meth:`Settings.check`), or the
            number of pieces is not the number of ranks.
        MismatchError: the ranks' options differ; every rank raises it.
    """

    def __init__(self, framework: Framework, settings: Settings, comm: Communicator | None) -> None:
        # The comparison comes first. Otherwise a rank with a wrong option would raise alone and
        # leave the other ranks waiting.
        if comm is not None:
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
        """Make a model the same on all ranks, and keep only this rank's own filters of it.

        Collective: over ranks.

        Returns:
            Record of the parameters of which this rank has a piece; None if it has all of each.

        Raises:
            MismatchError: the ranks' models differ, or, with ``broadcast=False``, their values do.
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

    def _check_replicas(self, model: Any, filters: Filters | None) -> None:
        """Check that all ranks have the same parameters and buffers.

        Collective: over ranks.

        Raises:
            MismatchError: they differ; every rank raises it.
        """
        if self._grid is not None:
            check_values(self._grid.comm, self._framework.state(model, filters), _SAME_WEIGHTS)

    def _check_inputs(
        self, x: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, ends: str | None = None
    ) -> None:
        """Check the inputs: ranks that should pass the same input, or the same piece, do so.

        Collective: over ranks.

        Args:
            x, args, kwargs: those of :meth:`computed`.
            ends: form of the input; None: the form that the options name.

        Raises:
            MismatchError: they differ; every rank raises it.
        """
        if self._grid is None:
            return
        in_pieces = (ends or self._settings.inputs) == "pieces"
        arrays = self._framework.arrays(x)
        entries = [
            StateEntry("the input", arrays.bare(x), piece=self._grid.at if in_pieces else None)
        ]
        named = [(f"argument {at}", argument) for at, argument in enumerate(args, start=1)]
        for name, argument in (*named, *kwargs.items()):
            leaves = filter(arrays.is_array, nested.flatten(argument))
            entries += [StateEntry(name, arrays.bare(leaf)) for leaf in leaves]
        check_values(self._grid.comm, entries, _SAME_INPUTS)

    def _filters_of(self, model: Any) -> Any:
        """Keep only the weights of this rank's channels, if the options ask for that."""
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
            model: model that takes ``x``, which is cut, and further arguments.
            filters: record of the parameters of which this rank has a piece.
            x, args, kwargs: arguments of the model.
            kept: counter of the bytes that are kept for the backward pass.
            ends: form of inputs and outputs; None: the form that the options name.

        Returns:
            The model's result, and the names of the calls that took whole arrays.

        Raises:
            ShapeError: an axis is cut that the input does not have.
            MismatchError: weights or inputs differ between ranks; every rank raises it. They are
                compared if ``comm.inner.check`` is ``"always"``.
        """
        if self._grid is not None and self._grid.comm.inner.check == "always":
            self._check_replicas(model, filters)
            self._check_inputs(x, args, kwargs, ends=ends)
        arrays = self._framework.arrays(x, kept)
        parameters = list(self._framework.parameters(model))
        executor = self._executor(arrays, x.ndim - 2, parameters, ends, filters)
        session = self._framework.session(executor, arrays, self._settings.strict, kept, filters)
        running = contextlib.nullcontext() if filters is None else filters.running()
        with running, session.calls_of(model):
            result = session.leave(model(session.enter(x), *args, **kwargs))
        return result, tuple(session.joined)

    def verify(
        self, model: Any, filters: Filters | None, x: Any, args: Sequence[Any], tolerance: float
    ) -> Verification:
        """Compare a model that is computed split with the whole one: see ``Split.verify``.

        Collective: over ranks.
        """
        self._check_replicas(model, filters)
        self._check_inputs(x, args, {}, ends="whole")
        whole, split = (
            self._framework.computation(*copied, x, args) for copied in self._copies(model, filters)
        )
        return Verification.of(whole, split, tolerance)

    def memory_report(
        self, model: Any, filters: Filters | None, x: Any, args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> MemoryReport:  # fmt: skip
        """Count the bytes that are kept for the backward pass: see ``Split.memory_report``.

        Collective: over ranks with ``filters="own"``.
        """
        (whole, _, _, every), (split, piece, joined, own) = (
            self._framework.memory(copied, compute, x, args, kwargs)
            for copied, _, compute in self._copies(model, filters)
        )
        return MemoryReport(whole, split, piece, joined, (every, own))

    def _copies(self, model: Any, filters: Any) -> Iterator[tuple[Any, Filters | None, Compute]]:
        """Yield a copy of a model that is computed whole, and one that is computed split.

        Each comes with the record of the parameters of which this rank has a piece, and the
        function that computes it.

        Collective: over ranks with ``filters="own"``.

        Args:
            model: model to copy; ``filters`` has cut it, unless ``filters`` is None.

        Raises:
            InvalidArgumentError: over ranks, a parameter has no values yet. Its values would
                differ between the copies.
        """
        if self._grid is not None:
            check_initialised(self._framework.state(model, filters))
        for is_split in (False, True):
            whole = copy.deepcopy(model) if filters is None else filters.whole_copy(model)
            own = self._filters_of(whole) if is_split else None
            split = partial(self.computed, whole, own, ends="whole")
            yield whole, own, split if is_split else partial(_computed_whole, whole)

    def _executor(
        self, arrays: Arrays, axes: int, parameters: Sequence[Any], ends: str | None,
        filters: Filters | None,
    ) -> Executor:  # fmt: skip
        """Return the executor of a forward pass for an input with ``axes`` data axes."""
        settings = self._settings
        if self._grid is None:
            check_axes(settings.data, axes)
            missing = axes - len(settings.data)
            parts = (settings.batch, *settings.data, *(1,) * missing)[: axes + 1]
            return InTurn(arrays, parts, settings.channels, settings.recompute)
        grid = self._grid.reaching(axes)
        inputs, outputs = ends or settings.inputs, ends or settings.outputs
        return OverRanks(
            grid, arrays, parameters, from_pieces=inputs == "pieces",
            to_pieces=outputs == "pieces", filters=filters,
        )  # fmt: skip


def _computed_whole(
    model: Any, x: Any, args: Sequence[Any], kwargs: dict[str, Any], kept: Any = None
) -> tuple[Any, tuple[str, ...]]:
    return model(x, *args, **kwargs), ()
