"""Sides that take turns, A B A B …: what else a machine does meets neighbours alike.

For sides that live in the same ranks; those of :mod:`.measure` have ranks of their own. What one
side takes more than another is told by turns that follow each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

__all__ = ["alternate", "in_turns", "median_excess", "median_ratio", "repeated"]

_MOST_CALLS = 20_000

Side = TypeVar("Side")


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
        rounds, turn, warm: as of :func:`in_turns`.
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

    return in_turns(block, sides, rounds, turn, warm=warm)


def in_turns(
    block: Callable[[Side, int], float],
    sides: Mapping[str, Side],
    rounds: int,
    turn: float,
    *,
    warm: int = 5,
) -> dict[str, list[float]]:
    """Return what ``block`` returned for each side, a figure a turn.

    Args:
        block: has a side make so many calls; returns the seconds of one, the same on all ranks.
        sides: by name.
        rounds: how many turns each side gets.
        turn: seconds that one is to last.
        warm: calls that are made before it is measured how long one takes, and then for that.
    """
    counts = {}
    for name, side in sides.items():
        block(side, warm)
        counts[name] = min(_MOST_CALLS, max(1, round(turn / max(block(side, warm), 1e-7))))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            seconds[name].append(block(side, counts[name]))
    return seconds


def median_excess(turns: Sequence[float], than: Sequence[float]) -> float:
    """Return how much longer turns are than those beside them: the median."""
    return statistics.median(a - b for a, b in zip(turns, than))


def median_ratio(turns: Sequence[float], to: Sequence[float]) -> float:
    """Return how many times as long turns are as those beside them: the median."""
    return statistics.median(a / b for a, b in zip(turns, to))
