"""Barrier."""

from __future__ import annotations

from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

from .messages import Messages, PointToPoint

__all__ = ["barrier"]


def barrier(backend: PointToPoint, deadline: Deadline) -> None:
    """Return when every rank has called it.

    Dissemination: in round k each rank tells the one 2**k ahead, so that after
    ceil(log2(size)) rounds everybody has heard of everybody. Hensgen, Finkel & Manber,
    "Two Algorithms for Barrier Synchronization" (1988).
    """
    messages = Messages(backend, deadline)
    # A byte, as not every transport carries messages of nothing.
    token = Buffer.empty(2, BY_NAME["uint8"])
    token.array[:] = 0
    out, into = token.part(0, 1), token.part(1, 2)
    distance = 1
    while distance < messages.size:
        to = (messages.rank + distance) % messages.size
        source = (messages.rank - distance) % messages.size
        messages.exchange(out, to, into, source)
        distance *= 2
