"""What is done with a framework's arrays, on a rank and between ranks.

What travels has its adjoint: four pairs, and rows that windows reach over. Each is linear, so that
nothing is kept for the backward pass, and its gradient is one of the others, which can be
differentiated again. A framework adds how a node of its graph is made and what it calls a few
operations, with gradients and on bare arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.training.differentiable import CollectiveStep

from .windows import exchange

__all__ = ["Arrays", "Halo"]


class Halo(NamedTuple):
    """Which rows along an axis travel, seen from one rank.

    Attributes:
        length: rows that the rank has; the ranges below count from the first of them.
        kept: those of them that it needs itself.
        sent: those that each rank needs, none for itself.
        received: how many rows it gets from each rank, none from itself.
        before: how many of these come before its own.
    """

    length: int
    kept: range
    sent: list[range]
    received: list[int]
    before: int

    @classmethod
    def of(cls, have: Sequence[range], want: Sequence[range], rank: int) -> Halo:
        """Return the halo of a rank.

        Args:
            have, want: the rows that each rank has and needs, of the whole axis.
        """
        parts, first = exchange(have, want), have[rank].start
        mine = [range(rows.start - first, rows.stop - first) for rows in parts[rank]]
        sent = [range(0) if peer == rank else rows for peer, rows in enumerate(mine)]
        received = [0 if peer == rank else len(row[rank]) for peer, row in enumerate(parts)]
        return cls(len(have[rank]), mine[rank], sent, received, sum(received[:rank]))


class Arrays(ABC):
    """What a framework is able to do with its arrays, differentiably.

    Args:
        like: the input of the model; masks and the like are drawn where this is.
        kept: counts what is kept by pieces that are computed again; None: nobody asks.
    """

    def __init__(self, like: Any, kept: Any = None) -> None:
        self.like = like
        self._kept = kept

    # -- of a framework, on a rank ---------------------------------------------------------

    @abstractmethod
    def entering(self, x: Any) -> Any:
        """Return an input as an array of the graph."""

    @abstractmethod
    def bare(self, x: Any) -> Any:
        """Return an array without its graph."""

    @abstractmethod
    def is_array(self, x: Any) -> bool:
        """Return whether ``x`` is an array, and no number or setting."""

    @abstractmethod
    def has_gradient(self, x: Any) -> bool:
        """Return whether ``x`` is an array of which a gradient is asked for."""

    @abstractmethod
    def slice(self, array: Any, dimension: int, rows: range) -> Any:
        """Return some rows of an array, a view if possible."""

    @abstractmethod
    def take(self, array: Any, dimension: int, rows: Any) -> Any:
        """Return the rows whose numbers an array of NumPy has."""

    @abstractmethod
    def concatenate(self, arrays: Sequence[Any], dimension: int) -> Any:
        """Join arrays along a dimension."""

    @abstractmethod
    def pad(self, array: Any, widths: Sequence[tuple[int, int]], fill: float) -> Any:
        """Put so much before and behind the rows of each dimension of an array with elements."""

    @abstractmethod
    def tied(self, result: Any, *arrays: Any) -> Any:
        """Return ``result`` with ``arrays`` in its graph, where nothing was computed of them.

        Other ranks compute something of theirs, and every rank has to take part in the backward
        collectives that come of it.
        """

    @abstractmethod
    def numbers(self, like: Any, dimension: int, numbers: Any) -> Any:
        """Return numbers, one for each row of an array along a dimension, to compute with it."""

    @abstractmethod
    def full_bare(self, like: Any, shape: Sequence[int], fill: float) -> Any:
        """Return an array of one number, of the dtype and on the device of another one."""

    @abstractmethod
    def checkpoint(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Call a function that is called again in the backward pass instead of being kept."""

    @abstractmethod
    def moments(
        self,
        x: Any,
        groups: int | None,
        dtype: Any,
        average: Callable[[Any], Any],
        near: Callable[[Any], Any] | None,
    ) -> tuple[Any, Any]:
        """Return means and variances.

        Args:
            x: this rank's rows, ``(N, C, ...)``.
            groups: of the channels, a mean of each in each sample: ``[N, groups]``. None: a mean of
                each channel over the batch, ``[1, C]``.
            dtype: of the results.
            average: from sums of this rank's rows to means of all.
            near: from means of all to those of this rank's samples; None: ``x`` is all there is.
        """

    @abstractmethod
    def seed(self) -> int:
        """Draw a seed."""

    @abstractmethod
    def generator(self, seed: int | None) -> Any:
        """Return a source of random numbers; None: the framework's own."""

    # -- and between ranks -----------------------------------------------------------------

    @abstractmethod
    def used_together(self, arrays: Sequence[Any], comm: Communicator) -> Sequence[Any]:
        """Return whole arrays, whose gradients are the sums of the ranks', in one call."""

    @abstractmethod
    def record(self, node: CollectiveStep, array: Any) -> Any:
        """Make a node of the graph."""

    @abstractmethod
    def join_bare(self, arrays: Sequence[Any], dimension: int) -> Any:
        """Join arrays without gradients along a dimension."""

    @abstractmethod
    def copy_bare(self, array: Any) -> Any:
        """Return a contiguous copy of an array without gradients."""

    # -- with their adjoints ---------------------------------------------------------------

    def used(self, array: Any, comm: Communicator) -> Any:
        """Return a whole array, whose gradient is the sum of the ranks' gradients."""
        return self.used_together([array], comm)[0]

    def added(self, array: Any, comm: Communicator) -> Any:
        """Return the sum of the ranks' arrays; its gradient is that of each."""
        return self.record(CollectiveStep(lambda x: comm.all_reduce(x), lambda g: g), array)

    def cut(self, array: Any, comm: Communicator, dimension: int, counts: Sequence[int]) -> Any:
        """Return this rank's rows of a whole array; the gradients are gathered."""
        start = sum(counts[: comm.rank])
        mine = _rows(dimension, range(start, start + counts[comm.rank]))

        def forward(x: Any) -> Any:
            return self.copy_bare(x[mine])

        def backward(g: Any) -> Any:
            return self.joined(g, comm, dimension, counts)

        return self.record(CollectiveStep(forward, backward), array)

    def joined(self, array: Any, comm: Communicator, dimension: int, counts: Sequence[int]) -> Any:
        """Return the ranks' rows, joined; the gradient is this rank's rows of its own."""

        def forward(x: Any) -> Any:
            return comm.all_gather(x, axis=dimension, counts=counts)

        def backward(g: Any) -> Any:
            return self.cut(g, comm, dimension, counts)

        return self.record(CollectiveStep(forward, backward), array)

    def exchanged(self, array: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return the rows that this rank needs of the ranks' arrays; the gradients go back."""

        def forward(x: Any) -> Any:
            return self._extended(x, comm, dimension, halo)

        def backward(g: Any) -> Any:
            return self._returned(g, comm, dimension, halo)

        return self.record(CollectiveStep(forward, backward), array)

    def _returned(self, array: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return what is the gradient of :meth:`exchanged` for this one."""

        def forward(g: Any) -> Any:
            return self._reduced(g, comm, dimension, halo)

        def backward(h: Any) -> Any:
            return self.exchanged(h, comm, dimension, halo)

        return self.record(CollectiveStep(forward, backward), array)

    def _extended(self, x: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return the rows that this rank needs, its own between those of others."""
        outgoing = self.join_bare([x[_rows(dimension, rows)] for rows in halo.sent], dimension)
        counts = [len(rows) for rows in halo.sent]
        arrived = comm.all_to_all(outgoing, axis=dimension, counts=counts)
        before, after = range(halo.before), range(halo.before, arrived.shape[dimension])
        own = x[_rows(dimension, halo.kept)]
        first, last = (arrived[_rows(dimension, rows)] for rows in (before, after))
        return self.join_bare([first, own, last], dimension)

    def _reduced(self, g: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return the sums of what the ranks have for this rank's rows; the adjoint."""
        own = range(halo.before, halo.before + len(halo.kept))
        others = range(own.start), range(own.stop, g.shape[dimension])
        outgoing = self.join_bare([g[_rows(dimension, rows)] for rows in others], dimension)
        arrived = comm.all_to_all(outgoing, axis=dimension, counts=halo.received)
        if len(own) == halo.length:
            found = self.copy_bare(g[_rows(dimension, own)])
        else:
            shape = (*g.shape[:dimension], halo.length, *g.shape[dimension + 1 :])
            found = self.full_bare(g, shape, 0)
            found[_rows(dimension, halo.kept)] = g[_rows(dimension, own)]
        first = 0
        for rows in halo.sent:
            more = arrived[_rows(dimension, range(first, first + len(rows)))]
            found[_rows(dimension, rows)] += more
            first += len(rows)
        return found


def _rows(dimension: int, rows: range) -> tuple[slice, ...]:
    """Return the index of some rows; of none whatever their numbers, which may be negative."""
    cut = slice(rows.start, rows.stop) if rows else slice(0, 0)
    return (*(slice(None),) * dimension, cut)
