"""Gather."""

from __future__ import annotations

from collections.abc import Sequence

from collective.deadline import Deadline
from collective.memory.buffer import Buffer

from . import binomial, costs, pieces
from .messages import Messages, PointToPoint

__all__ = ["collect", "gather", "linear"]


def gather(
    backend: PointToPoint,
    src: Buffer,
    dst: Buffer | None,
    counts: Sequence[int],
    root: int,
    deadline: Deadline,
) -> None:
    """Concatenate the ranks' ``src``, of ``counts[rank]`` elements, in ``dst`` of ``root``.

    At the root, ``src`` may be the root's part of ``dst``. See :func:`collect`.
    """
    collect(Messages(backend, deadline), src, dst, counts, root)


def collect(
    messages: Messages, src: Buffer, dst: Buffer | None, counts: Sequence[int], root: int
) -> None:
    """Do what :func:`gather` does, as part of another operation.

    Short results go up a binomial tree, with scratch of the size of a subtree (Thakur,
    Rabenseifner & Gropp 2005, section 4). Long results go straight to the root.
    """
    if costs.forwarding_pays(messages.size, sum(counts) * src.dtype.itemsize):
        _tree(messages, src, dst, counts, root)
    else:
        linear(messages, src, dst, counts, root)


def linear(
    messages: Messages, src: Buffer, dst: Buffer | None, counts: Sequence[int], root: int
) -> None:
    """Send every rank's piece straight to the root, which receives them in rank order."""
    if dst is None:
        messages.send(src, root)
        return
    for rank, piece in enumerate(pieces.cut(dst, counts)):
        if rank == root:
            pieces.copy(src, piece)
        else:
            messages.recv(piece, rank)


def _tree(
    messages: Messages, src: Buffer, dst: Buffer | None, counts: Sequence[int], root: int
) -> None:
    size = messages.size
    position = (messages.rank - root) % size
    node = binomial.node(position, size)
    # The tree's order of the pieces is that of ranks root, root + 1, …, wrapping around.
    limits = pieces.limits([*counts[root:], *counts[:root]])
    start, stop = limits[position], limits[node.stop]
    if not node.children:
        subtree = src
    elif dst is not None and root == 0:  # the tree's order is rank order
        subtree = dst
    else:
        subtree = Buffer.empty(stop - start, src.dtype)
    if node.children:
        pieces.copy(src, subtree.part(0, src.count))
    for child, end in node.children:  # nearest first: the smallest subtree is ready first
        piece = subtree.part(limits[child] - start, limits[end] - start)
        messages.recv(piece, (child + root) % size)
    if node.parent is not None:
        messages.send(subtree, (node.parent + root) % size)
    elif dst is not None and subtree is not dst:
        first, turn = sum(counts[:root]), limits[size - root]
        pieces.copy(subtree.part(0, turn), dst.part(first, dst.count))
        pieces.copy(subtree.part(turn, dst.count), dst.part(0, first))
