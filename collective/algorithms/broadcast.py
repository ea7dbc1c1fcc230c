"""Broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import all_gather, binomial, costs, pieces
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.memory.buffer import Buffer

__all__ = ["broadcast"]


def broadcast(backend: PointToPoint, buffer: Buffer, root: int, deadline: Deadline) -> None:
    """Copy ``buffer`` of ``root`` into ``buffer`` of every other rank.

    Short messages go down a binomial tree. Long messages are scattered down the tree, and then all
    ranks gather the pieces around a ring. So the message is carried twice rather than log2(size)
    times. This is van de Geijn's algorithm, in Thakur, Rabenseifner & Gropp, "Optimization of
    Collective Communication Operations in MPICH" (2005), section 4.2.
    """
    messages = Messages(backend, deadline)
    if costs.tree_beats_ring(messages.size, buffer.nbytes):
        _tree(messages, buffer, root)
    else:
        _scatter_and_ring(messages, buffer, root)


def _tree(messages: Messages, buffer: Buffer, root: int) -> None:
    size = messages.size
    node = binomial.node((messages.rank - root) % size, size)
    if node.parent is not None:
        messages.recv(buffer, (node.parent + root) % size)
    for child, _ in reversed(node.children):  # first the child with the largest subtree
        messages.send(buffer, (child + root) % size)


def _scatter_and_ring(messages: Messages, buffer: Buffer, root: int) -> None:
    size = messages.size
    counts = pieces.even(buffer.count, size)
    limits = pieces.limits(counts)
    position = (messages.rank - root) % size
    node = binomial.node(position, size)
    if node.parent is not None:
        mine = buffer.part(limits[position], limits[node.stop])
        messages.recv(mine, (node.parent + root) % size)
    for child, stop in reversed(node.children):
        messages.send(buffer.part(limits[child], limits[stop]), (child + root) % size)
    all_gather.ring(messages, pieces.cut(buffer, counts), root, complete=root)
