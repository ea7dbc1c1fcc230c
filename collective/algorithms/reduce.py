"""Reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from collective.memory.buffer import Buffer

from . import binomial, costs, folds, gather, pieces
from .folds import Folding
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.ops import ReduceOp

__all__ = ["reduce"]


@np.errstate(all="ignore")
def reduce(
    backend: PointToPoint,
    src: Buffer,
    dst: Buffer | None,
    op: ReduceOp,
    root: int,
    ordered: bool,
    deadline: Deadline,
) -> None:
    """Fold the ranks' ``src`` into ``dst`` of ``root``; ``dst`` is None elsewhere.

    Short arrays are folded up a binomial tree. If ``ordered``, the root instead gathers all inputs
    and folds them. For a long array, each rank folds one part and sends it to the root:
    Rabenseifner, "Optimization of Collective Reduction Operations" (2004), with the
    exchanges of Thakur, Rabenseifner & Gropp (2005) for any number of ranks.
    """
    messages = Messages(backend, deadline)
    folding = Folding(op, src.dtype, messages.size)
    if ordered and messages.size > 2:
        if costs.whole_pays(src.nbytes):
            _at_root(messages, folding, src, dst, root)
        else:
            _by_parts(messages, folding, src, dst, root, in_order=True)
    elif not costs.doubling_beats_parts(messages.size, src.nbytes):
        _by_parts(messages, folding, src, dst, root, in_order=ordered or not op.commutative)
    elif op.commutative and not ordered:
        _tree(messages, folding, src, dst, root)
    else:
        # The tree keeps rank order only if its root is rank 0. So rank 0 gets the result, and one
        # more message takes it to the root of the call.
        total = dst
        if messages.rank == 0 and dst is None:
            total = Buffer.empty(src.count, src.dtype)
        _tree(messages, folding, src, total if messages.rank == 0 else None, 0)
        if total is not dst and total is not None:
            messages.send(total, root)
        elif dst is not None and root != 0:
            messages.recv(dst, 0)


def _tree(messages: Messages, folding: Folding, src: Buffer, dst: Buffer | None, root: int) -> None:
    """Fold up a binomial tree whose positions are the ranks, counted from the root."""
    size = messages.size
    node = binomial.node((messages.rank - root) % size, size)
    value = folding.enter(src, dst)
    if node.children:
        theirs = Buffer.empty(src.count, src.dtype)
        total = dst if dst is not None else Buffer.empty(src.count, src.dtype)
        for child, _ in node.children:
            messages.recv(theirs, (child + root) % size)
            folding.join(value, theirs, total)
            value = total
    if node.parent is not None:
        messages.send(value, (node.parent + root) % size)
    elif dst is not None:
        pieces.copy(value, dst)
        folding.leave(dst)


def _at_root(
    messages: Messages, folding: Folding, src: Buffer, dst: Buffer | None, root: int
) -> None:
    """Gather all inputs in scratch memory of the root, and fold them there."""
    counts = [src.count] * messages.size
    every = None if dst is None else Buffer.empty(sum(counts), src.dtype)
    gather.collect(messages, folding.enter(src), every, counts, root)
    if dst is not None and every is not None:
        folding.in_order(pieces.cut(every, counts), Buffer.empty(src.count, src.dtype), dst)
        folding.leave(dst)


def _by_parts(
    messages: Messages,
    folding: Folding,
    src: Buffer,
    dst: Buffer | None,
    root: int,
    in_order: bool,
) -> None:
    counts = pieces.even(src.count, messages.size)
    if dst is None:
        mine = Buffer.empty(counts[messages.rank], src.dtype)
    else:
        mine = pieces.cut(dst, counts)[messages.rank]
    folds.parts(messages, folding, pieces.cut(src, counts), mine, in_order)
    gather.linear(messages, mine, dst, counts, root)
