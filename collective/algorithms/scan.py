"""Scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from collective.memory.buffer import Buffer

from . import costs, folds, pieces
from .folds import Folding
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.ops import ReduceOp

__all__ = ["scan"]


@np.errstate(all="ignore")
def scan(backend: PointToPoint, src: Buffer, dst: Buffer, op: ReduceOp, deadline: Deadline) -> None:
    """Fold ``src`` of ranks 0 to this one, ``((x0 op x1) op x2) op …``, into ``dst``.

    For short arrays, every rank collects all inputs and folds them itself. Long arrays pass from
    rank to rank in chunks, so that all ranks work at once after the first few chunks. The
    alternative, a prefix by doubling (Hillis & Steele, "Data Parallel Algorithms", 1986), would
    carry long arrays log2(size) times, and would fold in another order.
    """
    messages = Messages(backend, deadline)
    folding = Folding(op, src.dtype, messages.rank + 1)
    if costs.whole_pays(src.nbytes):
        values = folds.collected(messages, folding, src)[: messages.rank + 1]
        folding.in_order(values, Buffer.empty(dst.count, dst.dtype), dst)
        folding.leave(dst)
    else:
        _pipeline(messages, folding, src, dst)


def _pipeline(messages: Messages, folding: Folding, src: Buffer, dst: Buffer) -> None:
    rank = messages.rank
    step = pieces.chunk(src.dtype.itemsize)
    room = Buffer.empty(min(step, src.count), src.dtype)
    for low in range(0, src.count, step):
        result = dst.part(low, low + step)
        mine = folding.enter(src.part(low, low + step), result)
        if rank > 0:
            before = room.part(0, result.count)
            messages.recv(before, rank - 1)
            folding.join(before, mine, result)
        else:
            pieces.copy(mine, result)
        if rank + 1 < messages.size:
            messages.send(result, rank + 1)
        # Scale only after sending: the next rank needs the plain fold, and each rank scales its own
        # result.
        folding.leave(result)
