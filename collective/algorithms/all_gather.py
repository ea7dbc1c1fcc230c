"""All-gather."""

from __future__ import annotations

from collections.abc import Sequence

from collective.deadline import Deadline
from collective.memory.buffer import Buffer

from . import costs, pieces
from .messages import Messages, PointToPoint

__all__ = ["all_gather", "collect", "ring"]


def all_gather(
    backend: PointToPoint, src: Buffer, dst: Buffer, counts: Sequence[int], deadline: Deadline
) -> None:
    """Concatenate the ranks' ``src``, of ``counts[rank]`` elements, in every ``dst``.

    ``src`` may be this rank's part of ``dst``. See :func:`collect`.
    """
    collect(Messages(backend, deadline), src, dst, counts)


def collect(messages: Messages, src: Buffer, dst: Buffer, counts: Sequence[int]) -> None:
    """Do what :func:`all_gather` does, as part of another operation.

    For a short result it uses Bruck's algorithm, with scratch memory of the size of ``dst``. A long
    result goes around a ring. Both algorithms take any counts.
    """
    if costs.forwarding_pays(messages.size, dst.nbytes):
        _bruck(messages, src, dst, counts)
    else:
        every = pieces.cut(dst, counts)
        pieces.copy(src, every[messages.rank])
        ring(messages, every)


def ring(
    messages: Messages, every: Sequence[Buffer], first: int = 0, complete: int | None = None
) -> None:
    """Pass pieces around the ring of ranks until every rank has all of them.

    In each step a rank sends to its right neighbour the piece that it last received from its left
    neighbour. Each rank sends (size - 1) / size of the whole, the minimum for this operation.
    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).

    Args:
        messages: messages of the call.
        every: buffers of all pieces; this rank's own piece is complete already.
        first: the rank that owns piece 0; the other owners follow in rank order.
        complete: a rank that has all pieces already, if there is one. The ring sends that rank
            nothing, since its memory may be read-only.
    """
    rank, size = messages.rank, messages.size
    right, left = (rank + 1) % size, (rank - 1) % size
    out = (rank - first) % size
    nothing = every[0].part(0, 0)
    for _ in range(size - 1):
        # All ranks are at the same step, so the left neighbour sends the piece before this one.
        into = (out - 1) % size
        sent = nothing if right == complete else every[out]
        received = nothing if rank == complete else every[into]
        messages.exchange(sent, right, received, left)
        out = into


def _bruck(messages: Messages, src: Buffer, dst: Buffer, counts: Sequence[int]) -> None:
    """Double the pieces that each rank has in every round: its own and those of the next ranks.

    Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
    Message-Passing Systems" (1997).
    """
    rank, size = messages.rank, messages.size
    # The rotated buffer has the pieces of ranks rank, rank + 1, …, wrapping around to rank - 1.
    limits = pieces.limits([*counts[rank:], *counts[:rank]])
    rotated = Buffer.empty(dst.count, dst.dtype)
    pieces.copy(src, rotated.part(0, src.count))
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
    pieces.copy(rotated.part(0, turn), dst.part(start, dst.count))
    pieces.copy(rotated.part(turn, dst.count), dst.part(0, start))
