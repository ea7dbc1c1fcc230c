"""Scatter."""

from __future__ import annotations

from collections.abc import Sequence

from collective.deadline import Deadline
from collective.memory.buffer import Buffer

from . import binomial, costs, pieces
from .messages import Messages, PointToPoint

__all__ = ["scatter"]


def scatter(
    backend: PointToPoint,
    src: Buffer | None,
    dst: Buffer,
    counts: Sequence[int],
    root: int,
    deadline: Deadline,
) -> None:
    """Cut ``src`` of ``root`` into ``counts`` and leave piece ``rank`` in ``dst``.

    At the root, ``dst`` may be the root's part of ``src``. Short arrays go down a binomial
    tree, with scratch of the size of a subtree (Thakur, Rabenseifner & Gropp 2005, section 4).
    For a long array, the root sends each rank its piece directly.
    """
    messages = Messages(backend, deadline)
    if costs.forwarding_pays(messages.size, sum(counts) * dst.dtype.itemsize):
        _tree(messages, src, dst, counts, root)
    else:
        _linear(messages, src, dst, counts, root)


def _linear(
    messages: Messages, src: Buffer | None, dst: Buffer, counts: Sequence[int], root: int
) -> None:
    if src is None:
        messages.recv(dst, root)
        return
    for rank, piece in enumerate(pieces.cut(src, counts)):
        if rank == root:
            pieces.copy(piece, dst)
        else:
            messages.send(piece, rank)


def _tree(
    messages: Messages, src: Buffer | None, dst: Buffer, counts: Sequence[int], root: int
) -> None:
    size = messages.size
    position = (messages.rank - root) % size
    node = binomial.node(position, size)
    # The tree's order of the pieces is that of ranks root, root + 1, …, wrapping around.
    limits = pieces.limits([*counts[root:], *counts[:root]])
    start, stop = limits[position], limits[node.stop]
    if src is not None and root == 0:  # the tree's order is rank order
        subtree = src
    elif not node.children:
        subtree = dst
    else:
        subtree = Buffer.empty(stop - start, dst.dtype)
    if node.parent is not None:
        messages.recv(subtree, (node.parent + root) % size)
    elif src is not None and subtree is not src:
        first, turn = sum(counts[:root]), limits[size - root]
        pieces.copy(src.part(first, src.count), subtree.part(0, turn))
        pieces.copy(src.part(0, first), subtree.part(turn, src.count))
    for child, end in reversed(node.children):  # first the child with the largest subtree
        piece = subtree.part(limits[child] - start, limits[end] - start)
        messages.send(piece, (child + root) % size)
    pieces.copy(subtree.part(0, dst.count), dst)
