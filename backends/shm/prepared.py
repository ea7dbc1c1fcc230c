"""Operations in symmetric memory, prepared once and repeated: the fastest path.

With all ranks' buffers at corresponding places of one segment, an operation is: arrive,
fold or copy some slices, depart. The slices are made the first time; a repetition is two
waits and a NumPy call or two for each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.algorithms import arithmetic
from collective.algorithms.pieces import limits
from collective.backends.onesided import CHUNK_BYTES
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.ops import ReduceOp
from collective.request import Request

from .control import BROKEN, Control
from .symmetric import Heap

__all__ = ["FLOATING", "PREPARED_BYTES", "Prepared", "one_ufunc", "prepare"]

Array = np.ndarray[Any, Any]
# To fold: the ranks' slices, in rank order, and where the result goes, the first of them
# being where it is made.
Piece = tuple[list[Array], list[Array]]

#: What NumPy raises, where the user has asked for that, when a sum overflows. Ranks must
#: not part over it. It is raised when the ufunc is done, so the result is there, infinity
#: included; entering np.errstate or suppress would cost half a microsecond a call.
FLOATING = (FloatingPointError, RuntimeWarning)

#: Below this a copy through the slots costs less than a second wait.
PREPARED_BYTES = 24 << 10


class Prepared:
    """One operation on given buffers.

    The call's digest is made to depend on the place of the source: if the ranks' places do
    not correspond, the comparison of digests says so before anything is touched.
    """

    def __init__(
        self,
        control: Control,
        request: Request,
        place: tuple[int, int],
        copies: Sequence[tuple[Array, Array]] = (),
        pieces: Sequence[Piece] = (),
    ) -> None:
        self._control = control
        self._call = request.at(*place)
        self._copies = [(to, source) for to, source in copies if to.size]
        self._pieces = pieces
        self._whole: Array | None = None
        self._pre: arithmetic.Scale | None = None

    def folding(self, op: ReduceOp, buffer: Buffer) -> Prepared:
        """Set the arithmetic of the pieces."""
        size = self._control.size
        self._fold = arithmetic.fold(op, buffer.dtype)
        self._pre = arithmetic.pre(op, buffer.dtype, size)
        self._post = arithmetic.post(op, buffer.dtype, size)
        self._whole = buffer.array
        longest = max((targets[0].size for _, targets in self._pieces), default=0)
        self._scratch = np.empty(longest if size > 2 else 0, buffer.array.dtype)
        return self

    def run(self, timeout: float) -> None:
        """Do it.

        Raises:
            Disagreement: the ranks' calls or places differ; nothing was written.
        """
        control = self._control
        words = control.words
        if words[BROKEN]:
            raise control.failure(self._call)
        control.arrive(self._call, timeout)
        if self._pre is not None and self._whole is not None:
            with np.errstate(all="ignore"):
                self._pre(self._whole, self._whole)
            control.sync(timeout)
        # A peer that has given up may use its memory again: little is written to it then.
        for slices, targets in self._pieces:
            if words[BROKEN]:
                raise control.failure(self._call)
            self._fold_piece(slices, targets)
        for to, source in self._copies:
            if words[BROKEN]:
                raise control.failure(self._call)
            to[:] = source
        control.sync(timeout)

    def _join(self, left: Array, right: Array, out: Array) -> None:
        try:  # noqa: SIM105 - see FLOATING
            self._fold(left, right, out=out)
        except FLOATING:
            pass

    def _fold_piece(self, slices: list[Array], targets: list[Array]) -> None:
        first = targets[0]
        value, partial = slices[0], self._scratch[: first.size]
        for piece in slices[1:-1]:
            self._join(value, piece, partial)
            value = partial
        self._join(value, slices[-1], first)
        if self._post is not None:
            self._post(first, first)
        for target in targets[1:]:
            target[:] = first


def one_ufunc(op: ReduceOp, dtype: DType) -> bool:
    """Tell whether a fold is a single NumPy ufunc on the whole arrays."""
    return op.function is None and dtype.name != "bfloat16"


def prepare(heap: Heap, control: Control, name: str, arguments: tuple[Any, ...]) -> Prepared | None:
    """Return operation ``name`` of a transport, prepared, or None if that cannot be.

    Args:
        arguments: what the transport was called with, but for the timeout.
    """
    src: Buffer = arguments[0]
    request: Request = arguments[-1]
    rank, size = control.rank, control.size
    number, offset, _ = heap.locate(src.array)
    if not number or size == 1:
        return None
    place = (number, offset)

    def views(counts: Sequence[int]) -> list[Array]:
        found = [heap.view(number, r, offset, src.array.dtype, counts[r]) for r in range(size)]
        return [view for view in found if view is not None]  # src itself keeps them mapped

    if name == "broadcast":
        root = arguments[1]
        whole = views([src.count] * size)
        # All ranks copy alike: the others fetch what begins, the root hands out the rest.
        cut = src.count * (size - 1) // size
        if rank == root:
            copies = [(whole[r][cut:], src.array[cut:]) for r in range(size) if r != root]
        else:
            copies = [(src.array[:cut], whole[root][:cut])]
        return Prepared(control, request, place, copies)
    dst: Buffer = arguments[1]
    if name == "all_gather":
        counts: Sequence[int] = arguments[2]
        starts = limits(counts)
        order = [(rank + step) % size for step in range(size)]
        parts = views(counts)
        copies = [(dst.array[starts[r] : starts[r + 1]], parts[r]) for r in order]
        if dst.array[starts[rank] :].ctypes.data == src.address:
            copies = copies[1:]
        return Prepared(control, request, place, copies)
    whole = views([src.count] * size)
    if name == "all_to_all":
        sends, receives = arguments[2], arguments[3]
        if len({*sends, *receives}) > 1:
            return None  # where a piece starts in the peer's buffer is not known here
        count = sends[0]
        order = [(rank + step) % size for step in range(size)]
        mine = slice(rank * count, (rank + 1) * count)
        copies = [(dst.array[r * count : (r + 1) * count], whole[r][mine]) for r in order]
        return Prepared(control, request, place, copies)
    if name == "reduce_scatter":
        counts, op = arguments[2], arguments[3]
        if not one_ufunc(op, src.dtype):
            return None
        start = sum(counts[:rank])
        pieces = _pieces(whole, start, start + counts[rank], [dst.array], start)
        prepared = Prepared(control, request, place, pieces=pieces).folding(op, src)
        return None if prepared._pre is not None else prepared  # it would change src
    assert name == "all_reduce"
    if dst is not src or not one_ufunc(arguments[2], src.dtype):
        return None
    start, stop = (src.count * r // size for r in (rank, rank + 1))
    targets = [whole[(rank + step) % size] for step in range(size)]
    pieces = _pieces(whole, start, stop, targets, 0)
    return Prepared(control, request, place, pieces=pieces).folding(arguments[2], src)


def _pieces(
    sources: list[Array], start: int, stop: int, targets: list[Array], shift: int
) -> list[Piece]:
    step = max(1, CHUNK_BYTES // sources[0].itemsize)
    return [
        (
            [source[low : min(low + step, stop)] for source in sources],
            [target[low - shift : min(low + step, stop) - shift] for target in targets],
        )
        for low in range(start, stop, step)
    ]
