"""Collectives in one round of messages, all under way at once.

The default algorithms save messages by taking rounds, and every round waits for the
slowest rank to be woken: over Gloo that costs more than the messages. Here each rank posts
everything that it will receive and send, and then waits once.
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

# Folded at a time, so that what one rank has added is in the cache for the next.
_BLOCK_BYTES = 64 << 10

#: What is to be received and to be sent: buffers, and from and to which rank.
Exchange = Callable[[Sequence[tuple[Buffer, int]], Sequence[tuple[Buffer, int]]], None]
#: The tensors of a message, and from or to which rank it goes.
Message = tuple[list[Any], int]


def _others(rank: int, size: int) -> list[int]:
    """Return the other ranks, beginning after this one, so that not all turn to the same."""
    return [(rank + step) % size for step in range(1, size)]


def _parts(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    return [buffer.part(start, stop) for start, stop in pairwise(pieces.limits(counts))]


def all_gather(
    exchange: Exchange, rank: int, src: Buffer, dst: Buffer, counts: Sequence[int]
) -> None:
    """Concatenate the ranks' ``src`` in every ``dst``: each sends its own to all others."""
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
    """Concatenate the ranks' ``src`` in ``dst`` of ``root``, which receives all at once."""
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
    """Leave piece ``rank`` of ``src`` of ``root`` in ``dst``; the root sends all at once."""
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
    """Fold the ranks' ``src``, in rank order, and leave part ``rank`` of it in ``dst``.

    Every rank receives all inputs of its part, in scratch of that size times the number of
    ranks, and folds them.
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
    """Fold the ranks' ``src``, in rank order, into every ``dst``: everybody gets them all.

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
    """Fold the ranks' ``src``, in rank order, into ``dst`` of ``root``, which gets them all."""
    folding = Folding(op, src.dtype, size)
    mine = folding.enter(src)
    if dst is None:
        exchange([], [(mine, root)])
        return
    into = _parts(Buffer.empty(src.count * size, src.dtype), [src.count] * size)
    exchange([(into[other], other) for other in _others(rank, size)], [])
    _fold_pieces(folding, rank, into, mine, dst)


class PreparedAllReduce:
    """The plan of an all-reduce of few elements: what it takes depends on the request alone.

    A call of this size spends as much time in Python as in Gloo, and every rank waits for
    the slowest. So the tensors that Gloo sends and receives are made once: each rank's elements
    have a room here, this rank's too, which also lets ``dst`` be what this rank contributes.

    Args:
        request: the call.
        rank: this rank.
        size: how many there are.
        begin: called before anything is sent.
        move: receives, sends and waits, as :class:`Exchange`, but of tensors, the longest of so
            many bytes.
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
        # The sends are over, too: the first room, in which the others are folded, is rank 0's own,
        # and what it has sent.
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
    """Fold what came and ``mine``; this rank's slot of ``into`` is scratch."""
    room = into[rank]
    into[rank] = mine
    step = max(1, _BLOCK_BYTES // dst.dtype.itemsize)
    for low in range(0, dst.count, step):
        high = low + step
        values = [value.part(low, high) for value in into]
        folding.in_order(values, room.part(low, high), dst.part(low, high))
    folding.leave(dst)
