"""The call all_to_all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from collective.memory import nested
from collective.memory.buffer import Buffer
from collective.request import Disagreement, Request

from .calls import Array
from .pieces import UINT8, Leaf, PieceCalls, bytes_of
from .plan import Plan
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
        what, method = "all_to_all", self._backend.all_to_all
        plain = timeout is None and axis == 0 and counts is None and not async_op
        plain = plain and not self._agree_sizes and out is not None
        done, differ = self._again(what, x, out) if plain else (False, None)
        if done:
            return out
        seconds = self._seconds(timeout)
        nesting = nested.skeleton(x)
        leaves = [Leaf(what, view, axis) for view in self._views(what, x)]
        sends = [split_sizes(what, leaf.rows.length, self.size, counts) for leaf in leaves]
        call = self._piece_call(what, leaves, nesting, None, axis, None, sends)
        on_gpu = call.options.get("device")

        def run() -> Any:
            # What a rank receives is written in the others' headers, or like its own.
            headers = differ
            if headers is None:
                try:
                    even = [[s[self.rank]] * self.size for s in sends]
                    if self._agree_first:
                        self._agree(call, seconds)
                    elif self._agree_sizes or on_gpu:
                        told = self._swap(call, packed(), seconds)
                        if told is not None:
                            return send(even, call, _told(told, self.rank))
                    return send(even, call)
                except Disagreement as difference:
                    headers = difference.headers
            self._rows_of(headers, len(leaves))
            table = [header["options"]["sizes"] for header in headers]
            receives = [
                [table[rank][k][self.rank] for rank in range(self.size)] for k in range(len(leaves))
            ]
            return send(receives, Request(what, sizes=table))

        @functools.cache
        def packed() -> Array:
            """Return the pieces as bytes, the one for rank 0 first."""
            if nesting == 0:
                return leaves[0].rows.array.ravel().view(np.uint8)
            return bytes_of(
                [
                    leaf.rows.piece(cut, rank)
                    for rank in range(self.size)
                    for leaf, cut in zip(leaves, sends)
                ]
            )

        def send(receives: list[list[int]], agreed: Request, method: Any = method) -> Any:
            if nesting == 0:
                inner = leaves[0].rows.inner
                elements = tuple([n * inner for n in c[0]] for c in (sends, receives))
                return self._move_one(
                    what, Plan(agreed, method, *elements), leaves[0], sum(receives[0]), None, True,
                    out, seconds, (what, x) if plain and agreed is call else None,
                )  # fmt: skip
            to, coming = (
                [
                    sum(n[r] * leaf.rows.inner * leaf.dtype.itemsize
                        for n, leaf in zip(counts, leaves))
                    for r in range(self.size)
                ]
                for counts in (sends, receives)
            )  # fmt: skip
            src = Buffer(packed(), UINT8)
            dst = Buffer.empty(sum(coming), UINT8, src.array)
            self._carry(Plan(agreed, method, to, coming), src, dst, seconds, alike=False)
            parts = np.split(dst.array, list(accumulate(coming))[:-1])
            results = [(leaf.rows, leaf.dtype, r) for leaf, r in zip(leaves, receives)]
            return self._assemble(what, parts, results, nested.flatten(x), out, nesting, x)

        return self._go(what, run, async_op, *self._near(leaves))


def _told(sources: list[Array], rank: int) -> Any:
    """Return what stands for the transport where all ranks' pieces have come already."""

    def all_to_all(
        src: Buffer, dst: Buffer, send_counts: Sequence[int], recv_counts: Sequence[int], *rest: Any
    ) -> None:
        # The calls are the same, so everybody cuts as this rank does.
        width = src.dtype.itemsize
        start = width * sum(send_counts[:rank])
        pieces = [source[start : start + width * send_counts[rank]] for source in sources]
        np.concatenate(pieces, out=dst.array.view(np.uint8))

    return all_to_all
