"""All-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from collective.memory.buffer import Buffer

from . import all_gather, costs, folds, pieces
from .folds import Folding
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.ops import ReduceOp

__all__ = ["all_reduce"]


@np.errstate(all="ignore")
def all_reduce(
    backend: PointToPoint, src: Buffer, dst: Buffer, op: ReduceOp, ordered: bool, deadline: Deadline
) -> None:
    """Fold the ranks' ``src`` into every rank's ``dst``, with the same bits on all ranks.

    Short arrays are folded whole, by recursive doubling. If ``ordered``, each rank instead collects
    all inputs and folds them in rank order. For a long array, each rank folds one part, and a ring
    collects the parts: Rabenseifner, "Optimization of Collective Reduction Operations" (2004), with
    the exchanges of Thakur, Rabenseifner & Gropp (2005) for any number of ranks.
    """
    messages = Messages(backend, deadline)
    size = messages.size
    folding = Folding(op, src.dtype, size)
    # Two ranks make only one fold, which is in order anyway. With more ranks, recursive doubling
    # would fold pairs of pairs, which is not rank order.
    if ordered and size > 2 and costs.whole_pays(src.nbytes):
        values = folds.collected(messages, folding, src)
        folding.in_order(values, Buffer.empty(dst.count, dst.dtype), dst)
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
        all_gather.ring(messages, results)
