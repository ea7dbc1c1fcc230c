"""The ``hierarchical`` transport on one machine whose ranks pretend to be on several hosts.

Use these classes as backends in tests that do not need real hosts (network_hosts.py).
"""

from __future__ import annotations

from typing import ClassVar

# Gloo connects the hosts. It is imported here, because on a busy machine a later import would count
# as time in which the ranks meet.
import collective.backends.gloo  # noqa: F401
from collective.backends.hierarchical import HierarchicalBackend
from collective.contract.world import World

__all__ = ["Interleaved", "Lopsided", "Pairs", "Single"]


class Pretended(HierarchicalBackend):
    """Transport that takes the ranks' hosts from ``hosts``, cyclically."""

    hosts: ClassVar[str]
    # With this size the suite's longer arrays are cut, and the shorter arrays are not.
    shared_bytes = 64 << 10

    @classmethod
    def host_of(cls, world: World) -> str:
        return cls.hosts[world.rank % len(cls.hosts)]


class Pairs(Pretended):
    """Two ranks on each host, in order; with an odd number the last host has one rank."""

    name = "hierarchical-pairs"
    hosts = "aabbccdd"


class Interleaved(Pretended):
    """Neighbouring ranks on different hosts: a, b, a, b."""

    name = "hierarchical-interleaved"
    hosts = "ab"


class Lopsided(Pretended):
    """Rank 1 is alone on a host, all other ranks of four are on another host."""

    name = "hierarchical-lopsided"
    hosts = "abaa"


class Single(Pretended):
    """All ranks on one host: the network never carries data."""

    name = "hierarchical-single"
    hosts = "a"
