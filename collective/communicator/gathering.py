"""The calls that join pieces: gather, all_gather, all_to_all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.errors import InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.memory.numbers import NUMBERS
from collective.request import Disagreement, Request

from .calls import Array
from .deadline import Deadline
from .gpu_calls import View, nearest
from .pieces import Header, Leaf, PieceCalls, bytes_of
from .plan import Planned
from .rows import check_counts, split_sizes

__all__ = ["Gathering"]


class Gathering(PieceCalls):
    """The part of a communicator that gathers, and exchanges pieces."""

    def gather(
        self,
        x: Any,
        *,
        root: int = 0,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join the ranks' arrays along an axis, in rank order, at ``root``.

        Collective: every rank calls it, with one root, dtype and axis; shapes may differ
        along the axis.

        Args:
            x: an array, or a nested list, tuple or dict of arrays; or one of Python's numbers, of
                which the result is a list.
            root: the rank that gets the result.
            counts: the ranks' lengths along ``axis``, where all ranks know them: spares
                the exchange of shapes.
            axis: the axis to join along; a 0-d array counts as one of length 1.
            out: at the root, where the result goes.
            timeout, async_op: as in :meth:`all_reduce`.

        Returns:
            At the root ``out`` or a new array; None elsewhere.

        Raises:
            ShapeError: ``out`` does not fit (after the call; nothing is written).
            MismatchError: dtypes, other axes, roots or nestings differ.

        See Also:
            MPI_Gatherv.
        """
        root = self._rank("gather", "root", root)
        out = out if self.rank == root else None
        return self._collect(x, root, counts, axis, out, timeout, async_op)

    def all_gather(
        self,
        x: Any,
        *,
        counts: Sequence[int] | None = None,
        axis: int = 0,
        out: Any = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Join the ranks' arrays along an axis, in rank order, at every rank.

        Collective: as :meth:`gather`, without a root.

        Args:
            x, counts, axis, out, timeout, async_op: as in :meth:`gather`.

        Returns:
            ``out`` or a new array.

        Raises:
            As :meth:`gather`.

        See Also:
            MPI_Allgatherv, ncclAllGather.
        """
        return self._collect(x, None, counts, axis, out, timeout, async_op)

    def _collect(
        self,
        x: Any,
        root: int | None,
        counts: Sequence[int] | None,
        axis: int,
        out: Any,
        timeout: float | None,
        async_op: bool,
        difference: Disagreement | None = None,
    ) -> Any:
        """Collect at ``root``, or at all ranks if that is None.

        Args:
            difference: what the ranks have found already, if that is how they differ.
        """
        what = "all_gather" if root is None else "gather"
        receives = root is None or root == self.rank
        lengths = None if counts is None else check_counts(what, counts, self.size)
        spot = self._spot(x) if self._enqueues and lengths is not None and axis == 0 else None
        if spot is not None and lengths is not None:
            key = (what, spot.dtype, spot.shape, root, axis, tuple(lengths), False)
            shape = (sum(lengths), *spot.shape[1:]) if receives else None
            done = self._straight(self._plans.get(key), spot, shape, x, out, timeout, async_op)
            if done is not NotImplemented:
                return done
        seconds = self._seconds(timeout)
        if nested.is_tree(x):
            return self._collect_tree(what, x, root, lengths, axis, out, seconds, async_op)
        view = self._view(what, x)
        planned = self._plan_of_collection(what, view, root, axis, lengths)
        leaf = Leaf(what, view, axis)
        alike = [lengths or [leaf.rows.length] * self.size]

        def packed() -> Array:
            return leaf.array.ravel().view(np.uint8)

        def send(rows: Sequence[Sequence[int]], agreed: Planned, seconds: float) -> Any:
            """Move the piece, knowing how many rows each rank has."""
            at = sum(agreed.request.elements[: self.rank])
            return self._move_one(what, agreed, leaf, sum(rows[0]), at, receives, out, seconds)

        uneven = functools.partial(self._uneven_collection, planned.request, [leaf], 0, lengths)
        run = functools.partial(
            self._move, planned, alike, packed, _gathered, send, uneven, seconds,
            difference=difference, compares=lengths is None or self._agree_first,
        )  # fmt: skip
        return self._go(what, run, async_op, view.array, view.adapter)

    def _plan_of_collection(
        self, what: str, view: View, root: int | None, axis: int, lengths: Sequence[int] | None
    ) -> Planned:
        counts = None if lengths is None else tuple(lengths)
        on_host = type(view.array) is np.ndarray
        key = (what, view.dtype, view.array.shape, root, axis, counts, on_host)
        planned = self._plans.get(key)
        if planned is None:
            leaf = Leaf(what, view, axis)
            self._check_lengths(what, [leaf], lengths)
            planned = self._remember(key, self._piece_plan(what, [leaf], 0, root, axis, lengths))
        return planned

    def _collect_tree(
        self,
        what: str,
        x: Any,
        root: int | None,
        lengths: Sequence[int] | None,
        axis: int,
        out: Any,
        seconds: float,
        async_op: bool,
    ) -> Any:
        """Collect a structure: what a rank has of all its leaves is one message."""
        nesting = nested.skeleton(x)
        leaves = [Leaf(what, view, axis) for view in self._views(what, x)]
        if any(leaf.adapter is NUMBERS for leaf in leaves):
            raise InvalidArgumentError(
                f"{what}: a structure with numbers in it, which could be joined in two ways "
                f"{self._who}. Use numpy.asarray(x) of a list, to join lists to a longer one, or "
                f"{what}_object, which returns a list of the ranks' structures."
            )
        receives = root is None or root == self.rank
        self._check_lengths(what, leaves, lengths)
        alike = [lengths or [leaf.rows.length] * self.size for leaf in leaves]
        planned = self._piece_plan(what, leaves, nesting, root, axis, lengths)

        @functools.cache
        def packed() -> Array:
            """Return this rank's pieces as bytes."""
            return bytes_of([leaf.array.ravel() for leaf in leaves])

        def send(rows: Sequence[Sequence[int]], agreed: Planned, seconds: float) -> Any:
            """Move the pieces, knowing how many rows of each leaf each rank has."""
            incoming = agreed.request.elements if receives else None
            parts = self._move_packed(agreed, packed(), incoming, seconds)
            if not receives:
                return None
            results = [(leaf.rows, leaf.dtype, r) for leaf, r in zip(leaves, rows)]
            return self._assemble(what, parts, results, nested.flatten(x), out, nesting, x)

        uneven = functools.partial(
            self._uneven_collection, planned.request, leaves, nesting, lengths
        )
        run = functools.partial(
            self._move, planned, alike, packed, _gathered, send, uneven, seconds,
            compares=lengths is None or self._agree_first,
        )  # fmt: skip
        return self._go(what, run, async_op, *nearest(leaves))

    def _check_lengths(
        self, what: str, leaves: Sequence[Leaf], lengths: Sequence[int] | None
    ) -> None:
        """Refuse lengths that are not those of this rank's arrays."""
        if lengths is None:
            return
        mine = lengths[self.rank]
        for leaf in leaves:
            if leaf.rows.length != mine:
                raise ShapeError(
                    f"{what}: counts give rank {self.rank} {mine} rows; its array has "
                    f"{leaf.rows.length} {self._who}."
                )

    def _uneven_collection(
        self,
        request: Request,
        leaves: Sequence[Leaf],
        nesting: Any,
        lengths: Sequence[int] | None,
        headers: Sequence[Header],
    ) -> tuple[list[list[int]], Planned]:
        """Return how many rows of each leaf each rank has, and the plan for that.

        Raises:
            MismatchError: the calls differ in more than that, or in what all ranks are to know.
        """
        if lengths is not None:
            self._mismatch(headers)
        rows = self._rows_of(headers, len(leaves))
        elements = self._lengths(rows, leaves, nesting)
        uneven = Request(request.operation, root=request.root, elements=elements, sizes=rows)
        return rows, self._planned(uneven)

    # -- all_to_all ------------------------------------------------------------------------

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
        joined = functools.partial(_exchanged, planned.request, self.rank)

        def send(receives: Sequence[Sequence[int]], agreed: Planned, seconds: float) -> Any:
            """Move the pieces, knowing how many rows of each leaf come from each rank."""
            if nesting == 0:
                total = sum(receives[0])
                return self._move_one(what, agreed, leaves[0], total, None, True, out, seconds)
            parts = self._move_packed(agreed, packed(), agreed.request.incoming, seconds)
            results = [(leaf.rows, leaf.dtype, r) for leaf, r in zip(leaves, receives)]
            return self._assemble(what, parts, results, nested.flatten(x), out, nesting, x)

        # Every rank sends what this one does, unless their headers say otherwise.
        even = [[s[self.rank]] * self.size for s in sends]
        uneven = functools.partial(self._uneven_exchange, planned.request, leaves, nesting)
        run = functools.partial(
            self._move, planned, even, packed, joined, send, uneven, seconds, difference=difference
        )
        return self._go(what, run, async_op, *nearest(leaves))

    def _uneven_exchange(
        self, request: Request, leaves: Sequence[Leaf], nesting: Any, headers: Sequence[Header]
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

    # -- shared ----------------------------------------------------------------------------

    def _move(
        self,
        planned: Planned,
        alike: Sequence[Sequence[int]],
        packed: Callable[[], Array],
        joined: Callable[..., None],
        send: Callable[[Sequence[Sequence[int]], Planned, float], Any],
        uneven: Callable[[Sequence[Header]], tuple[Sequence[Sequence[int]], Planned]],
        seconds: float,
        *,
        difference: Disagreement | None = None,
        compares: bool = True,
    ) -> Any:
        """Find out how much each rank has, and move it.

        Args:
            planned: the call, if all ranks have as much as this one or as all know.
            alike: how many rows of each leaf there are of each rank then.
            packed, joined: as for :meth:`_compared`.
            send: moves it, of the rows of each leaf and rank, a plan and seconds.
            uneven: returns rows and plan where the calls' headers differ, or raises.
            difference: what the ranks have found already, if that is how they differ.
            compares: whether the calls are compared before, where the transport does not.
        """
        deadline = Deadline(seconds)
        try:
            if difference is not None:
                raise difference
            agreed = self._compared(planned, packed, joined, deadline) if compares else planned
            return send(alike, agreed, deadline.left())
        except Disagreement as found:
            found.__traceback__ = None  # whose frame knows it by name, and would never go
            headers = found.headers
        rows, agreed = uneven(headers)
        try:
            return send(rows, agreed, deadline.left())
        except Disagreement as found:
            self._mismatch(found.headers)


def _gathered(pieces: list[Array], src: Buffer, dst: Buffer | None, seconds: float) -> None:
    """Stand for the transport where the pieces have come already."""
    if dst is not None:
        np.concatenate(pieces, out=dst.array.view(np.uint8))


def _packed(leaves: Sequence[Leaf], cuts: Sequence[Sequence[int]], nesting: Any) -> Array:
    """Return the pieces as bytes, the one for rank 0 first."""
    if nesting == 0:
        return leaves[0].array.ravel().view(np.uint8)
    size = len(cuts[0]) if cuts else 0
    return bytes_of(
        [leaf.rows.piece(cut, rank) for rank in range(size) for leaf, cut in zip(leaves, cuts)]
    )


def _exchanged(
    request: Request, rank: int, sources: list[Array], src: Buffer, dst: Buffer, seconds: float
) -> None:
    """Stand for the transport where all ranks' pieces have come already."""
    # The calls are the same, so everybody cuts as this rank does.
    width, counts = src.dtype.itemsize, request.elements
    start = width * sum(counts[:rank])
    pieces = [source[start : start + width * counts[rank]] for source in sources]
    np.concatenate(pieces, out=dst.array.view(np.uint8))
