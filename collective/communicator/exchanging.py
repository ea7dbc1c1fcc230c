"""The call all_to_all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.request import Disagreement, Request

from .calls import Array
from .deadline import Deadline
from .pieces import Header, Leaf, PieceCalls, bytes_of
from .plan import Planned
from .rows import split_sizes

__all__ = ["Exchanging"]


class Exchanging(PieceCalls):
    """The part of a communicator that exchanges pieces."""

    def all_to_all(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join what comes.

        Collective: every rank calls it, with one dtype and axis; shapes may differ along
        the axis.

        Args:
            x: an array, or a nested list, tuple or dict of arrays, each of which is cut.
            counts: lengths of the pieces that this rank sends; ranks may differ. By
                default as ``numpy.array_split`` cuts.
            axis: the axis to cut and to join along.
            out: where the result goes; may not be ``x``.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            The pieces for this rank, in the order of their senders, as ``out`` or a new
            array.

        Raises:
            ShapeError: the counts do not add up to the axis (before anything is sent), or
                ``out`` does not fit (after the call; nothing is written).
            MismatchError: dtypes, other axes or nestings differ.

        See Also:
            MPI_Alltoallv, ncclAlltoAll.
        """
        return self._exchange(x, counts, axis, out, timeout, async_op)

    def _exchange(
        self,
        x: Any,
        counts: Sequence[int] | None,
        axis: int,
        out: Any,
        timeout: float | None,
        async_op: bool,
        difference: Disagreement | None = None,
    ) -> Any:
        """Make the call; see :meth:`all_to_all`.

        Args:
            difference: what the ranks have found already, if that is how they differ.
        """
        what = "all_to_all"
        seconds = self._seconds(timeout)
        nesting = nested.skeleton(x)
        leaves = [Leaf(what, view, axis) for view in self._views(what, x)]
        sends = [split_sizes(what, leaf.rows.length, self.size, counts) for leaf in leaves]
        planned = self._piece_plan(what, leaves, nesting, None, axis, None, sends)
        packed = functools.cache(functools.partial(_packed, leaves, sends, nesting))
        joined = functools.partial(_joined, planned.request, self.rank)

        def send(receives: list[list[int]], agreed: Planned, seconds: float) -> Any:
            """Move the pieces, knowing how many rows of each leaf come from each rank."""
            if nesting == 0:
                total = sum(receives[0])
                return self._move_one(what, agreed, leaves[0], total, None, True, out, seconds)
            parts = self._move_packed(agreed, packed(), agreed.request.incoming, seconds)
            results = [(leaf.rows, leaf.dtype, r) for leaf, r in zip(leaves, receives)]
            return self._assemble(what, parts, results, nested.flatten(x), out, nesting, x)

        def run() -> Any:
            deadline = Deadline(seconds)
            # Every rank sends what this one does, unless their headers say otherwise.
            even = [[s[self.rank]] * self.size for s in sends]
            try:
                if difference is not None:
                    raise difference
                agreed = self._compared(planned, packed, joined, deadline)
                return send(even, agreed, deadline.left())
            except Disagreement as differs:
                differs.__traceback__ = None  # whose frame knows it by name, and would never go
                headers = differs.headers
            receives, agreed = self._plan_of_uneven(headers, leaves, nesting, planned.request)
            return send(receives, agreed, deadline.left())

        return self._go(what, run, async_op, *self._near(leaves))

    def _plan_of_uneven(
        self, headers: Sequence[Header], leaves: Sequence[Leaf], nesting: Any, request: Request
    ) -> tuple[list[list[int]], Planned]:
        """Return how many rows of each leaf come from each rank, and the plan for that.

        Raises:
            MismatchError: the calls differ in more than how much each rank sends to each.
        """
        self._rows_of(headers, len(leaves))
        table = [header["options"]["sizes"] for header in headers]
        receives = [
            [table[rank][k][self.rank] for rank in range(self.size)] for k in range(len(leaves))
        ]
        agreed = Request(
            request.operation, sizes=table, elements=request.elements,
            incoming=self._lengths(receives, leaves, nesting),
        )  # fmt: skip
        return receives, self._planned(agreed)


def _packed(leaves: Sequence[Leaf], cuts: Sequence[Sequence[int]], nesting: Any) -> Array:
    """Return the pieces as bytes, the one for rank 0 first."""
    if nesting == 0:
        return leaves[0].rows.array.ravel().view(np.uint8)
    size = len(cuts[0]) if cuts else 0
    return bytes_of(
        [leaf.rows.piece(cut, rank) for rank in range(size) for leaf, cut in zip(leaves, cuts)]
    )


def _joined(
    request: Request, rank: int, sources: list[Array], src: Buffer, dst: Buffer, seconds: float
) -> None:
    """Stand for the transport where all ranks' pieces have come already."""
    # The calls are the same, so everybody cuts as this rank does.
    width, counts = src.dtype.itemsize, request.elements
    start = width * sum(counts[:rank])
    pieces = [source[start : start + width * counts[rank]] for source in sources]
    np.concatenate(pieces, out=dst.array.view(np.uint8))
