"""Hosts and their ranks, and the pieces of arrays that belong to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from collective.algorithms import pieces
from collective.memory.buffer import Buffer

__all__ = ["Topology", "part", "put", "room", "take"]


class Topology:
    """Map of ranks to hosts.

    Args:
        hosts: for each rank, a text that identifies its host.
        rank: this rank.

    Attributes:
        hosts: as passed.
        members: the ranks of each host, in order; the hosts are in the order of their first ranks.
        host: the number of this rank's host.
        local: the ranks of this host.
        local_rank: the index of this rank in ``local``.
        common: the smallest number of ranks on a host.
        even: whether all hosts have that number of ranks.
        in_order: whether the hosts' ranks, host after host, are 0, 1, ….
        levels: whether some host has several ranks.
    """

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        by_host: dict[str, list[int]] = {}
        for member, name in enumerate(hosts):
            by_host.setdefault(name, []).append(member)
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
        """Return the topology of a group of these ranks.

        Args:
            ranks: the group's members.
            rank: this rank, one of ``ranks``.
        """
        return Topology([self.hosts[each] for each in ranks], list(ranks).index(rank))

    def local_rank_of(self, rank: int) -> int | None:
        """Return the index of ``rank`` among this host's ranks, None if it is on another host."""
        return self._where.get(rank)

    def host_of(self, rank: int) -> int:
        """Return the number of the host of ``rank``."""
        return next(h for h, members in enumerate(self.members) if rank in members)

    def at(self, local_rank: int) -> list[int]:
        """Return the ranks whose local rank is ``local_rank``, one for each host."""
        return [members[local_rank] for members in self.members]

    def parts(self, count: int, alone: int | None) -> list[int]:
        """Return how many of ``count`` elements belong to each rank of this host.

        The result is the same on all hosts. Local ranks that not all hosts have get no elements.

        Args:
            count: number of elements.
            alone: the local rank that gets all elements; if None, the ranks share them evenly.
        """
        counts = [0] * len(self.local)
        if alone is not None:
            counts[alone] = count
        else:
            counts[: self.common] = pieces.even(count, self.common)
        return counts


def part(buffer: Buffer, counts: Sequence[int], number: int) -> Buffer:
    """Return part ``number`` of a buffer that is cut into parts of ``counts`` elements."""
    start = sum(counts[:number])
    return buffer.part(start, start + counts[number])


def take(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int]) -> Buffer:
    """Return one buffer with the pieces of ``ranks``, one after another.

    The result is a view if the pieces are contiguous in ``buffer``, in this order, else a copy.
    """
    collected = room(buffer, counts, ranks)
    if not np.may_share_memory(collected.array, buffer.array):
        at = 0
        for piece in _pieces(buffer, counts, ranks):
            pieces.copy(piece, collected.part(at, at + piece.count))
            at += piece.count
    return collected


def room(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int]) -> Buffer:
    """Return a buffer that has room for the pieces of ``ranks``, one after another.

    The result is a view of ``buffer`` if the pieces are contiguous there, in this order, else new
    memory.
    """
    total = sum(counts[rank] for rank in ranks)
    first = ranks[0] if ranks else 0
    if list(ranks) == list(range(first, first + len(ranks))):
        start = sum(counts[:first])
        return buffer.part(start, start + total)
    return Buffer.empty(total, buffer.dtype)


def put(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int], found: Buffer) -> None:
    """Copy the pieces of ``ranks`` from ``found``, made by :func:`room`, to their places.

    Do nothing if ``found`` is a view of ``buffer``: then the pieces are in their places already.
    """
    if np.may_share_memory(found.array, buffer.array):
        return
    at = 0
    for piece in _pieces(buffer, counts, ranks):
        pieces.copy(found.part(at, at + piece.count), piece)
        at += piece.count


def _pieces(buffer: Buffer, counts: Sequence[int], ranks: Sequence[int]) -> list[Buffer]:
    limits = pieces.limits(counts)
    return [buffer.part(limits[rank], limits[rank + 1]) for rank in ranks]
