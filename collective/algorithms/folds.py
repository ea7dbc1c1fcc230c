"""Folding of buffers in a reduction, and three ways to fold over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collective.memory.buffer import Buffer

from . import arithmetic, moves, pieces

if TYPE_CHECKING:
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp

    from .messages import Messages


class Folding:
    """Arithmetic of one reduction: each input enters once, and each result leaves once.

    Args:
        op: the operator.
        dtype: the element type.
        size: number of ranks whose inputs are folded.

    Attributes:
        op, dtype: as the arguments.
    """

    __slots__ = ("_fold", "_post", "_pre", "dtype", "op")

    def __init__(self, op: ReduceOp, dtype: DType, size: int) -> None:
        self.op, self.dtype = op, dtype
        self._fold = arithmetic.fold(op, dtype)
        self._pre = arithmetic.pre(op, dtype, size)
        self._post = arithmetic.post(op, dtype, size)

    @property
    def scales(self) -> bool:
        """Whether an input is scaled before it is folded."""
        return self._pre is not None

    @property
    def finishes(self) -> bool:
        """Whether a folded value must still be turned into the result."""
        return self._post is not None

    def enter(self, src: Buffer, room: Buffer | None = None) -> Buffer:
        """Return this rank's contribution: ``src`` itself, or the scaled ``src`` in ``room``.

        Args:
            src: a part of this rank's input.
            room: buffer of the same length for the scaled elements; it may be ``src``.
                None allocates new memory.
        """
        if self._pre is None:
            return src
        if room is None:
            room = Buffer.empty(src.count, src.dtype)
        self._pre(src.array, room.array)
        return room

    def join(self, left: Buffer, right: Buffer, out: Buffer) -> None:
        """Set ``out`` to ``left op right``; ``out`` may be one of the operands."""
        self._fold(left.array, right.array, out=out.array)

    def in_order(self, values: Sequence[Buffer], room: Buffer, out: Buffer) -> None:
        """Set ``out`` to ``((v0 op v1) op v2) op …``.

        Args:
            values: at least one buffer, all of one length.
            room: scratch buffer of that length, none of ``values``.
            out: the result; it may be one of ``values``, or ``room``.
        """
        total = values[0]
        for value in values[1:-1]:
            self.join(total, value, room)
            total = room
        if len(values) > 1:
            self.join(total, values[-1], out)
        else:
            self.copy(total, out)

    def copy(self, value: Buffer, out: Buffer) -> None:
        """Set ``out`` to ``value``, which may be the same memory."""
        pieces.copy(value, out)

    def leave(self, dst: Buffer) -> None:
        """Turn a folded value into the result, in place."""
        if self._post is not None:
            self._post(dst.array, dst.array)


def collected(messages: Messages, folding: Folding, src: Buffer) -> list[Buffer]:
    """Return the contribution of each rank, in rank order, in scratch of ``src``'s size each."""
    counts = [src.count] * messages.size
    every = messages.room(sum(counts), src.dtype)
    moves.all_gather(messages, folding.enter(src), every, counts)
    return pieces.cut(every, counts)


def doubled(messages: Messages, folding: Folding, src: Buffer, dst: Buffer) -> None:
    """Fold the ranks' ``src`` into every rank's ``dst``, with scratch of the same size.

    This is recursive doubling: in each round, pairs of ranks exchange their values folded so far.
    If the number of ranks is not a power of two, some of the first ranks form pairs. In each pair
    the even rank sends its value to the odd rank before the rounds, and gets the result after them.
    Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), section 4.5. Each fold joins neighbouring ranges of ranks, the lower range on the
    left. So operators need not commute, and all ranks get the same bits.
    """
    rank, size = messages.rank, messages.size
    value = folding.enter(src, dst)
    if size == 1:
        messages.copy(value, dst)
        folding.leave(dst)
        return
    power = 1 << (size.bit_length() - 1)
    extra = size - power  # number of pairs of the first ranks
    if rank < 2 * extra and rank % 2 == 0:  # the odd neighbour takes part for both ranks
        messages.send(value, rank + 1)
        messages.recv(dst, rank + 1)
        return
    theirs = messages.room(src.count, src.dtype)
    if rank < 2 * extra:
        messages.recv(theirs, rank - 1)
        folding.join(theirs, value, dst)
        value = dst
    # Number the remaining ranks without gaps. Neighbouring positions still stand for neighbouring
    # ranges of ranks.
    position = rank // 2 if rank < 2 * extra else rank - extra
    bit = 1
    while bit < power:
        other = position ^ bit
        peer = 2 * other + 1 if other < extra else other + extra
        messages.exchange(value, peer, theirs, peer)
        # Both ranks of a pair compute the same expression, so they go on with the same bits.
        left, right = (theirs, value) if position & bit else (value, theirs)
        folding.join(left, right, dst)
        value = dst
        bit *= 2
    folding.leave(dst)
    if rank < 2 * extra:
        messages.send(dst, rank - 1)


def parts(
    messages: Messages, folding: Folding, inputs: Sequence[Buffer], dst: Buffer, in_order: bool
) -> None:
    """Fold part r of the ranks' inputs into rank r's ``dst``.

    This is pairwise exchange: in step d, each rank sends its part of the input for the rank d
    after it. So ranks send only unchanged inputs, and the inputs stay untouched. Thakur,
    Rabenseifner & Gropp (2005), section 4.4.

    Args:
        messages: messages of the call.
        folding: folding of the call.
        inputs: the parts of this rank's whole input.
        dst: this rank's part of the result; may be this rank's part of its input.
        in_order: if true, fold ``((x0 op x1) op x2) op …``, which takes scratch of one chunk a
            rank and one more. If false, fold parts as they arrive, with scratch of one chunk; the
            operator must commute.
    """
    if in_order and messages.size > 2:
        _parts_in_order(messages, folding, inputs, dst)
    else:
        _parts_as_they_arrive(messages, folding, inputs, dst)
    folding.leave(dst)


def _parts_as_they_arrive(
    messages: Messages, folding: Folding, inputs: Sequence[Buffer], dst: Buffer
) -> None:
    rank, size = messages.rank, messages.size
    step = pieces.chunk(dst.dtype.itemsize)
    value = folding.enter(inputs[rank], dst)
    if size == 1:
        messages.copy(value, dst)
    room = messages.room(min(step, dst.count), dst.dtype)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        # The parts differ in length, and so in their number of chunks. The side without further
        # chunks sends or receives an empty buffer, for which there is no message.
        for low in range(0, max(inputs[to].count, dst.count), step):
            out, result = inputs[to].part(low, low + step), dst.part(low, low + step)
            theirs = room.part(0, result.count)
            messages.exchange(folding.enter(out), to, theirs, source)
            mine = value.part(low, low + step)
            # Put the lower rank on the left, so that folds of two ranks are always in order.
            left, right = (theirs, mine) if source < rank else (mine, theirs)
            folding.join(left, right, result)
        value = dst  # from the second peer on, join to the fold so far


def _parts_in_order(
    messages: Messages, folding: Folding, inputs: Sequence[Buffer], dst: Buffer
) -> None:
    rank, size = messages.rank, messages.size
    step = pieces.chunk(dst.dtype.itemsize)
    width = min(step, dst.count)
    scratch = messages.room((size + 1) * width, dst.dtype)
    # Receive one chunk at a time from every rank. Rank 0's chunk may come last, and the fold cannot
    # begin without it. So with whole parts the scratch would be as long as the input.
    for low in range(0, max(part.count for part in inputs), step):
        result = dst.part(low, low + step)
        *values, room = (
            scratch.part(slot * width, slot * width + result.count) for slot in range(size + 1)
        )
        for distance in range(1, size):
            to, source = (rank + distance) % size, (rank - distance) % size
            out = inputs[to].part(low, low + step)
            messages.exchange(folding.enter(out), to, values[source], source)
        values[rank] = folding.enter(inputs[rank].part(low, low + step), values[rank])
        folding.in_order(values, room, result)
