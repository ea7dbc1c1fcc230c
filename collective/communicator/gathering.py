"""The calls gather and all_gather."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collective.errors import ShapeError
from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.request import Disagreement, Request

from .calls import Array
from .pieces import UINT8, Leaf, PieceCalls, bytes_of
from .plan import Plan
from .rows import check_counts

__all__ = ["Gathering"]

# Counts by which a call can be known again.
_LISTS, _INTEGERS = (list, tuple), {int}


class Gathering(PieceCalls):
    """The part of a communicator that gathers."""

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
            x: an array, or a nested list, tuple or dict of arrays.
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
        return self._collect("gather", x, root, counts, axis, out, timeout, async_op)

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
        return self._collect("all_gather", x, None, counts, axis, out, timeout, async_op)

    def _collect(
        self,
        what: str,
        x: Any,
        root: int | None,
        counts: Sequence[int] | None,
        axis: int,
        out: Any,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        method = self._backend.all_gather if root is None else self._backend.gather
        plain = timeout is None and axis == 0 and out is not None
        again: Any = what, root
        differ = None
        if counts is not None:
            plain = plain and type(counts) in _LISTS and set(map(type, counts)) == _INTEGERS
            again = what, root, *(counts if plain else ())
            kept = self._repeated.find(again, x, out) if plain else None
            if kept is not None:
                return self._repeat(kept, x, out, async_op)
        else:
            plain = plain and not async_op and not self._agree_sizes
            done, differ = self._again(again, x, out) if plain else (False, None)
            if done:
                return out
        seconds = self._seconds(timeout)
        nesting = nested.skeleton(x)
        leaves = [Leaf(what, view, axis) for view in self._views(what, x)]
        receives = root is None or root == self.rank
        known: list[list[int]] | None = None
        if counts is not None:
            lengths = check_counts(what, counts, self.size)
            for leaf in leaves:
                if leaf.rows.length != lengths[self.rank]:
                    raise ShapeError(
                        f"{what}: counts give rank {self.rank} {lengths[self.rank]} rows; its "
                        f"array has {leaf.rows.length} {self._who}."
                    )
            known = [lengths] * len(leaves)
        call = self._piece_call(what, leaves, nesting, root, axis, counts)
        on_gpu = call.options.get("device")

        @functools.cache
        def packed() -> Array:
            """Return this rank's pieces as bytes."""
            arrays = [leaf.rows.array.ravel() for leaf in leaves]
            return arrays[0].view(np.uint8) if nesting == 0 else bytes_of(arrays)

        def send(rows: list[list[int]], agreed: Request, method: Any = method) -> Any:
            """Move the pieces, knowing how many rows of each leaf each rank has."""
            end = () if root is None else (root,)
            if nesting == 0:
                elements = [length * leaves[0].rows.inner for length in rows[0]]
                plan = Plan(agreed, method, elements, *end)
                return self._move_one(
                    what, plan, leaves[0], sum(rows[0]), sum(elements[: self.rank]), receives, out,
                    seconds, (again, x) if plain and agreed is call else None,
                )  # fmt: skip
            nbytes = [
                sum(r[k] * leaf.rows.inner * leaf.dtype.itemsize for r, leaf in zip(rows, leaves))
                for k in range(self.size)
            ]
            src = Buffer(packed(), UINT8)
            dst = Buffer.empty(sum(nbytes), UINT8, src.array) if receives else None
            self._carry(Plan(agreed, method, nbytes, *end), src, dst, seconds, alike=False)
            if dst is None:
                return None
            parts = np.split(dst.array, list(accumulate(nbytes))[:-1])
            results = [(leaf.rows, leaf.dtype, r) for leaf, r in zip(leaves, rows)]
            return self._assemble(what, parts, results, nested.flatten(x), out, nesting, x)

        def run() -> Any:
            even = known or [[leaf.rows.length] * self.size for leaf in leaves]
            headers = differ
            if headers is None:
                try:
                    if self._agree_first:
                        self._agree(call, seconds)
                    elif (self._agree_sizes or on_gpu) and known is None:
                        told = self._swap(call, packed(), seconds)
                        if told is not None:
                            return send(even, call, _told(told))
                    return send(even, call)
                except Disagreement as difference:
                    headers = difference.headers
            if known is not None:
                self._mismatch(headers)
            rows = self._rows_of(headers, len(leaves))
            return send(rows, Request(what, sizes=rows, root=root))

        return self._go(what, run, async_op, *self._near(leaves))


def _told(pieces: list[Array]) -> Any:
    """Return what stands for the transport where the pieces have come already."""

    def gather(src: Buffer, dst: Buffer | None, *rest: Any) -> None:
        if dst is not None:
            np.concatenate(pieces, out=dst.array.view(np.uint8))

    return gather
