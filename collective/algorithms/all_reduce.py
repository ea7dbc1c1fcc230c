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
    """Fold the ranks' ``src`` into every rank's ``dst``, the same bits on all of them.

    Short arrays are folded whole, by recursive doubling, or in rank order from a
    collection of all inputs if ``ordered``. Of long ones each rank folds a part, and a
    ring collects the parts: Rabenseifner, "Optimization of Collective Reduction
    Operations" (2004), with the exchanges of Thakur, Rabenseifner & Gropp (2005) for any
    number of ranks.
    """
    messages = Messages(backend, deadline)
    size = messages.size
    folding = Folding(op, src.dtype, size)
    # Of two ranks there is one fold only; with more, doubling would fold pairs of pairs.
    if ordered and size > 2 and costs.whole_pays(src.nbytes):
        values = folds.collected(messages, folding, src)
        folding.in_order(values, Buffer.empty(dst.count, dst.dtype), dst)
        folding.leave(dst)
    elif (not ordered or size <= 2) and costs.doubling_beats_parts(size, src.nbytes):
        folds.doubled(messages, folding, src, dst)
    else:
        counts = pieces.even(src.count, size)
        inputs, results = pieces.cut(src, counts), pieces.cut(dst, counts)
        # They arrive by distance and not by rank: what does not commute is folded in order, too.
        in_order = ordered or not op.commutative
        folds.parts(messages, folding, inputs, results[messages.rank], in_order)
        all_gather.ring(messages, results)
