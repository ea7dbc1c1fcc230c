"""Operations on a framework's arrays, on one rank and between ranks.

Each operation between ranks has its adjoint: four pairs, and the exchange of rows that windows
reach over. Each operation is linear, so that nothing is kept for the backward pass. Its gradient is
another of these operations, and so it can be differentiated again. A framework adds the way to make
a node of its graph, and its names of a few operations, with gradients and on bare arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collective.communicator import Communicator
from collective.training.differentiable import CollectiveStep

from .windows import exchange


class Halo(NamedTuple):
    """Rows along an axis that travel between ranks, seen from one rank.

    Attributes:
        length: number of rows that the rank has; the ranges below count from the first of them.
        kept: rows of its own that the rank needs itself.
        sent: rows that each rank needs from this one; an empty range for this rank itself.
        received: number of rows that come from each rank; 0 for this rank itself.
        before: number of received rows that come before the rank's own rows.
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
            have, want: rows that each rank has, and rows that it needs, numbered along the axis.
        """
        parts, first = exchange(have, want), have[rank].start
        mine = [range(rows.start - first, rows.stop - first) for rows in parts[rank]]
        sent = [range(0) if peer == rank else rows for peer, rows in enumerate(mine)]
        received = [0 if peer == rank else len(row[rank]) for peer, row in enumerate(parts)]
        return cls(len(have[rank]), mine[rank], sent, received, sum(received[:rank]))


class Arrays(ABC):
    """Differentiable operations of a framework on its arrays.

    Args:
        like: input of the model; masks and similar arrays are drawn on its device.
        kept: counter of the bytes that recomputed pieces keep; None: do not count.
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
        """Return whether ``x`` is an array, and not a number or a setting."""

    @abstractmethod
    def has_gradient(self, x: Any) -> bool:
        """Return whether ``x`` is an array whose gradient is needed."""

    @abstractmethod
    def slice(self, array: Any, dimension: int, rows: range) -> Any:
        """Return some rows of an array, a view if possible."""

    @abstractmethod
    def take(self, array: Any, dimension: int, rows: Any) -> Any:
        """Return the rows whose numbers are in a NumPy array."""

    @abstractmethod
    def concatenate(self, arrays: Sequence[Any], dimension: int) -> Any:
        """Join arrays along a dimension."""

    @abstractmethod
    def pad(self, array: Any, widths: Sequence[tuple[int, int]], fill: float) -> Any:
        """Pad each dimension of a non-empty array before and behind its rows by ``widths``."""

    @abstractmethod
    def tied(self, result: Any, *arrays: Any) -> Any:
        """Return ``result`` with ``arrays`` in its graph, although it does not depend on them.

        Other ranks compute results from their arrays, and every rank has to take part in the
        collective calls of their backward pass.
        """

    @abstractmethod
    def numbers(self, like: Any, dimension: int, numbers: Any) -> Any:
        """Return numbers as an array that broadcasts against ``like``, one for each row."""

    @abstractmethod
    def full_bare(self, like: Any, shape: Sequence[int], fill: float) -> Any:
        """Return an array filled with one number, of the dtype and on the device of ``like``."""

    @abstractmethod
    def checkpoint(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Call a function, keep nothing for backward, and call it again in the backward pass."""

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
            groups: number of groups of channels; each group in each sample has a mean:
                ``[N, groups]``. None: each channel has a mean over the batch, ``[1, C]``.
            dtype: dtype of the results.
            average: function from sums over this rank's rows to means over all rows.
            near: function from all means to the means of this rank's samples; None: ``x`` is the
                whole array.
        """

    @abstractmethod
    def seed(self) -> int:
        """Draw a seed."""

    @abstractmethod
    def generator(self, seed: int | None) -> Any:
        """Return a source of random numbers; for None, return the framework's own source."""

    # -- and between ranks -----------------------------------------------------------------

    @abstractmethod
    def used_together(self, arrays: Sequence[Any], comm: Communicator) -> Sequence[Any]:
        """Return whole arrays whose gradients are the sums over the ranks, in one call."""

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
        """Return a whole array whose gradient is the sum of the ranks' gradients."""
        return self.used_together([array], comm)[0]

    def added(self, array: Any, comm: Communicator) -> Any:
        """Return the sum of the ranks' arrays; each of them gets the gradient of the sum."""
        return self.record(CollectiveStep(lambda x: comm.all_reduce(x), lambda g: g), array)

    def cut(self, array: Any, comm: Communicator, dimension: int, counts: Sequence[int]) -> Any:
        """Return this rank's rows of a whole array; the backward pass gathers the gradients."""
        start = sum(counts[: comm.rank])
        mine = _rows(dimension, range(start, start + counts[comm.rank]))

        def forward(x: Any) -> Any:
            return self.copy_bare(x[mine])

        def backward(g: Any) -> Any:
            return self.joined(g, comm, dimension, counts)

        return self.record(CollectiveStep(forward, backward), array)

    def joined(self, array: Any, comm: Communicator, dimension: int, counts: Sequence[int]) -> Any:
        """Return the ranks' rows, joined; the gradient is this rank's rows of the whole one."""

        def forward(x: Any) -> Any:
            return comm.all_gather(x, axis=dimension, counts=counts)

        def backward(g: Any) -> Any:
            return self.cut(g, comm, dimension, counts)

        return self.record(CollectiveStep(forward, backward), array)

    def exchanged(self, array: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return the rows that this rank needs; gradients return to the rows' owners."""

        def forward(x: Any) -> Any:
            return self._extended(x, comm, dimension, halo)

        def backward(g: Any) -> Any:
            return self._returned(g, comm, dimension, halo)

        return self.record(CollectiveStep(forward, backward), array)

    def _returned(self, array: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return the gradient of :meth:`exchanged`, itself as a node of the graph."""

        def forward(g: Any) -> Any:
            return self._reduced(g, comm, dimension, halo)

        def backward(h: Any) -> Any:
            return self.exchanged(h, comm, dimension, halo)

        return self.record(CollectiveStep(forward, backward), array)

    def _extended(self, x: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return the rows that this rank needs: its own between those of other ranks."""
        outgoing = self.join_bare([x[_rows(dimension, rows)] for rows in halo.sent], dimension)
        counts = [len(rows) for rows in halo.sent]
        arrived = comm.all_to_all(outgoing, axis=dimension, counts=counts)
        before, after = range(halo.before), range(halo.before, arrived.shape[dimension])
        own = x[_rows(dimension, halo.kept)]
        first, last = (arrived[_rows(dimension, rows)] for rows in (before, after))
        return self.join_bare([first, own, last], dimension)

    def _reduced(self, g: Any, comm: Communicator, dimension: int, halo: Halo) -> Any:
        """Return sums over the ranks for this rank's rows: the adjoint of :meth:`_extended`."""
        own = range(halo.before, halo.before + len(halo.kept))
        others = range(own.start), range(own.stop, g.shape[dimension])
        outgoing = self.join_bare([g[_rows(dimension, rows)] for rows in others], dimension)
        arrived = comm.all_to_all(outgoing, axis=dimension, counts=halo.received)
        if len(own) == halo.length:
            total = self.copy_bare(g[_rows(dimension, own)])
        else:
            shape = (*g.shape[:dimension], halo.length, *g.shape[dimension + 1 :])
            total = self.full_bare(g, shape, 0)
            total[_rows(dimension, halo.kept)] = g[_rows(dimension, own)]
        first = 0
        for rows in halo.sent:
            addend = arrived[_rows(dimension, range(first, first + len(rows)))]
            total[_rows(dimension, rows)] += addend
            first += len(rows)
        return total


def _rows(dimension: int, rows: range) -> tuple[slice, ...]:
    """Return the index of some rows; an empty range selects none, even with negative limits."""
    cut = slice(rows.start, rows.stop) if rows else slice(0, 0)
    return (*(slice(None),) * dimension, cut)
