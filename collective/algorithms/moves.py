"""Operations that move data: broadcast, scatter, gather, all-gather, all-to-all.

Broadcast, scatter and gather use a binomial tree over positions 0 to size - 1, with its root at 0.
The subtree of position p has the positions p to p + 2**k - 1, where 2**k is the lowest set bit
of p. So every subtree is a range of positions. Pieces that go through a subtree stay together, and
folding the children from the nearest to the farthest keeps their order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import costs, pieces

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer

    from .messages import Messages


class TreeNode(NamedTuple):
    """Node of the tree at one position.

    Attributes:
        parent: position of the parent, None at the root.
        stop: end of this node's subtree, which starts at the node's own position.
        children: start and end of each child's subtree, the nearest (and smallest)
            first.
    """

    parent: int | None
    stop: int
    children: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=256)
def node_at(position: int, size: int) -> TreeNode:
    """Return the node at ``position`` in a tree of ``size`` positions."""
    reach = position & -position or size  # the lowest set bit; the root reaches all positions
    children = []
    step = 1
    while step < reach and position + step < size:
        children.append((position + step, min(position + 2 * step, size)))
        step *= 2
    parent = position - reach if position else None
    return TreeNode(parent, min(position + reach, size), tuple(children))


# -- from one rank to all --------------------------------------------------------------------------


def broadcast(messages: Messages, buffer: Buffer, root: int) -> None:
    """Copy ``buffer`` of ``root`` into ``buffer`` of every other rank.

    Short messages go down a binomial tree. Long messages go along the chain of ranks in chunks:
    each rank passes a chunk on while it receives the next one. So every rank sends and receives
    the message at most once, and all ranks work at once after the first few chunks.
    """
    if costs.tree_beats_chain(messages.size, buffer.nbytes, pieces.CHUNK_BYTES):
        _whole_down_tree(messages, buffer, root)
    else:
        _along_chain(messages, buffer, root)


def _whole_down_tree(messages: Messages, buffer: Buffer, root: int) -> None:
    size = messages.size
    node = node_at((messages.rank - root) % size, size)
    if node.parent is not None:
        messages.recv(buffer, (node.parent + root) % size)
    for child, _ in reversed(node.children):  # first the child with the largest subtree
        messages.send(buffer, (child + root) % size)


def _along_chain(messages: Messages, buffer: Buffer, root: int) -> None:
    rank, size = messages.rank, messages.size
    before, after = (rank - 1) % size, (rank + 1) % size
    nothing = buffer.part(0, 0)
    sent = nothing
    for chunk in pieces.chunks(buffer):
        messages.exchange(sent, after, nothing if rank == root else chunk, before)
        sent = nothing if after == root else chunk
    messages.send(sent, after)


def scatter(
    messages: Messages,
    src: Buffer | None,
    dst: Buffer,
    counts: Sequence[int],
    root: int,
) -> None:
    """Cut ``src`` of ``root`` into ``counts`` and leave piece ``rank`` in ``dst``.

    At the root, ``dst`` may be the root's part of ``src``. Short arrays go down a binomial
    tree, with scratch of the size of a subtree (Thakur, Rabenseifner & Gropp 2005, section 4).
    For a long array, the root sends each rank its piece directly.
    """
    if costs.forwarding_pays(messages.size, sum(counts) * dst.dtype.itemsize):
        _pieces_down_tree(messages, src, dst, counts, root)
    else:
        _send_from_root(messages, src, dst, counts, root)


def _send_from_root(
    messages: Messages, src: Buffer | None, dst: Buffer, counts: Sequence[int], root: int
) -> None:
    if src is None:
        messages.recv(dst, root)
        return
    for rank, piece in enumerate(pieces.cut(src, counts)):
        if rank == root:
            messages.copy(piece, dst)
        else:
            messages.send(piece, rank)


def _pieces_down_tree(
    messages: Messages, src: Buffer | None, dst: Buffer, counts: Sequence[int], root: int
) -> None:
    size = messages.size
    position = (messages.rank - root) % size
    node = node_at(position, size)
    # The tree's order of the pieces is that of ranks root, root + 1, …, wrapping around.
    limits = pieces.limits([*counts[root:], *counts[:root]])
    start, stop = limits[position], limits[node.stop]
    if src is not None and root == 0:  # the tree's order is rank order
        subtree = src
    elif not node.children:
        subtree = dst
    else:
        subtree = messages.room(stop - start, dst.dtype)
    if node.parent is not None:
        messages.recv(subtree, (node.parent + root) % size)
    elif src is not None and subtree is not src:
        first, turn = sum(counts[:root]), limits[size - root]
        messages.copy(src.part(first, src.count), subtree.part(0, turn))
        messages.copy(src.part(0, first), subtree.part(turn, src.count))
    for child, end in reversed(node.children):  # first the child with the largest subtree
        piece = subtree.part(limits[child] - start, limits[end] - start)
        messages.send(piece, (child + root) % size)
    messages.copy(subtree.part(0, dst.count), dst)


# -- from all ranks to one -------------------------------------------------------------------------


def gather(
    messages: Messages, src: Buffer, dst: Buffer | None, counts: Sequence[int], root: int
) -> None:
    """Concatenate the ranks' ``src``, of ``counts[rank]`` elements, in ``dst`` of ``root``.

    At the root, ``src`` may be the root's part of ``dst``. Short results go up a binomial tree,
    with scratch of the size of a subtree (Thakur, Rabenseifner & Gropp 2005, section 4). Long
    results go straight to the root.
    """
    if costs.forwarding_pays(messages.size, sum(counts) * src.dtype.itemsize):
        _up_tree(messages, src, dst, counts, root)
    else:
        send_to_root(messages, src, dst, counts, root)


def send_to_root(
    messages: Messages, src: Buffer, dst: Buffer | None, counts: Sequence[int], root: int
) -> None:
    """Send every rank's piece straight to the root, which receives them in rank order."""
    if dst is None:
        messages.send(src, root)
        return
    for rank, piece in enumerate(pieces.cut(dst, counts)):
        if rank == root:
            messages.copy(src, piece)
        else:
            messages.recv(piece, rank)


def _up_tree(
    messages: Messages, src: Buffer, dst: Buffer | None, counts: Sequence[int], root: int
) -> None:
    size = messages.size
    position = (messages.rank - root) % size
    node = node_at(position, size)
    # The tree's order of the pieces is that of ranks root, root + 1, …, wrapping around.
    limits = pieces.limits([*counts[root:], *counts[:root]])
    start, stop = limits[position], limits[node.stop]
    if not node.children:
        subtree = src
    elif dst is not None and root == 0:  # the tree's order is rank order
        subtree = dst
    else:
        subtree = messages.room(stop - start, src.dtype)
    if node.children:
        messages.copy(src, subtree.part(0, src.count))
    for child, end in node.children:  # nearest first: the smallest subtree is ready first
        piece = subtree.part(limits[child] - start, limits[end] - start)
        messages.recv(piece, (child + root) % size)
    if node.parent is not None:
        messages.send(subtree, (node.parent + root) % size)
    elif dst is not None and subtree is not dst:
        first, turn = sum(counts[:root]), limits[size - root]
        messages.copy(subtree.part(0, turn), dst.part(first, dst.count))
        messages.copy(subtree.part(turn, dst.count), dst.part(0, first))


# -- from all ranks to all -------------------------------------------------------------------------


def all_gather(messages: Messages, src: Buffer, dst: Buffer, counts: Sequence[int]) -> None:
    """Concatenate the ranks' ``src``, of ``counts[rank]`` elements, in every ``dst``.

    ``src`` may be this rank's part of ``dst``. For a short result it uses Bruck's algorithm, with
    scratch memory of the size of ``dst``. A long result goes around a ring. Both algorithms take
    any counts.
    """
    if costs.forwarding_pays(messages.size, dst.nbytes):
        _bruck(messages, src, dst, counts)
    else:
        every = pieces.cut(dst, counts)
        messages.copy(src, every[messages.rank])
        ring(messages, every)


def ring(messages: Messages, every: Sequence[Buffer]) -> None:
    """Pass pieces around the ring of ranks until every rank has all of them.

    In each step a rank sends to its right neighbour the piece that it last received from its left
    neighbour. Each rank sends (size - 1) / size of the whole, the minimum for this operation.
    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    Args:
        messages: messages of the call.
        every: buffers of all pieces, by rank; this rank's own piece is complete already.
    """
    rank, size = messages.rank, messages.size
    right, left = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        # All ranks are at the same step, so the left neighbour sends the piece before this one.
        out, into = (rank - step) % size, (rank - step - 1) % size
        messages.exchange(every[out], right, every[into], left)


def _bruck(messages: Messages, src: Buffer, dst: Buffer, counts: Sequence[int]) -> None:
    """Double the pieces that each rank has in every round: its own and those of the next ranks.

    Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
    Message-Passing Systems" (1997).
    """
    rank, size = messages.rank, messages.size
    # The rotated buffer has the pieces of ranks rank, rank + 1, …, wrapping around to rank - 1.
    limits = pieces.limits([*counts[rank:], *counts[:rank]])
    rotated = messages.room(dst.count, dst.dtype)
    messages.copy(src, rotated.part(0, src.count))
    have = 1
    while have < size:
        # The last round receives only the missing pieces, so any number of ranks works.
        more = min(have, size - have)
        messages.exchange(
            rotated.part(0, limits[more]),
            (rank - have) % size,
            rotated.part(limits[have], limits[have + more]),
            (rank + have) % size,
        )
        have += more
    # Rank 0's piece begins at ``turn``. The elements from there on belong at the beginning of dst.
    start, turn = sum(counts[:rank]), limits[size - rank]
    messages.copy(rotated.part(0, turn), dst.part(start, dst.count))
    messages.copy(rotated.part(turn, dst.count), dst.part(0, start))


def all_to_all(
    messages: Messages,
    src: Buffer,
    dst: Buffer,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
) -> None:
    """Send piece ``j`` of ``src`` to rank ``j``; concatenate the received pieces in ``dst``.

    The algorithm is pairwise exchange: in step d, each rank sends to the rank d after it and
    receives from the rank d before it. So no rank receives from two ranks at once. Thakur,
    Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
    section 4.3. A rank knows only its own counts, so the ranks cannot choose an algorithm by size.
    """
    rank, size = messages.rank, messages.size
    outs, intos = pieces.cut(src, send_counts), pieces.cut(dst, recv_counts)
    messages.copy(outs[rank], intos[rank])
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        messages.exchange(outs[to], to, intos[source], source)
