"""Measurements of sides in turns, A B A B …: a disturbance affects neighbouring turns alike.

For sides in the same ranks; the contestants of ``collective bench`` have separate ranks. The
difference between two sides is computed from turns that follow each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["alternate", "median_excess", "median_ratio", "repeated"]

_MOST_CALLS = 20_000


def repeated(call: Callable[[], object]) -> Callable[[int], None]:
    """Return a function that makes a call a number of times, back to back."""

    def several(count: int) -> None:
        for _ in range(count):
            call()

    return several


def alternate(
    comm: Any,
    sides: Mapping[str, Callable[[int], object]],
    rounds: int,
    turn: float,
    *,
    warm: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds a call of the slowest rank, one figure a turn, for each side.

    Collective: every rank calls it.

    Args:
        comm: communicator that lets ranks begin a turn together and finds the slowest rank's time.
        sides: name -> function that makes a number of calls, as :func:`repeated` returns it.
        rounds: number of turns of each side.
        turn: seconds that one turn should last.
        warm: number of calls before the duration of a call is measured, and for that measurement.
        clock: function that returns the time in seconds.
    """

    def block(side: Callable[[int], object], count: int) -> float:
        comm.barrier()
        start = clock()
        side(count)
        mine = (clock() - start) / count
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


def median_excess(turns: Sequence[float], than: Sequence[float]) -> float:
    """Return the median of the differences between turns and the turns beside them."""
    return statistics.median(a - b for a, b in zip(turns, than))


def median_ratio(turns: Sequence[float], to: Sequence[float]) -> float:
    """Return the median of the ratios between turns and the turns beside them."""
    return statistics.median(a / b for a, b in zip(turns, to))
