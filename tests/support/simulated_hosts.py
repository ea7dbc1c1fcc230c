"""The ``hierarchical`` transport with hosts that are said to be several, on this one."""

from __future__ import annotations

from typing import ClassVar

# Between the hosts: imported with this module, as what that takes on a busy machine would else
# count as time in which the ranks meet.
import collective.backends.gloo  # noqa: F401
from collective.backends.hierarchical import HierarchicalBackend
from collective.contract.world import World

__all__ = ["Interleaved", "Lopsided", "Pairs", "Single"]


class Pretended(HierarchicalBackend):
    """Takes the ranks' hosts from a list, again and again."""

    hosts: ClassVar[str]
    # So that the suite's longer arrays are cut, and the shorter are not.
    shared_bytes = 64 << 10

    @classmethod
    def host_of(cls, world: World) -> str:
        return cls.hosts[world.rank % len(cls.hosts)]


class Pairs(Pretended):
    """Two ranks a host, in order; with an odd number the last host has one."""

    name = "hierarchical-pairs"
    hosts = "aabbccdd"


class Interleaved(Pretended):
    """Neighbouring ranks on different hosts: a, b, a, b."""

    name = "hierarchical-interleaved"
    hosts = "ab"


class Lopsided(Pretended):
    """One rank alone on a host, all others on another, in between."""

    name = "hierarchical-lopsided"
    hosts = "abaa"


class Single(Pretended):
    """All on one host: the network is never used for data."""

    name = "hierarchical-single"
    hosts = "a"
