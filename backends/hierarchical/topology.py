"""Who is where, and the pieces of arrays that go there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from collective.algorithms import pieces
from collective.memory.buffer import Buffer

__all__ = ["Topology", "part", "put", "room", "take"]


class Topology:
    """Which rank is where.

    Args:
        hosts: what tells the host of each rank from others.
        rank: this one.

    Attributes:
        hosts: as given.
        members: the ranks of each host, in order; the hosts in the order of their first.
        host: the number of this rank's host.
        local: the ranks of this host.
        local_rank: this rank among them.
        common: how many ranks every host has at least.
        even: whether no host has more than that.
        in_order: whether the hosts' ranks, host after host, are 0, 1, ….
        levels: whether some host has several ranks.
    """

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        by_host: dict[str, list[int]] = {}
        for each, name in enumerate(hosts):
            by_host.setdefault(name, []).append(each)
        self.hosts = list(hosts)
        self.members = list(by_host.values())
        self.host = list(by_host).index(hosts[rank])
        self.local = self.members[self.host]
        self.local_rank = self.local.index(rank)
        lengths = [len(members) for members in self.members]
        self.common = min(lengths)
        self.even = max(lengths) == self.common
        self.levels = max(lengths) > 1
        self.in_order = list(chain(*self.members)) == list(range(len(hosts)))
        self._where = {rank: local_rank for local_rank, rank in enumerate(self.local)}

    def of(self, ranks: Sequence[int], rank: int) -> Topology:
        """Return who of ``ranks``, of whom ``rank`` is this one, is where."""
        return Topology([self.hosts[each] for each in ranks], list(ranks).index(rank))

    def local_rank_of(self, rank: int) -> int | None:
        """Return which of this host's ranks ``rank`` is, None if it is on another."""
        return self._where.get(rank)

    def host_of(self, rank: int) -> int:
        """Return the number of the host of ``rank``."""
        return next(h for h, members in enumerate(self.members) if rank in members)

    def at(self, local_rank: int) -> list[int]:
        """Return the ranks of ``local_rank``, one a host."""
        return [members[local_rank] for members in self.members]

    def parts(self, count: int, alone: int | None) -> list[int]:
        """Return how many of ``count`` elements belong to each rank of this host.

        The same on all hosts, up to local ranks that not all of them have, which get nothing.

        Args:
            count: how many there are.
            alone: the local rank that gets all of them; None shares them out.
        """
        found = [0] * len(self.local)
        if alone is not None:
            found[alone] = count
        else:
            found[: self.common] = pieces.even(count, self.common)
        return found


def part(buffer: Buffer, counts: Sequence[int], number: int) -> Buffer:
    """Return part ``number`` of a buffer that is cut into ``counts``."""
    start = sum(counts[:number])
    return buffer.part(start, start + counts[number])


def take(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int]) -> Buffer:
    """Return the pieces of ``ranks``, one after another: as they are, if they lie so."""
    found = room(buffer, counts, ranks)
    if not np.may_share_memory(found.array, buffer.array):
        at = 0
        for piece in _pieces(buffer, counts, ranks):
            pieces.copy(piece, found.part(at, at + piece.count))
            at += piece.count
    return found


def room(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int]) -> Buffer:
    """Return where the pieces of ``ranks`` can come together: their place, if they lie so."""
    total = sum(counts[rank] for rank in ranks)
    first = ranks[0] if ranks else 0
    if list(ranks) == list(range(first, first + len(ranks))):
        start = sum(counts[:first])
        return buffer.part(start, start + total)
    return Buffer.empty(total, buffer.dtype)


def put(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int], found: Buffer) -> None:
    """Take the pieces of ``ranks`` in ``found``, made by :func:`room`, to their places."""
    if np.may_share_memory(found.array, buffer.array):
        return
    at = 0
    for piece in _pieces(buffer, counts, ranks):
        pieces.copy(found.part(at, at + piece.count), piece)
        at += piece.count


def _pieces(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int]) -> list[Buffer]:
    limits = pieces.limits(counts)
    return [buffer.part(limits[rank], limits[rank + 1]) for rank in ranks]
