"""Measurement of the offsets between the clocks of the ranks' hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from collective.platform import boot_id

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.communicator.host_calls import HostCalls

__all__ = ["clock_of_host", "offsets"]

# Number of exchanges with each host; the fastest one counts.
_ROUNDS = 16
_TAG = 2**31 - 1


def clock_of_host() -> str:
    """Return a text that is equal for processes with the same clock of ``time.monotonic()``."""
    return boot_id() or socket.gethostname()


def offsets(
    comm: Communicator, clocks: list[str], now: Callable[[], float] = time.monotonic
) -> list[tuple[float, float]]:
    """Measure each rank's clock against that of rank 0.

    This is Cristian's algorithm (F. Cristian, "Probabilistic clock synchronization", Distributed
    Computing 3, 1989). The first rank of each host asks rank 0 several times for its time. It uses
    the answer with the shortest round trip, and assumes that rank 0 read its clock half-way.

    Collective: every rank calls it.

    Args:
        clocks: the result of :func:`clock_of_host` on each rank.
        now: the clock, in seconds.

    Returns:
        For each rank, the seconds to add to its clock to get rank 0's clock, and the possible
        error of that number. Later the clocks of the hosts drift apart by some µs a second.
    """
    first = [clocks.index(clock) for clock in clocks]
    leaders = sorted(set(first) - {0})
    if not leaders:
        return [(0.0, 0.0)] * comm.size
    hosted = comm.on_host  # the times are in host memory, for any transport
    mine = (0.0, 0.0)
    for leader in leaders:
        if comm.rank == 0:
            for _ in range(_ROUNDS):
                hosted.recv(leader, tag=_TAG)
                hosted.send(np.array([now()]), leader, tag=_TAG)
        elif comm.rank == leader:
            mine = min((_ask(hosted, now) for _ in range(_ROUNDS)), key=lambda pair: pair[1])
    every = comm.all_gather_object(list(mine))
    return [(float(every[leader][0]), float(every[leader][1])) for leader in first]


def _ask(hosted: HostCalls, now: Callable[[], float]) -> tuple[float, float]:
    """Return the offset of rank 0's clock by one exchange, and half the time of the exchange."""
    asked = now()
    hosted.send(np.array([0.0]), 0, tag=_TAG)
    (answer,) = hosted.recv(0, tag=_TAG)
    half = (now() - asked) / 2
    return float(answer) - (asked + half), half
