"""Reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from collective.memory.buffer import Buffer

from . import costs, folds, pieces
from .folds import Folding
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.ops import ReduceOp

__all__ = ["reduce_scatter"]


@np.errstate(all="ignore")
def reduce_scatter(
    backend: PointToPoint,
    src: Buffer,
    dst: Buffer,
    counts: Sequence[int],
    op: ReduceOp,
    ordered: bool,
    deadline: Deadline,
) -> None:
    """Fold the ranks' ``src``; leave this rank's part, ``counts[rank]`` elements, in ``dst``.

    ``dst`` may be this rank's part of ``src``. Long arrays are exchanged pairwise, one part a
    rank (:func:`folds.parts`). Short arrays are folded whole by recursive doubling, with scratch of
    their size. If ``ordered``, each rank instead collects all inputs in scratch, and folds them in
    rank order.
    """
    messages = Messages(backend, deadline)
    folding = Folding(op, src.dtype, messages.size)
    start = sum(counts[: messages.rank])
    stop = start + counts[messages.rank]
    if ordered and messages.size > 2 and costs.whole_pays(src.nbytes):
        values = [value.part(start, stop) for value in folds.collected(messages, folding, src)]
        folding.in_order(values, Buffer.empty(dst.count, dst.dtype), dst)
        folding.leave(dst)
    elif not ordered and costs.doubling_beats_pairwise(messages.size, src.nbytes):
        whole = Buffer.empty(src.count, src.dtype)
        folds.doubled(messages, folding, src, whole)
        pieces.copy(whole.part(start, stop), dst)
    else:
        in_order = ordered or not op.commutative
        folds.parts(messages, folding, pieces.cut(src, counts), dst, in_order)
