"""Operations that fold: reduce, all-reduce, reduce-scatter, scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import costs, folds, moves, pieces

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer
    from collective.ops import ReduceOp

    from .folds import Folding
    from .messages import Messages


@np.errstate(all="ignore")
def all_reduce(messages: Messages, src: Buffer, dst: Buffer, op: ReduceOp, ordered: bool) -> None:
    """Fold the ranks' ``src`` into every rank's ``dst``, with the same bits on all ranks.

    Short arrays are folded whole, by recursive doubling. If ``ordered``, each rank instead collects
    all inputs and folds them in rank order. For a long array, each rank folds one part, and a ring
    collects the parts: Rabenseifner, "Optimization of Collective Reduction Operations" (2004), with
    the exchanges of Thakur, Rabenseifner & Gropp (2005) for any number of ranks.
    """
    size = messages.size
    folding = messages.folding(op, src.dtype, size)
    # Two ranks make only one fold, which is in order anyway. With more ranks, recursive doubling
    # would fold pairs of pairs, which is not rank order.
    if ordered and size > 2 and costs.whole_pays(src.nbytes):
        values = folds.collected(messages, folding, src)
        folding.in_order(values, messages.room(dst.count, dst.dtype), dst)
        folding.leave(dst)
    elif (not ordered or size <= 2) and costs.doubling_beats_parts(size, src.nbytes):
        folds.doubled(messages, folding, src, dst)
    else:
        counts = pieces.even(src.count, size)
        inputs, results = pieces.cut(src, counts), pieces.cut(dst, counts)
        # Parts arrive in the order of distance, not of rank. So an operator that does not commute
        # needs the fold in rank order, too.
        in_order = ordered or not op.commutative
        folds.parts(messages, folding, inputs, results[messages.rank], in_order)
        moves.ring(messages, results)


@np.errstate(all="ignore")
def reduce(
    messages: Messages,
    src: Buffer,
    dst: Buffer | None,
    op: ReduceOp,
    root: int,
    ordered: bool,
) -> None:
    """Fold the ranks' ``src`` into ``dst`` of ``root``; ``dst`` is None elsewhere.

    Short arrays are folded up a binomial tree. Long arrays go along the chain of ranks to the root,
    in chunks: each rank passes a chunk on while it receives the next one. If ``ordered``, the root
    instead gathers short inputs and folds them. Of long inputs, each rank then folds one part and
    sends it to the root: Rabenseifner, "Optimization of Collective Reduction Operations" (2004),
    with the exchanges of Thakur, Rabenseifner & Gropp (2005) for any number of ranks. Long arrays
    are also folded so if the operator does not commute, since the chain does not begin at rank 0.
    """
    size, rank = messages.size, messages.rank
    folding = messages.folding(op, src.dtype, size)
    if size <= 2 or (op.commutative and not ordered):
        chain = not costs.tree_beats_chain(size, src.nbytes, pieces.CHUNK_BYTES)
        _up(messages, folding, src, dst, root, chain)
    elif ordered and costs.whole_pays(src.nbytes):
        _at_root(messages, folding, src, dst, root)
    elif ordered or not costs.doubling_beats_parts(size, src.nbytes):
        _by_parts(messages, folding, src, dst, root)
    else:
        # The tree keeps rank order only if its root is rank 0. So rank 0 gets the result, and one
        # more message takes it to the root of the call.
        total = dst
        if rank == 0 and dst is None:
            total = messages.room(src.count, src.dtype)
        _up(messages, folding, src, total if rank == 0 else None, 0, chain=False)
        if total is not dst and total is not None:
            messages.send(total, root)
        elif dst is not None and root != 0:
            messages.recv(dst, 0)


def _up(
    messages: Messages,
    folding: Folding,
    src: Buffer,
    dst: Buffer | None,
    root: int,
    chain: bool,
) -> None:
    """Fold up a tree whose positions are the ranks, counted from the root.

    Long arrays go up in chunks. A rank folds a chunk while the cache holds it, and sends it while
    it receives the next one.

    Args:
        messages: messages of the call.
        folding: folding of the call.
        src: this rank's input.
        dst: the result at the root; None elsewhere.
        root: the root.
        chain: whether each rank has only the next one as a child; otherwise the tree is binomial.
    """
    rank, size = messages.rank, messages.size
    position = (rank - root) % size
    if chain:
        children = [(rank + 1) % size] if position + 1 < size else []
        parent = (rank - 1) % size
    else:
        node = moves.node_at(position, size)
        children = [(child + root) % size for child, _ in node.children]
        parent = ((node.parent or 0) + root) % size
    width = min(pieces.chunk(src.dtype.itemsize), src.count) if children else 0
    theirs = messages.room(width, src.dtype)
    # While one total is sent, the next one is folded.
    totals = [messages.room(width, src.dtype) for _ in range(2 if dst is None else 0)]
    nothing = sent = src.part(0, 0)
    results = [None] * len(pieces.chunks(src)) if dst is None else pieces.chunks(dst)
    for number, (chunk, result) in enumerate(zip(pieces.chunks(src), results, strict=True)):
        total = result
        if total is None and children:
            total = totals[number % 2].part(0, chunk.count)
        value = folding.enter(chunk, total)
        for child in children:
            assert total is not None
            received = theirs.part(0, chunk.count)
            messages.exchange(sent, parent, received, child)
            sent = nothing
            # Put the lower rank on the left, so that folds of two ranks are always in order.
            left, right = (received, value) if child < rank else (value, received)
            folding.join(left, right, total)
            value = total
        if result is None:
            messages.send(sent, parent)
            sent = value
        else:
            messages.copy(value, result)
            folding.leave(result)
    messages.send(sent, parent)


def _at_root(
    messages: Messages, folding: Folding, src: Buffer, dst: Buffer | None, root: int
) -> None:
    """Gather all inputs in scratch memory of the root, and fold them there."""
    counts = [src.count] * messages.size
    every = None if dst is None else messages.room(sum(counts), src.dtype)
    moves.gather(messages, folding.enter(src), every, counts, root)
    if dst is not None and every is not None:
        folding.in_order(pieces.cut(every, counts), messages.room(src.count, src.dtype), dst)
        folding.leave(dst)


def _by_parts(
    messages: Messages, folding: Folding, src: Buffer, dst: Buffer | None, root: int
) -> None:
    counts = pieces.even(src.count, messages.size)
    if dst is None:
        mine = messages.room(counts[messages.rank], src.dtype)
    else:
        mine = pieces.cut(dst, counts)[messages.rank]
    folds.parts(messages, folding, pieces.cut(src, counts), mine, in_order=True)
    moves.send_to_root(messages, mine, dst, counts, root)


@np.errstate(all="ignore")
def reduce_scatter(
    messages: Messages,
    src: Buffer,
    dst: Buffer,
    counts: Sequence[int],
    op: ReduceOp,
    ordered: bool,
) -> None:
    """Fold the ranks' ``src``; leave this rank's part, ``counts[rank]`` elements, in ``dst``.

    ``dst`` may be this rank's part of ``src``. Long arrays are exchanged pairwise, one part a
    rank (:func:`folds.parts`). Short arrays are folded whole by recursive doubling, with scratch of
    their size. If ``ordered``, each rank instead collects all inputs in scratch, and folds them in
    rank order.
    """
    folding = messages.folding(op, src.dtype, messages.size)
    start = sum(counts[: messages.rank])
    stop = start + counts[messages.rank]
    if ordered and messages.size > 2 and costs.whole_pays(src.nbytes):
        values = [value.part(start, stop) for value in folds.collected(messages, folding, src)]
        folding.in_order(values, messages.room(dst.count, dst.dtype), dst)
        folding.leave(dst)
    elif not ordered and costs.doubling_beats_pairwise(messages.size, src.nbytes):
        whole = messages.room(src.count, src.dtype)
        folds.doubled(messages, folding, src, whole)
        messages.copy(whole.part(start, stop), dst)
    else:
        in_order = ordered or not op.commutative
        folds.parts(messages, folding, pieces.cut(src, counts), dst, in_order)


@np.errstate(all="ignore")
def scan(messages: Messages, src: Buffer, dst: Buffer, op: ReduceOp) -> None:
    """Fold ``src`` of ranks 0 to this one, ``((x0 op x1) op x2) op …``, into ``dst``.

    For short arrays, every rank collects all inputs and folds them itself. Long arrays pass from
    rank to rank in chunks, so that all ranks work at once after the first few chunks. The
    alternative, a prefix by doubling (Hillis & Steele, "Data Parallel Algorithms", 1986), would
    carry long arrays log2(size) times, and would fold in another order.
    """
    folding = messages.folding(op, src.dtype, messages.rank + 1)
    if costs.whole_pays(src.nbytes):
        values = folds.collected(messages, folding, src)[: messages.rank + 1]
        folding.in_order(values, messages.room(dst.count, dst.dtype), dst)
        folding.leave(dst)
    else:
        _pipeline(messages, folding, src, dst)


def _pipeline(messages: Messages, folding: Folding, src: Buffer, dst: Buffer) -> None:
    rank, last = messages.rank, messages.size - 1
    room = messages.room(min(pieces.chunk(src.dtype.itemsize), src.count), src.dtype)
    nothing = sent = dst.part(0, 0)
    for chunk, result in zip(pieces.chunks(src), pieces.chunks(dst), strict=True):
        mine = folding.enter(chunk, result)
        before = room.part(0, result.count) if rank > 0 else nothing
        messages.exchange(sent, rank + 1, before, rank - 1)
        # Scale only after sending: the next rank needs the plain fold, and each rank scales its own
        # result.
        folding.leave(sent)
        if rank > 0:
            folding.join(before, mine, result)
        else:
            messages.copy(mine, result)
        if rank < last:
            sent = result
        else:
            folding.leave(result)
    messages.send(sent, rank + 1)
    folding.leave(sent)
