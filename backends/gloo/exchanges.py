"""Collectives in a single round of messages, all in flight at once.

The default algorithms save messages by using several rounds, and every round waits until the
slowest rank is awake. Over Gloo that costs more than the messages. Here each rank posts all of
its receives and sends, and then waits once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms import arithmetic, pieces
from collective.algorithms.folds import Folding
from collective.deadline import Deadline
from collective.memory.buffer import Buffer

from .tensors import as_bytes

if TYPE_CHECKING:
    from collective.ops import ReduceOp
    from collective.request import Request

__all__ = ["Exchange", "PreparedAllReduce", "all_gather", "all_reduce", "all_to_all", "gather",
           "reduce", "reduce_scatter", "scatter"]  # fmt: skip

# Bytes folded at a time: the sum so far stays in the cache while the next rank's part is added.
_BLOCK_BYTES = 64 << 10

#: Function that receives and sends: it takes pairs of a buffer and the source rank, and pairs of a
#: buffer and the destination rank.
Exchange = Callable[[Sequence[tuple[Buffer, int]], Sequence[tuple[Buffer, int]]], None]
#: The tensors of a message, and its source or destination rank.
Message = tuple[list[Any], int]


def _others(rank: int, size: int) -> list[int]:
    """Return the other ranks, starting after this one, so that not all ranks start with rank 0."""
    return [(rank + step) % size for step in range(1, size)]


def _parts(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    return [buffer.part(start, stop) for start, stop in pairwise(pieces.limits(counts))]


def all_gather(
    exchange: Exchange, rank: int, src: Buffer, dst: Buffer, counts: Sequence[int]
) -> None:
    """Concatenate the ranks' ``src`` in every ``dst``: each rank sends its own to all others."""
    into = _parts(dst, counts)
    others = _others(rank, len(counts))
    exchange([(into[other], other) for other in others], [(src, other) for other in others])
    pieces.copy(src, into[rank])


def all_to_all(
    exchange: Exchange,
    rank: int,
    src: Buffer,
    dst: Buffer,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
) -> None:
    """Send piece ``j`` of ``src`` to rank ``j``; concatenate what arrives in ``dst``."""
    out, into = _parts(src, send_counts), _parts(dst, recv_counts)
    others = _others(rank, len(out))
    exchange([(into[other], other) for other in others], [(out[other], other) for other in others])
    pieces.copy(out[rank], into[rank])


def gather(
    exchange: Exchange,
    rank: int,
    src: Buffer,
    dst: Buffer | None,
    counts: Sequence[int],
    root: int,
) -> None:
    """Concatenate the ranks' ``src`` in the root's ``dst``; the root posts all receives at once."""
    if dst is None:
        exchange([], [(src, root)])
        return
    into = _parts(dst, counts)
    exchange([(into[other], other) for other in _others(rank, len(counts))], [])
    pieces.copy(src, into[rank])


def scatter(
    exchange: Exchange,
    rank: int,
    src: Buffer | None,
    dst: Buffer,
    counts: Sequence[int],
    root: int,
) -> None:
    """Put piece ``rank`` of the root's ``src`` into ``dst``; the root posts all sends at once."""
    if src is None:
        exchange([(dst, root)], [])
        return
    out = _parts(src, counts)
    exchange([], [(out[other], other) for other in _others(rank, len(counts))])
    pieces.copy(out[rank], dst)


@np.errstate(all="ignore")
def reduce_scatter(
    exchange: Exchange, rank: int, src: Buffer, dst: Buffer, counts: Sequence[int], op: ReduceOp
) -> None:
    """Fold the ranks' ``src``, in rank order, and put part ``rank`` of the result into ``dst``.

    Every rank receives all inputs for its part and folds them. The scratch memory has the size of
    the part times the number of ranks.
    """
    size = len(counts)
    folding = Folding(op, src.dtype, size)
    scratch = Buffer.empty(dst.count * size, dst.dtype)
    into = _parts(scratch, [dst.count] * size)
    out = _parts(folding.enter(src), counts)
    others = _others(rank, size)
    exchange([(into[other], other) for other in others], [(out[other], other) for other in others])
    _fold_pieces(folding, rank, into, out[rank], dst)


@np.errstate(all="ignore")
def all_reduce(
    exchange: Exchange, rank: int, size: int, src: Buffer, dst: Buffer, op: ReduceOp
) -> None:
    """Fold the ranks' ``src``, in rank order, into every ``dst``: every rank receives all inputs.

    :class:`PreparedAllReduce` does the same where time matters more than memory.
    """
    folding = Folding(op, src.dtype, size)
    mine = folding.enter(src)
    into = _parts(Buffer.empty(src.count * size, src.dtype), [src.count] * size)
    others = _others(rank, size)
    exchange([(into[other], other) for other in others], [(mine, other) for other in others])
    _fold_pieces(folding, rank, into, mine, dst)


@np.errstate(all="ignore")
def reduce(
    exchange: Exchange,
    rank: int,
    size: int,
    src: Buffer,
    dst: Buffer | None,
    op: ReduceOp,
    root: int,
) -> None:
    """Fold the ranks' ``src``, in rank order, into the root's ``dst``; it receives all inputs."""
    folding = Folding(op, src.dtype, size)
    mine = folding.enter(src)
    if dst is None:
        exchange([], [(mine, root)])
        return
    into = _parts(Buffer.empty(src.count * size, src.dtype), [src.count] * size)
    exchange([(into[other], other) for other in _others(rank, size)], [])
    _fold_pieces(folding, rank, into, mine, dst)


class PreparedAllReduce:
    """Plan of an all-reduce of few elements, prepared from the request alone.

    A call of this size spends as much time in Python as in Gloo, and every rank waits for
    the slowest rank. So the tensors that Gloo sends and receives are made once. The plan has
    a buffer for the elements of each rank, this rank included. So ``dst`` may be the same memory
    as ``src``.

    Args:
        request: the call.
        rank: this rank.
        size: number of ranks.
        begin: called before anything is sent.
        move: function that receives, sends and waits like :class:`Exchange`, but with tensors; its
            last argument is the length of the longest one in bytes.
    """

    __slots__ = ("_begin", "_coming", "_fold", "_going", "_mine", "_move", "_nbytes", "_post",
                 "_pre", "_rooms")  # fmt: skip

    def __init__(
        self,
        request: Request,
        rank: int,
        size: int,
        begin: Callable[[], None],
        move: Callable[[Deadline, Sequence[Message], Sequence[Message], int], None],
    ) -> None:
        op, dtype = request.op, request.dtype
        assert dtype is not None
        self._begin, self._move = begin, move
        self._fold = arithmetic.fold(op, dtype)
        self._pre = arithmetic.pre(op, dtype, size)
        self._post = arithmetic.post(op, dtype, size)
        self._nbytes = request.nbytes
        rooms = [Buffer.empty(self._nbytes // dtype.itemsize, dtype) for _ in range(size)]
        self._rooms = [room.array for room in rooms]
        self._mine = self._rooms[rank]
        tensors = [[as_bytes(room)] for room in rooms]
        others = _others(rank, size)
        self._coming = [(tensors[other], other) for other in others]
        self._going = [(tensors[rank], other) for other in others]

    def __call__(self, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        self._begin()
        if self._pre is None:
            self._mine[:] = src.array
        else:
            with np.errstate(all="ignore"):
                self._pre(src.array, self._mine)
        self._move(deadline, self._coming, self._going, self._nbytes)
        # The sends have completed as well. So rank 0 may fold into the first buffer, although it
        # has sent from that buffer.
        total, *others, last = self._rooms
        with np.errstate(all="ignore"):
            for other in others:
                self._fold(total, other, out=total)
            self._fold(total, last, out=dst.array)
            if self._post is not None:
                self._post(dst.array, dst.array)


def _fold_pieces(
    folding: Folding, rank: int, into: list[Buffer], mine: Buffer, dst: Buffer
) -> None:
    """Fold the received pieces and ``mine`` into ``dst``.

    Args:
        folding: the operator and its scaling.
        rank: this rank.
        into: the received pieces, by rank; this rank's slot is used as scratch memory.
        mine: this rank's own piece.
        dst: buffer for the result.
    """
    room = into[rank]
    into[rank] = mine
    step = max(1, _BLOCK_BYTES // dst.dtype.itemsize)
    for low in range(0, dst.count, step):
        high = low + step
        values = [value.part(low, high) for value in into]
        folding.in_order(values, room.part(low, high), dst.part(low, high))
    folding.leave(dst)
