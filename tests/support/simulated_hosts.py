"""The ``hierarchical`` transport on one machine whose ranks pretend to be on several hosts.

Use these classes as backends in tests that do not need real hosts (network_hosts.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Self

from collective import native
from collective.algorithms import schedules
from collective.backends.hierarchical import HierarchicalBackend
from collective.contract.world import World
from collective.deadline import Deadline

__all__ = [
    "Interleaved", "Lopsided", "Mixed", "Pairs", "PairsOverGloo", "Single", "Without",
]  # fmt: skip


class Pretended(HierarchicalBackend):
    """Transport that takes the ranks' hosts from ``hosts``, cyclically."""

    hosts: ClassVar[str]

    @classmethod
    def host_of(cls, world: World) -> str:
        return cls.hosts[world.rank % len(cls.hosts)]


class Pairs(Pretended):
    """Two ranks on each host, in order; with an odd number the last host has one rank."""

    name = "hierarchical-pairs"
    hosts = "aabbccdd"


class PairsOverGloo(Pairs):
    """Pairs whose hosts ``gloo`` connects, and whose calls use both levels if any has them."""

    name = "hierarchical-pairs-over-gloo"

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        schedules.SHORT_BYTES = 0
        options = {**world.options, "across": "gloo"}
        return super().connect(replace(world, options=options), deadline)


class Mixed(Pairs):
    """Pairs of which rank 3 has no native core, so that its host exchanges in Python."""

    name = "hierarchical-mixed"

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        if world.rank == 3:
            native.switch(False)
        return super().connect(world, deadline)


class Without(Pairs):
    """Pairs without the native core."""

    name = "hierarchical-without"

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        native.switch(False)
        return super().connect(world, deadline)


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
