"""Sides that take turns, A B A B …: what else a machine does meets neighbours alike.

For sides that live in the same ranks; those of :mod:`.measure` have ranks of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["alternate", "repeated"]

_MOST_CALLS = 20_000


def repeated(call: Callable[[], object]) -> Callable[[int], None]:
    """Return what makes a call so many times, back to back."""

    def several(count: int) -> None:
        for _ in range(count):
            call()

    return several


def alternate(
    comm: Any | None,
    sides: Mapping[str, Callable[[int], object]],
    rounds: int,
    turn: float,
    *,
    warm: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds a call that each side took, a figure a turn: of the slowest rank.

    Collective: every rank calls it.

    Args:
        comm: has the ranks begin a turn together, and knows the slowest one's time; None for one
            process.
        sides: by name what makes so many calls, as :func:`repeated` returns it.
        rounds: how many turns each side gets.
        turn: seconds that one is to last.
        warm: calls that are made before it is measured how long one takes, and then for that.
        clock: what tells the time, in seconds.
    """

    def block(side: Callable[[int], object], count: int) -> float:
        if comm is not None:
            comm.barrier()
        start = clock()
        side(count)
        mine = (clock() - start) / count
        if comm is None:
            return mine
        slowest: float = comm.all_reduce(np.array([mine]), op="max").item()
        return slowest

    counts = {}
    for name, side in sides.items():
        block(side, warm)
        counts[name] = min(_MOST_CALLS, max(1, round(turn / max(block(side, warm), 1e-7))))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(block(side, counts[name]))
    return seconds
