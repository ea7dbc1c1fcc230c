"""How far apart the clocks of the ranks' hosts are."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.communicator.host_calls import HostCalls

__all__ = ["clock_of_host", "offsets"]

# Exchanges with each host; the fastest counts.
_ROUNDS = 16
_TAG = 2**31 - 1


def clock_of_host() -> str:
    """Return what is equal for two processes if ``time.monotonic()`` is one clock for both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return boot or socket.gethostname()


def offsets(
    comm: Communicator, clocks: list[str], now: Callable[[], float] = time.monotonic
) -> list[tuple[float, float]]:
    """Measure each rank's clock against that of rank 0.

    By Cristian's algorithm (F. Cristian, "Probabilistic clock synchronization", Distributed
    Computing 3, 1989): the first rank of each host asks rank 0 for its time, some times over,
    and takes the answer that came back fastest to have been given half-way.

    Collective: every rank calls it.

    Args:
        clocks: what :func:`clock_of_host` says on each rank.
        now: the clock, in seconds.

    Returns:
        For each rank the seconds to be added to its clock to have rank 0's, and by how much
        that may be wrong. Hosts' clocks drift apart later, by some µs a second.
    """
    first = [clocks.index(clock) for clock in clocks]
    leaders = sorted(set(first) - {0})
    if not leaders:
        return [(0.0, 0.0)] * comm.size
    hosted = comm.on_host  # the times are in the CPU's memory, whatever the transport takes
    mine = (0.0, 0.0)
    for leader in leaders:
        if comm.rank == 0:
            for _ in range(_ROUNDS):
                hosted.recv(leader, tag=_TAG)
                hosted.send(np.array([now()]), leader, tag=_TAG)
        elif comm.rank == leader:
            mine = min((_ask(hosted, now) for _ in range(_ROUNDS)), key=lambda found: found[1])
    every = comm.all_gather_object(list(mine))
    return [(float(every[leader][0]), float(every[leader][1])) for leader in first]


def _ask(hosted: HostCalls, now: Callable[[], float]) -> tuple[float, float]:
    """Return the offset of rank 0's clock from one exchange, and half of how long that took."""
    asked = now()
    hosted.send(np.array([0.0]), 0, tag=_TAG)
    (answer,) = hosted.recv(0, tag=_TAG)
    half = (now() - asked) / 2
    return float(answer) - (asked + half), half
