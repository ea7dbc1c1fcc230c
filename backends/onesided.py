"""Collectives for transports whose ranks can read each other's memory.

Every rank exposes its buffers, all ranks arrive, each rank reads the data that it needs, and all
ranks depart. ``threads`` and ``shm`` supply the primitives of :class:`OneSided`, which are its
abstract methods; the operations here are written once over these. Every reduction runs in rank
order, so a result has the same bits for every ``order``. Every call compares the ranks' digests on
arrival.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collective.algorithms import arithmetic, pieces
from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.deadline import Deadline
from collective.errors import BackendError
from collective.memory.buffer import Buffer
from collective.ops import ReduceOp
from collective.request import Request

Array = np.ndarray[Any, Any]

# Size of the pieces of a reduction. Two inputs and an output fit into a second-level cache of
# 1 MiB, and NumPy's half microsecond per call is negligible.
CHUNK_BYTES = 256 << 10


class Region:
    """Memory that a peer has exposed: elements of one dtype, readable from this rank.

    In this class the memory is mapped into this process, so ``array`` is the peer's own array.
    """

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array

    def read(self, start: int, stop: int, scratch: Array) -> Array:
        """Return the elements, as a view or in ``scratch``, which has at least that length."""
        return self.array[start:stop]

    def copy(self, start: int, stop: int, out: Array) -> None:
        """Copy the elements to ``out``."""
        out[:] = self.array[start:stop]


class OneSided(Backend):
    """The collectives; see the module's docstring."""

    # -- primitives of the transport -----------------------------------------------

    @abstractmethod
    def _open(
        self,
        request: Request,
        src: Array | None,
        dst: Array | None,
        largest: int,
        deadline: Deadline,
    ) -> bool:
        """Expose ``src`` and ``dst``, wait for all ranks, and compare their digests.

        Args:
            largest: size in bytes of the largest ``src`` on any rank; the same on all ranks whose
                digests are equal.

        Returns:
            Whether peers may read the exposed data even after this rank has returned, because it
            is a copy in shared memory. Otherwise the ranks must :meth:`_sync` before any of them
            returns. The same on all ranks.

        Raises:
            Disagreement: the digests differ.
        """

    @abstractmethod
    def _region(self, rank: int, dtype: np.dtype[Any], count: int) -> Region:
        """Return the first ``count`` elements of the exposed ``src`` of ``rank``, a peer."""

    @abstractmethod
    def _outputs(self, dtype: np.dtype[Any], count: int) -> list[Array] | None:
        """Return every rank's exposed ``dst``, if this rank can write to all of them.

        All ranks get the same answer, list or None.
        """

    @abstractmethod
    def _results(self, rank: int, dtype: np.dtype[Any], count: int) -> Region:
        """Return the first ``count`` elements of ``rank``'s exposed ``dst``, for reading."""

    @abstractmethod
    def _sync(self, deadline: Deadline) -> None:
        """Wait until every rank has reached this point of the operation."""

    # -- operations -------------------------------------------------------------------

    def agree(self, request: Request, deadline: Deadline) -> None:
        self._open(request, None, None, 0, deadline)

    def barrier(self, request: Request, src: None, dst: None, deadline: Deadline) -> None:
        self._open(request, None, None, 0, deadline)

    def broadcast(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        # src and dst are the same buffer on each rank.
        mine, root = dst.array, request.root
        root_only = mine if self.rank == root else None
        stays = self._open(request, root_only, None, mine.nbytes, deadline)
        if self.rank != root:
            self._region(root, mine.dtype, mine.size).copy(0, mine.size, mine)
        if not stays:
            self._sync(deadline)

    def all_reduce(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        fold = _ChunkedFold(request.op, src, self.size)
        source, out = fold.prepare(src.array), dst.array
        count = source.size
        if self._open(request, source, out, source.nbytes, deadline):
            fold.run(self._regions(source), 0, count, out)
            return
        bounds = pieces.limits(pieces.even(count, self.size))
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        regions = self._regions(source)
        outputs = self._outputs(out.dtype, count)
        if outputs is not None:
            others = [array for rank, array in enumerate(outputs) if rank != self.rank]
            check = partial(self.refuse_broken, request)
            fold.run(regions, start, stop, out[start:stop], others, check)
            # Until all ranks have reached this point, peers write their pieces to this rank's
            # output, and read its input.
            self._sync(deadline)
            return
        fold.run(regions, start, stop, out[start:stop])
        # Two barriers. After the first all pieces are reduced, so peers may read them. After the
        # second all peers have read them, so a rank may change its own piece.
        self._sync(deadline)
        for rank in self._others():
            low, high = bounds[rank], bounds[rank + 1]
            if low < high:
                self._results(rank, out.dtype, count).copy(low, high, out[low:high])
        self._sync(deadline)

    def reduce(self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        fold = _ChunkedFold(request.op, src, self.size)
        source = fold.prepare(src.array)
        count = source.size
        bounds = pieces.limits(pieces.even(count, self.size))
        start, stop = bounds[self.rank], bounds[self.rank + 1]
        # If this rank is not the root, its piece stays here until the root fetches it.
        piece = np.empty(stop - start, source.dtype) if dst is None else dst.array[start:stop]
        if self._open(request, source, piece, source.nbytes, deadline):
            if dst is not None:
                fold.run(self._regions(source), 0, count, dst.array)
            return
        fold.run(self._regions(source), start, stop, piece)
        self._sync(deadline)
        if dst is not None:
            self._fetch(self._results, dst.array, bounds)
        self._sync(deadline)

    def reduce_scatter(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> None:
        fold = _ChunkedFold(request.op, src, self.size)
        source = fold.prepare(src.array)
        stays = self._open(request, source, None, source.nbytes, deadline)
        start = sum(request.elements[: self.rank])
        stop = start + request.elements[self.rank]
        # In place, dst may alias src, but only the part of src that no peer reads.
        fold.run(self._regions(source), start, stop, dst.array)
        if not stays:
            self._sync(deadline)

    def scan(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        fold = _ChunkedFold(request.op, src, self.rank + 1)
        source = fold.prepare(src.array)
        in_place = src.array is dst.array or np.may_share_memory(source, dst.array)
        # A separate output, because higher ranks read this rank's input while it writes its result.
        out = np.empty_like(dst.array) if in_place else dst.array
        stays = self._open(request, source, None, source.nbytes, deadline)
        fold.run(self._regions(source)[: self.rank + 1], 0, source.size, out)
        if not stays:
            self._sync(deadline)
        if in_place:
            dst.array[:] = out

    def scatter(
        self, request: Request, src: Buffer | None, dst: Buffer, deadline: Deadline
    ) -> None:
        counts = request.elements
        largest = sum(counts) * dst.dtype.itemsize
        stays = self._open(request, None if src is None else src.array, None, largest, deadline)
        start = sum(counts[: self.rank])
        count = counts[self.rank]
        if src is not None:
            dst.array[:] = src.array[start : start + count]
        elif count:
            region = self._region(request.root, dst.array.dtype, sum(counts))
            region.copy(start, start + count, dst.array)
        if not stays:
            self._sync(deadline)

    def gather(self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        largest = max(request.elements) * src.dtype.itemsize
        stays = self._open(request, src.array, None, largest, deadline)
        if dst is not None:
            self._collect(src.array, dst.array, request.elements)
        if not stays:
            self._sync(deadline)

    all_gather = gather  # in an all_gather every rank has a dst

    def all_to_all(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        # A reader must know where its piece starts, so the ranks share offsets before the pieces.
        source = src.array
        offsets = np.array(pieces.limits(request.elements), np.int64)
        table = self._all_offsets(offsets, request, deadline)
        totals = table[:, self.size]
        largest = int(totals.max()) * src.dtype.itemsize
        stays = self._open(request, source, None, largest, deadline)
        position = 0
        for rank, count in enumerate(request.incoming):
            out = dst.array[position : position + count]
            position += count
            if rank == self.rank:
                out[:] = source[offsets[rank] : offsets[rank + 1]]
            elif count:
                start = self._start_of_piece(table[rank], rank, count)
                region = self._region(rank, source.dtype, int(totals[rank]))
                region.copy(start, start + count, out)
        if not stays:
            self._sync(deadline)

    # -- shared pieces ---------------------------------------------------------------

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next rank so that readers spread out."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _regions(self, mine: Array) -> list[Region]:
        """Return the regions of all ranks; this rank's region is ``mine``."""
        dtype, count = mine.dtype, mine.size
        return [
            Region(mine) if rank == self.rank else self._region(rank, dtype, count)
            for rank in range(self.size)
        ]

    def _collect(self, mine: Array, out: Array, counts: Sequence[int]) -> None:
        starts = pieces.limits(counts)
        own = out[starts[self.rank] : starts[self.rank + 1]]
        if own.size and own.__array_interface__["data"] != mine.__array_interface__["data"]:
            own[:] = mine
        self._fetch(self._region, out, starts)

    def _fetch(self, exposed: Callable[..., Region], out: Array, limits: Sequence[int]) -> None:
        """Copy the other ranks' pieces into ``out``; ``exposed`` returns the region of a piece."""
        for rank in self._others():
            low, high = limits[rank], limits[rank + 1]
            if low < high:
                exposed(rank, out.dtype, high - low).copy(0, high - low, out[low:high])

    def _start_of_piece(self, offsets: Array, rank: int, count: int) -> int:
        """Return where this rank's piece begins in the data of ``rank``, which has ``offsets``.

        Raises:
            BackendError: the piece does not have ``count`` elements, or is outside of the data.
        """
        start, stop, whole = (int(offsets[index]) for index in (self.rank, self.rank + 1, -1))
        if start < 0 or stop - start != count or stop > whole:
            text = (
                f"all_to_all: rank {rank} announces elements {start} to {stop} of {whole} for rank "
                f"{self.rank}, which expects {count}"
            )
            self.abort(Failure("aborted", self.rank, text))
            raise BackendError(
                f"{text} [rank {self.rank}]. A program has overwritten memory that the ranks "
                "share.",
                self.name,
            )
        return start

    def _all_offsets(self, offsets: Array, request: Request, deadline: Deadline) -> Array:
        stays = self._open(request, offsets, None, offsets.nbytes, deadline)
        length = offsets.size
        table = np.empty((self.size, length), np.int64)
        for rank, region in enumerate(self._regions(offsets)):
            region.copy(0, length, table[rank])
        if not stays:
            self._sync(deadline)
        return table


class _ChunkedFold:
    """One reduction: prepares the input, reduces pieces in rank order, and finishes them."""

    __slots__ = ("_fold", "_post", "_pre")

    def __init__(self, op: ReduceOp, src: Buffer, size: int) -> None:
        self._fold = arithmetic.fold(op, src.dtype)
        self._pre = arithmetic.pre(op, src.dtype, size)
        self._post = arithmetic.post(op, src.dtype, size)

    @np.errstate(all="ignore")
    def prepare(self, source: Array) -> Array:
        """Return this rank's contribution: ``source``, or a new array with scaled values."""
        if self._pre is None:
            return source
        scaled = np.empty_like(source)
        self._pre(source, scaled)
        return scaled

    @np.errstate(all="ignore")
    def run(
        self,
        regions: Sequence[Region],
        start: int,
        stop: int,
        out: Array,
        copies: Sequence[Array] = (),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Reduce elements ``start`` to ``stop`` of ``regions`` into ``out``.

        Args:
            regions: one region for each rank, in rank order.
            out: array of ``stop - start`` elements; it may alias the memory of a region.
            copies: arrays of peers that get the result, too, at ``start``.
            check: function that raises if a peer has given up. Such a peer may have returned its
                array to its caller, so nothing may be written to the array.
        """
        fold: Callable[..., Any] = self._fold
        post = self._post
        step = max(1, CHUNK_BYTES // out.itemsize)
        length = min(step, stop - start)
        acc = left = right = out[:0]
        if len(regions) > 2:
            acc = np.empty(length, out.dtype)
        if any(type(region) is not Region for region in regions):
            left, right = np.empty(length, out.dtype), np.empty(length, out.dtype)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            result = out[low - start : high - start]
            value = regions[0].read(low, high, left)
            for region in regions[1:-1]:
                partial = acc[: high - low]
                fold(value, region.read(low, high, right), out=partial)
                value = partial
            if len(regions) > 1:
                fold(value, regions[-1].read(low, high, right), out=result)
            elif value is not result:
                result[:] = value
            if post is not None:
                post(result, result)
            if copies:
                check()
            for copy in copies:
                copy[low:high] = result
