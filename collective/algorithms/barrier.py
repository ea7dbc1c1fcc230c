"""Barrier."""

from __future__ import annotations

from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

from .messages import Messages, PointToPoint

__all__ = ["barrier"]


def barrier(backend: PointToPoint, deadline: Deadline) -> None:
    """Wait until every rank has called this function.

    This is the dissemination barrier: in round k, each rank sends a message to the rank 2**k ahead.
    After ceil(log2(size)) rounds each rank has got word, directly or through others, of all ranks.
    Hensgen, Finkel & Manber, "Two Algorithms for Barrier Synchronization" (1988).
    """
    messages = Messages(backend, deadline)
    # Send one byte, since not every transport carries empty messages.
    token = Buffer.empty(2, BY_NAME["uint8"])
    token.array[:] = 0
    out, into = token.part(0, 1), token.part(1, 2)
    distance = 1
    while distance < messages.size:
        to = (messages.rank + distance) % messages.size
        source = (messages.rank - distance) % messages.size
        messages.exchange(out, to, into, source)
        distance *= 2
