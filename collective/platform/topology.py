"""Topology of this host: sockets, memory nodes, cores, and the logical processors of a core.

The kernel shows it in ``/sys/devices/system``. Where a sandbox hides these files, each processor
that this process may use counts as a core, and all of them as one node of one socket.

``collective run --bind`` divides the processors among the ranks of a host (:func:`shares`). It has
no choice of sockets, nodes or cores as mpiexec and torchrun have: one rank for each node gets the
node, and more ranks get parts of it. Memory needs no call: by default the kernel takes pages from
the node of the core that first writes to them, and from another node if that one is full. With
MPOL_BIND of set_mempolicy(2) a rank would die instead, and some containers forbid the call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

#: Directory of the kernel's files about processors and nodes.
SYSTEM = Path("/sys/devices/system")


class Processor(NamedTuple):
    """Logical processor: a core, or one of the hardware threads of a core.

    Attributes:
        node: number of its NUMA node.
        core: lowest number among the logical processors of its core.
        number: its own number, as in ``os.sched_getaffinity``.
        socket: number of its socket.
    """

    node: int
    core: int
    number: int
    socket: int


def processors(*, usable: bool = False) -> list[Processor]:
    """Return the logical processors of this host, by node, core and number.

    Args:
        usable: if true, return only those that this process may use. The affinity of the process
            also has the limits of its container.
    """
    mine = os.sched_getaffinity(0)
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in SYSTEM.glob("node/node[0-9]*")
        for number in _numbers(folder / "cpulist")
    }
    known = set(_numbers(SYSTEM / "cpu/online")) | mine
    found = []
    for number in mine if usable else known:
        folder = SYSTEM / f"cpu/cpu{number}/topology"
        siblings = _numbers(folder / "thread_siblings_list") or [number]
        sockets = _numbers(folder / "physical_package_id") or [0]
        found.append(Processor(nodes.get(number, 0), min(siblings), number, sockets[0]))
    return sorted(found)


def _numbers(path: Path) -> list[int]:
    """Return the numbers in one of the kernel's lists, such as ``0-3,8``; [] if it is absent."""
    numbers: list[int] = []
    with contextlib.suppress(OSError, ValueError):  # ValueError: the number is -1, for unknown
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def listed(numbers: Iterable[int]) -> str:
    """Return numbers as one of the kernel's lists, such as ``0-3,8``."""
    ordered = sorted(numbers)
    parts = []
    # In a run of successive numbers, all differ from their positions by the same amount.
    for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)


def shares(usable: Sequence[Processor], ranks: int) -> list[list[int]]:
    """Divide processors among the ranks of a host.

    Each rank gets whole cores that no other rank gets. With as many ranks as nodes or more, each
    rank gets cores of one node only, and a node gets ranks by its number of cores. With fewer
    ranks than nodes, each rank gets whole nodes that are neighbours.

    Args:
        usable: the processors, in the order of :func:`processors`.
        ranks: number of ranks.

    Returns:
        The numbers of each rank's processors; [] if there are fewer cores than ranks.
    """
    nodes = [
        [[one.number for one in core] for _, core in groupby(node, attrgetter("core"))]
        for _, node in groupby(usable, attrgetter("node"))
    ]
    if sum(map(len, nodes)) < ranks:
        return []
    if ranks < len(nodes):
        parts = [nodes[_cut(nodes, ranks, part)] for part in range(ranks)]
        return [sorted(n for node in part for core in node for n in core) for part in parts]
    counts = [0] * len(nodes)
    for _ in range(ranks):
        # The next rank goes where it gets most cores; of equal nodes, where fewest ranks are.
        best = max(
            range(len(nodes)),
            key=lambda node: (len(nodes[node]) / (counts[node] + 1), -counts[node]),
        )
        counts[best] += 1
    return [
        sorted(number for core in cores[_cut(cores, count, part)] for number in core)
        for cores, count in zip(nodes, counts, strict=True)
        for part in range(count)
    ]


def _cut(things: Sequence[object], parts: int, part: int) -> slice:
    """Return where one of ``parts`` nearly equal parts of a sequence is."""
    return slice(part * len(things) // parts, (part + 1) * len(things) // parts)
