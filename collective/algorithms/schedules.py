"""Collective calls as lists of steps: an algorithm runs once, and its steps are replayed.

A :class:`Schedule` has everything that one rank does in one call: the steps of an algorithm, with
addresses relative to the call's arrays. :func:`record` makes it from a request. A transport whose
core is in C replays it there; :meth:`Schedule.run` replays it in Python. Both send the same
messages, so ranks of both kinds can make a call together.

Every call begins with the *comparison*. Each of its messages carries the mark of the sender's call.
The pattern of the messages depends only on the number of ranks. So ranks in different calls meet,
and all of them notice. The messages also carry a piece of each rank, which may be empty. For a
short call the pieces are the inputs, and the rest of the call needs no message.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

from . import agreement, arithmetic, levels, moves, pieces, reductions
from .folds import Folding
from .levels import Levels
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp
    from collective.request import Request

Array = np.ndarray[Any, Any]

#: Bases of places: the input, the output, and the scratch memory of a call.
SRC, DST, SCRATCH = range(3)
# A place is its base, shifted by this number of bits, plus an offset in bytes.
_BASE_BITS = 56
#: Kinds of steps; see :class:`CallStep`.
EXCHANGE, COPY, FOLD, DIVIDE, INSIDE = range(5)
#: Numbers of bytes that the ranks' pieces may have in all, and that each piece may have, for a call
#: to be a short one. The messages of a short call are fewer, but each piece goes through scratch
#: memory, and every rank gets all of them. Measured over TCP between two and four ranks of one host
#: of two cores: microseconds of a short call / of a long one, the least of 15 turns.
#:
#:   =================  ============  ============  ==============  ==============
#:   ranks              2             2             4               4
#:   pieces in all      128 KiB       256 KiB       128 KiB         256 KiB
#:   =================  ============  ============  ==============  ==============
#:   all_reduce         42 / 53       83 / 77       133 / 188       789 / 684
#:   all_gather         44 / 52       86 / 76       155 / 292       219 / 332
#:   all_to_all         45 / 53       88 / 76       221 / 255       1,467 / 1,237
#:   broadcast          48 / 40       94 / 61       214 / 166       337 / 286
#:   =================  ============  ============  ==============  ==============
#:
#: A broadcast, which has only one piece, takes 28 / 33 and 110 / 222 at 64 KiB.
SHORT_BYTES, SHORT_PIECE_BYTES = 128 << 10, 64 << 10
# Alignment of scratch memory, in bytes: a cache line.
_ALIGNMENT = 64
_UINT8 = BY_NAME["uint8"]
# Offsets of places must not reach their base.
_OFFSETS = (1 << _BASE_BITS) - 1


class CallStep(NamedTuple):
    """One step of a schedule.

    Attributes:
        kind: ``EXCHANGE``: send ``nleft`` bytes at ``left`` to rank ``to``, and at the same time
            receive ``nright`` bytes at ``out`` from rank ``source``. ``COPY``: copy ``nleft`` bytes
            from ``left`` to ``out``; the two places may be the same memory. ``FOLD``: set ``out``
            to ``left op right``, each of ``nleft`` bytes; ``out`` may be an operand. ``DIVIDE``:
            divide the elements in ``nleft`` bytes at ``out`` by the number ``nright``, in place.
            ``INSIDE``: the same as ``EXCHANGE``, over the transport inside this rank's host, which
            numbers the host's ranks by place.
        to, source: ranks, or -1 if the step sends or receives nothing.
        left, right, out: places: the base (``SRC``, ``DST`` or ``SCRATCH``), shifted left by 56
            bits, plus the offset in bytes.
        nleft, nright: lengths in bytes; see ``kind``.
    """

    kind: int
    to: int = -1
    source: int = -1
    left: int = 0
    right: int = 0
    out: int = 0
    nleft: int = 0
    nright: int = 0


class Marked(PointToPoint, Protocol):
    """Part of a transport that replays need: messages, and messages with a mark."""

    def exchange_marked(
        self, src: Array | None, to: int, dst: Array | None, source: int, mark: int,
        deadline: Deadline,
    ) -> int:  # fmt: skip
        """Send bytes and a mark to rank ``to``; receive the same from rank ``source``.

        The message belongs to collective calls, like those with the tag ``COLLECTIVE_TAG``. A
        payload that comes with another mark than ``mark`` is dropped, whatever its length.

        Args:
            src: bytes to send (uint8); None sends the mark alone.
            dst: memory for the received bytes (uint8); None is memory for none.
            mark: 63 bits: the digest of this rank's call, or 0 if calls are known to differ.

        Returns:
            The mark of the received message.
        """


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that one rank does in one call.

    Attributes:
        request: the request of the call.
        rank, size: this rank, and the number of ranks.
        nsrc, ndst: lengths in bytes of the input and the output. They are 0 if the rank has none,
            or does not use it.
        pieces: lengths in bytes of the ranks' pieces in the comparison, by rank.
        start: offset in bytes of this rank's own piece in the input.
        scratch: length in bytes of the scratch memory. Its beginning receives the pieces, in the
            order of the ranks rank, rank + 1, …, wrapping around to rank - 1.
        steps: what the rank does after the comparison.
        dtype: element type of the arrays; None in a barrier.
        fold: name of the operator of the folds, as the native core names it; None if the call has
            no fold, or if a user's function folds.
        scale: function that scales the input before the call; None if it is not scaled. It must
            not write to the input, so the call is made on a copy.
        finish: function that finishes the output in place after the call; None if there is none.
    """

    request: Request
    rank: int
    size: int
    nsrc: int
    ndst: int
    pieces: Sequence[int]
    start: int
    scratch: int
    steps: Sequence[CallStep]
    dtype: DType | None
    fold: str | None
    scale: arithmetic.Scale | None
    finish: arithmetic.Scale | None

    @property
    def mark(self) -> int:
        """Mark of the call's messages in the comparison; 0 would say that calls differ."""
        return self.request.digest or 1

    @property
    def comparison(self) -> Schedule:
        """The comparison alone, which leaves the ranks' pieces in its output."""
        total = sum(self.pieces)
        step = CallStep(COPY, left=SCRATCH << _BASE_BITS, out=DST << _BASE_BITS, nleft=total)
        return replace(
            self, ndst=total, scratch=total, steps=[step], fold=None, scale=None, finish=None
        )

    def wire(self) -> bytes | None:
        """Return the steps for C: eight signed numbers of 64 bits each, with the low byte first.

        The result is None if a user's function folds: only Python can call it.
        """
        if self.fold is None and any(step.kind == FOLD for step in self.steps):
            return None
        numbers = [number for step in self.steps for number in step]
        return struct.pack(f"<{len(numbers)}q", *numbers)

    def run(
        self, transport: Marked, src: Buffer | None, dst: Buffer | None, deadline: Deadline,
        compare: Callable[[Array, Array, Deadline], object] | None = None,
        inside: PointToPoint | None = None,
    ) -> None:  # fmt: skip
        """Make the call.

        Args:
            transport: the messages of this rank.
            compare: function that makes the comparison, given the bytes of the input and memory for
                the pieces; by default it is made here.
            inside: messages between the ranks of this host, for a call on two levels.
            src, dst: the input and the output, or None, as the contract has them for the operation.
            deadline: for the call.

        Raises:
            Disagreement: the ranks make different calls; raised on every rank, with all headers.
                The output is unchanged.
        """
        make = partial(self._make, transport, compare, inside)
        arithmetic.around(make, self.scale, self.finish)(src, dst, deadline)

    def _make(
        self, transport: Marked, compare: Callable[[Array, Array, Deadline], object] | None,
        inside: PointToPoint | None, src: Buffer | None, dst: Buffer | None, deadline: Deadline,
    ) -> None:  # fmt: skip
        scratch = np.empty(self.scratch, np.uint8)
        memory = [scratch[:0] if each is None else each.array.view(np.uint8) for each in (src, dst)]
        memory.append(scratch)
        if compare is None:
            self._compare(transport, memory, deadline)
        else:
            compare(memory[SRC][: self.nsrc], scratch[: sum(self.pieces)], deadline)
        with np.errstate(all="ignore"):
            self._replay(transport, inside, memory, deadline)

    def _compare(self, transport: Marked, memory: Sequence[Array], deadline: Deadline) -> None:
        """Compare the ranks' calls, and gather their pieces in scratch memory.

        The rounds are those of Bruck's all-gather: see ``moves.all_gather``.
        """
        rank, size, scratch = self.rank, self.size, memory[SCRATCH]
        limits = pieces.limits([*self.pieces[rank:], *self.pieces[:rank]])
        scratch[: limits[1]] = memory[SRC][self.start : self.start + limits[1]]
        mark = self.mark
        have = 1
        while have < size:
            more = min(have, size - have)
            received = transport.exchange_marked(
                scratch[: limits[more]] if mark else None,
                (rank - have) % size,
                scratch[limits[have] : limits[have + more]] if mark else None,
                (rank + have) % size,
                mark,
                deadline,
            )
            # The mark speaks for all ranks of which the sender has heard. After the last round
            # every rank has heard of all ranks, so all of them know alike whether calls differ.
            if received != mark:
                mark = 0
            have += more
        if not mark:
            agreement.compare_headers(Messages(transport, deadline), self.request)

    def _replay(
        self, transport: Marked, inside: PointToPoint | None, memory: Sequence[Array],
        deadline: Deadline,
    ) -> None:  # fmt: skip
        levels = {EXCHANGE: Messages(transport, deadline)}
        if inside is not None:
            levels[INSIDE] = Messages(inside, deadline)
        op, dtype = self.request.op, self.dtype
        for step in self.steps:
            left = _bytes_at(memory, step.left, step.nleft)
            if step.kind in (EXCHANGE, INSIDE):
                received = _bytes_at(memory, step.out, step.nright)
                levels[step.kind].exchange(
                    Buffer(left, _UINT8), step.to, Buffer(received, _UINT8), step.source
                )
                continue
            out = _bytes_at(memory, step.out, step.nleft)
            if step.kind == COPY:
                np.copyto(out, left)
                continue
            assert dtype is not None
            out = out.view(dtype.storage)
            if step.kind == FOLD:
                right = _bytes_at(memory, step.right, step.nleft).view(dtype.storage)
                arithmetic.fold(op, dtype)(left.view(dtype.storage), right, out=out)
            else:
                divide = arithmetic.post(op, dtype, step.nright)
                assert divide is not None
                divide(out, out)


def _bytes_at(memory: Sequence[Array], place: int, nbytes: int) -> Array:
    start = place & _OFFSETS
    return memory[place >> _BASE_BITS][start : start + nbytes]


# -- recording -------------------------------------------------------------------------------------


class _Placeholder:
    """Array without memory, in the buffers of a call that is recorded.

    Args:
        base: ``SRC``, ``DST`` or ``SCRATCH``.
        start: offset in bytes.
        size: number of elements.
        itemsize: size of an element in bytes.

    Attributes:
        number: the place, as in :class:`CallStep`.
        size: as the argument.
        nbytes: length in bytes.
    """

    __slots__ = ("_itemsize", "nbytes", "number", "size")

    def __init__(self, base: int, start: int, size: int, itemsize: int) -> None:
        self.number = base << _BASE_BITS | start
        self.size, self.nbytes = size, size * itemsize
        self._itemsize = itemsize

    def __getitem__(self, part: slice) -> _Placeholder:
        start, stop, _ = part.indices(self.size)
        base, offset = self.number >> _BASE_BITS, self.number & _OFFSETS
        size = max(0, stop - start)
        return _Placeholder(base, offset + start * self._itemsize, size, self._itemsize)


def _buffer(base: int, start: int, count: int, dtype: DType) -> Buffer:
    return Buffer(cast("Array", _Placeholder(base, start, count, dtype.itemsize)), dtype)


def _place(buffer: Buffer) -> int:
    return cast("_Placeholder", buffer.array).number


@dataclass(slots=True)
class _Draft:
    """Draft of a schedule: what has been recorded so far.

    Attributes:
        scratch: length in bytes of the scratch memory.
        steps: the steps.
    """

    scratch: int
    steps: list[CallStep] = field(default_factory=list)

    def copy(self, src: Buffer, dst: Buffer) -> None:
        """Write down a copy."""
        left, out, nbytes = _place(src), _place(dst), src.nbytes
        if not nbytes or left == out:
            return
        if self.steps and self.steps[-1].kind == COPY:  # the last copy may end where this begins
            last = self.steps[-1]
            if (left, out) == (last.left + last.nleft, last.out + last.nleft):
                left, out, nbytes = last.left, last.out, last.nleft + nbytes
                self.steps.pop()
        self.steps.append(CallStep(COPY, left=left, out=out, nleft=nbytes))


class _StepRecorder(Messages):
    """Messages of a call that are written down as steps, and not sent.

    Args:
        rank, size: as in :class:`Messages`.
        draft: where they are written down. Several levels of a call have one draft.
        kind: ``EXCHANGE`` or ``INSIDE``.
        ranks: the numbers of the ranks in the steps; by default the ranks themselves.
    """

    __slots__ = ("_kind", "_ranks", "draft")

    def __init__(
        self, rank: int, size: int, draft: _Draft, kind: int = EXCHANGE,
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size = rank, size
        self.draft = draft
        self._kind = kind
        self._ranks = range(size) if ranks is None else ranks

    def send(self, src: Buffer, dst: int) -> None:
        if src.count:
            to = self._ranks[dst]
            self.draft.steps.append(CallStep(self._kind, to=to, left=_place(src), nleft=src.nbytes))

    def recv(self, dst: Buffer, src: int) -> None:
        if dst.count:
            source, out = self._ranks[src], _place(dst)
            self.draft.steps.append(CallStep(self._kind, source=source, out=out, nright=dst.nbytes))

    def exchange(self, src: Buffer, to: int, dst: Buffer, source: int) -> None:
        if src.count and dst.count:
            peers = self._ranks[to], self._ranks[source]
            places = _place(src), 0, _place(dst)
            self.draft.steps.append(CallStep(self._kind, *peers, *places, src.nbytes, dst.nbytes))
        else:
            self.send(src, to)
            self.recv(dst, source)

    def copy(self, src: Buffer, dst: Buffer) -> None:
        self.draft.copy(src, dst)

    def room(self, count: int, dtype: DType) -> Buffer:
        start = -(-self.draft.scratch // _ALIGNMENT) * _ALIGNMENT
        self.draft.scratch = start + count * dtype.itemsize
        return _buffer(SCRATCH, start, count, dtype)

    def folding(self, op: ReduceOp, dtype: DType, size: int) -> Folding:
        return _RecordedFolding(self.draft, op, dtype, size)

    def levels(self, hosts: Sequence[Sequence[int]]) -> Levels:
        """Return the messages on two levels that are written to the same draft.

        Args:
            hosts: the ranks of each host.
        """
        host = next(number for number, members in enumerate(hosts) if self.rank in members)
        place = hosts[host].index(self.rank)
        across: Messages | None = None
        if place < min(map(len, hosts)):
            peers = [members[place] for members in hosts]
            across = _StepRecorder(host, len(hosts), self.draft, EXCHANGE, peers)
        inside = _StepRecorder(place, len(hosts[host]), self.draft, INSIDE)
        return Levels(hosts, host, place, self, inside, across)


class _RecordedFolding(Folding):
    """Folding whose folds are written down as steps.

    The input of a schedule is scaled already. A value of a single rank, which nothing is folded
    with, is finished after the schedule.
    """

    __slots__ = ("_divides", "_draft", "_size")

    def __init__(self, draft: _Draft, op: ReduceOp, dtype: DType, size: int) -> None:
        super().__init__(op, dtype, size)
        self._draft, self._size = draft, size
        # All that post() does to other operators is done by any fold already.
        self._divides = op.name == "avg" and size > 1 and self.finishes

    def enter(self, src: Buffer, room: Buffer | None = None) -> Buffer:
        return src

    def join(self, left: Buffer, right: Buffer, out: Buffer) -> None:
        if out.count:
            places = _place(left), _place(right), _place(out)
            self._draft.steps.append(CallStep(FOLD, -1, -1, *places, out.nbytes))

    def copy(self, value: Buffer, out: Buffer) -> None:
        self._draft.copy(value, out)

    def leave(self, dst: Buffer) -> None:
        if self._divides and dst.count:
            self._draft.steps.append(
                CallStep(DIVIDE, out=_place(dst), nleft=dst.nbytes, nright=self._size)
            )


class _Variants(NamedTuple):
    """Variants of one operation of a rank: a short call, a long call, and a call on two levels.

    Attributes:
        src, dst: places of the input and the output; None if the rank has none.
        lengths: number of elements of each rank's piece, if the call is short; None if the call
            cannot be short.
        long: does the whole operation over messages.
        short: does the rest of the operation, given the pieces of all ranks, by rank.
        nested: does the whole operation on two levels; None if it has no second level.
        start: first element of this rank's piece in ``src``.
    """

    src: Buffer | None
    dst: Buffer | None
    lengths: Sequence[int] | None
    long: Callable[[Messages], None]
    short: Callable[[Messages, Sequence[Buffer]], None]
    nested: Callable[[Levels], None] | None
    start: int = 0


def comparison(request: Request, rank: int, size: int) -> Schedule:
    """Return the schedule that compares the ranks' requests, and does nothing else."""
    return Schedule(request, rank, size, 0, 0, [0] * size, 0, 0, [], None, None, None, None)


def record(
    request: Request, rank: int, size: int, dtype: DType | None = None, count: int | None = None,
    hosts: Sequence[Sequence[int]] | None = None,
) -> Schedule:  # fmt: skip
    """Return what ``rank`` of ``size`` ranks does in the call of ``request``.

    Ranks with equal requests choose the same algorithm. A recording takes no memory for the arrays
    of the call.

    Args:
        request: the request.
        rank, size: this rank, and the number of ranks.
        dtype: element type of the arrays; by default that of the request.
        count: in ``broadcast``, and in reductions other than ``reduce_scatter``, number of elements
            of each array; by default that of the request's shape. Requests of steps
            (:meth:`Request.step`), and of messages before a call, may have the shape of another
            array, or none.
        hosts: the ranks of each host, if a long call is to be made on two levels.
    """
    dtype = request.dtype if dtype is None else dtype
    count = math.prod(request.shape or ()) if count is None else count
    if request.operation == "barrier":
        return comparison(request, rank, size)
    assert dtype is not None
    variants = _VARIANTS[request.operation](request, rank, size, dtype, count)
    lengths, start = variants.lengths, variants.start
    is_short = lengths is not None and size > 1 and _are_short(lengths, dtype)
    if lengths is None or not is_short:
        lengths, start = [0] * size, 0
    recorder = _StepRecorder(rank, size, _Draft(sum(lengths) * dtype.itemsize))
    if is_short:
        order = [(rank + distance) % size for distance in range(size)]
        gathered = pieces.cut(
            _buffer(SCRATCH, 0, sum(lengths), dtype), [lengths[other] for other in order]
        )
        variants.short(recorder, [gathered[(other - rank) % size] for other in range(size)])
    elif variants.nested and hosts and levels.regroups(hosts, request.op, request.ordered):
        variants.nested(recorder.levels(hosts))
    else:
        variants.long(recorder)
    fold = scale = finish = None
    if request.op is not None:
        op = request.op
        fold = None if op.function is not None else arithmetic.folded_as(op.name)
        scale = arithmetic.pre(op, dtype, size)
        folds_nothing = size == 1 or (request.operation == "scan" and rank == 0)
        if folds_nothing and variants.dst is not None:
            finish = arithmetic.post(op, dtype, 1)
    return Schedule(
        request,
        rank,
        size,
        nsrc=0 if variants.src is None else variants.src.nbytes,
        ndst=0 if variants.dst is None else variants.dst.nbytes,
        pieces=[length * dtype.itemsize for length in lengths],
        start=start * dtype.itemsize,
        scratch=recorder.draft.scratch,
        steps=recorder.draft.steps,
        dtype=dtype,
        fold=fold,
        scale=scale,
        finish=finish,
    )


def _are_short(lengths: Sequence[int], dtype: DType) -> bool:
    """Return whether pieces of these lengths are short enough to be sent with the comparison."""
    total, longest = sum(lengths) * dtype.itemsize, max(lengths) * dtype.itemsize
    return total <= SHORT_BYTES and longest <= SHORT_PIECE_BYTES


def _fold(messages: Messages, folding: Folding, values: Sequence[Buffer], out: Buffer) -> None:
    """Fold ``values`` in rank order into ``out``, which may be one of them."""
    room = messages.room(out.count, out.dtype) if len(values) > 2 else out
    folding.in_order(values, room, out)
    folding.leave(out)


def _broadcast(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    root = request.root
    # The root passes its input as its output, which may be read-only.
    buffer = _buffer(SRC if rank == root else DST, 0, count, dtype)

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        if rank != root:
            messages.copy(gathered[root], buffer)

    return _Variants(
        buffer if rank == root else None,
        None if rank == root else buffer,
        [count * (other == root) for other in range(size)],
        lambda messages: moves.broadcast(messages, buffer, root),
        short,
        lambda nested: levels.broadcast(nested, buffer, root),
    )


def _reduce(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    op, root = request.op, request.root
    src = _buffer(SRC, 0, count, dtype)
    dst = _buffer(DST, 0, count, dtype) if rank == root else None

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        if dst is not None:
            values = [*gathered[:root], src, *gathered[root + 1 :]]
            _fold(messages, messages.folding(op, dtype, size), values, dst)

    return _Variants(
        src,
        dst,
        [count * (other != root) for other in range(size)],
        lambda messages: reductions.reduce(messages, src, dst, op, root, request.ordered),
        short,
        lambda nested: levels.reduce(nested, src, dst, op, root),
    )


def _all_reduce(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    op = request.op
    src, dst = _buffer(SRC, 0, count, dtype), _buffer(DST, 0, count, dtype)

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        folding = messages.folding(op, dtype, size)
        # All values are in scratch memory, so the output can take the total so far.
        folding.in_order(gathered, dst, dst)
        folding.leave(dst)

    return _Variants(
        src,
        dst,
        [count] * size,
        lambda messages: reductions.all_reduce(messages, src, dst, op, request.ordered),
        short,
        lambda nested: levels.all_reduce(nested, src, dst, op),
    )


def _scan(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    op = request.op
    src, dst = _buffer(SRC, 0, count, dtype), _buffer(DST, 0, count, dtype)

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        _fold(messages, messages.folding(op, dtype, rank + 1), [*gathered[:rank], src], dst)

    return _Variants(
        src,
        dst,
        [count] * (size - 1) + [0],  # nobody needs the last rank's input
        lambda messages: reductions.scan(messages, src, dst, op),
        short,
        None,
    )


def _for_peer(counts: Sequence[int], rank: int) -> tuple[list[int], int]:
    """Return how two ranks exchange the parts for each other: lengths of pieces, and the start."""
    return [counts[1], counts[0]], sum(counts[: 1 - rank])


def _reduce_scatter(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    op, counts = request.op, request.elements
    limits = pieces.limits(counts)
    src, dst = _buffer(SRC, 0, limits[-1], dtype), _buffer(DST, 0, counts[rank], dtype)
    lengths, start = _for_peer(counts, rank) if size == 2 else ([limits[-1]] * size, 0)
    mine = src.part(limits[rank], limits[rank + 1])

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        if size == 2:
            values = [gathered[0], mine] if rank else [mine, gathered[1]]
        else:
            values = [value.part(limits[rank], limits[rank + 1]) for value in gathered]
        _fold(messages, messages.folding(op, dtype, size), values, dst)

    def long(messages: Messages) -> None:
        reductions.reduce_scatter(messages, src, dst, counts, op, request.ordered)

    def nested(messages: Levels) -> None:
        levels.reduce_scatter(messages, src, dst, counts, op)

    return _Variants(src, dst, lengths, long, short, nested, start)


def _scatter(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    counts, root = request.elements, request.root
    limits = pieces.limits(counts)
    src = _buffer(SRC, 0, limits[-1], dtype) if rank == root else None
    dst = _buffer(DST, 0, counts[rank], dtype)
    length, start = limits[-1], 0
    if size == 2:
        length, start = counts[1 - root], limits[1 - root] * (rank == root)

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        source = gathered[root] if src is None else src
        if src is not None or size > 2:
            source = source.part(limits[rank], limits[rank + 1])
        messages.copy(source, dst)

    return _Variants(
        src,
        dst,
        [length * (other == root) for other in range(size)],
        lambda messages: moves.scatter(messages, src, dst, counts, root),
        short,
        lambda nested: levels.scatter(nested, src, dst, counts, root),
        start,
    )


def _gather(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    counts, root = request.elements, request.root
    src = _buffer(SRC, 0, counts[rank], dtype)
    dst = _buffer(DST, 0, sum(counts), dtype) if rank == root else None

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        if dst is not None:
            values = [*gathered[:root], src, *gathered[root + 1 :]]
            _join(messages, values, pieces.cut(dst, counts), rank)

    return _Variants(
        src,
        dst,
        [length * (other != root) for other, length in enumerate(counts)],
        lambda messages: moves.gather(messages, src, dst, counts, root),
        short,
        lambda nested: levels.gather(nested, src, dst, counts, root),
    )


def _join(messages: Messages, values: Sequence[Buffer], intos: Sequence[Buffer], rank: int) -> None:
    """Copy all pieces, in the order in which they lie in scratch memory."""
    for distance in range(len(values)):
        other = (rank + distance) % len(values)
        messages.copy(values[other], intos[other])


def _all_gather(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    counts = request.elements
    src, dst = _buffer(SRC, 0, counts[rank], dtype), _buffer(DST, 0, sum(counts), dtype)
    return _Variants(
        src,
        dst,
        counts,
        lambda messages: moves.all_gather(messages, src, dst, counts),
        lambda messages, gathered: _join(messages, gathered, pieces.cut(dst, counts), rank),
        lambda nested: levels.all_gather(nested, src, dst, counts),
    )


def _all_to_all(request: Request, rank: int, size: int, dtype: DType, count: int) -> _Variants:
    counts, incoming = request.elements, request.incoming
    src, dst = _buffer(SRC, 0, sum(counts), dtype), _buffer(DST, 0, sum(incoming), dtype)
    limits = pieces.limits(counts)
    lengths: list[int] | None = None
    start = 0
    if request.alike:  # otherwise a rank does not know the lengths of the others' arrays
        lengths, start = _for_peer(counts, rank) if size == 2 else ([sum(counts)] * size, 0)

    def short(messages: Messages, gathered: Sequence[Buffer]) -> None:
        for other, into in enumerate(pieces.cut(dst, incoming)):
            value = src if other == rank else gathered[other]
            if other == rank or size > 2:
                value = value.part(limits[rank], limits[rank + 1])
            messages.copy(value, into)

    def long(messages: Messages) -> None:
        moves.all_to_all(messages, src, dst, counts, incoming)

    def nested(messages: Levels) -> None:
        levels.all_to_all(messages, src, dst, counts, incoming)

    return _Variants(src, dst, lengths, long, short, nested, start)


_VARIANTS: dict[str, Callable[[Request, int, int, DType, int], _Variants]] = {
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_reduce": _all_reduce,
    "scan": _scan,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}
