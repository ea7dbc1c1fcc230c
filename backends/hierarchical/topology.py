"""Hosts and their ranks."""

from __future__ import annotations

from collections.abc import Sequence


class Topology:
    """Map of ranks to hosts.

    Args:
        hosts: for each rank, a text that identifies its host.
        rank: this rank.

    Attributes:
        hosts: as passed.
        members: the ranks of each host, in order; the hosts are in the order of their first ranks.
        local: the ranks of this host.
        local_rank: the index of this rank in ``local``.
        levels: whether some host has several ranks.
    """

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        by_host: dict[str, list[int]] = {}
        for member, name in enumerate(hosts):
            by_host.setdefault(name, []).append(member)
        self.hosts = list(hosts)
        self.members = list(by_host.values())
        self.local = by_host[hosts[rank]]
        self.local_rank = self.local.index(rank)
        self.levels = len(self.members) < len(self.hosts)
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
