"""Finding the training steps of a program in its trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .events import RankTrace, Slice

__all__ = ["TrainingSteps", "find"]

Vector = np.ndarray[Any, np.dtype[np.float64]]
# A program has steps if there are this many boundaries of them.
_FEWEST = 4
# Of the calls, how many have to be those of one period before. Programs test, log and save
# between steps.
_ALIKE = 0.8
_LONGEST = 2048
# Calls matter that move together this share of what those do that move most.
_MATTERS = 0.01


class TrainingSteps(NamedTuple):
    """The steps of all ranks.

    Attributes:
        boundaries: by rank, when a step ended and the next one began; as many on all ranks.
        how: by what they were found, for people.
        guessed: whether nobody marked them: a step may make several of the same calls.
    """

    boundaries: list[Vector]
    how: str
    guessed: bool = False


def find(traces: Sequence[RankTrace]) -> TrainingSteps | None:
    """Return the steps: as the program marks them, by its gradients, or by repeated calls.

    Returns:
        None if there are no steps to be seen.
    """
    marked = (
        ("program", "marks of the program"),
        ("gradients", "gradients reduced, once a step"),
        ("optimizer", "steps of the optimizer"),
    )
    for by, how in marked:
        marks = [np.array(trace.steps.get(by, ())) for trace in traces]
        fewest = min(map(len, marks))
        if fewest >= _FEWEST:
            return TrainingSteps([one[:fewest] for one in marks], how)
    return _repeated(traces)


def _signature(call: Slice) -> tuple[Any, ...]:
    args = call.args
    return call.name, args.get("dtype"), args.get("bytes"), args.get("comm"), args.get("site")


def _repeated(traces: Sequence[RankTrace]) -> TrainingSteps | None:
    calls = traces[0].calls()
    moved: Counter[Any] = Counter()
    for call in calls:
        moved[_signature(call)] += call.args.get("bytes", 0)
    # Barriers, losses that are summed up and the like come now and then, as programs want.
    enough = _MATTERS * max(moved.values(), default=0)
    calls = [call for call in calls if moved[_signature(call)] >= enough]
    signatures = [_signature(call) for call in calls]
    period = _period(signatures)
    if period is None:
        return None
    typical, in_period = _anchor(signatures, period)
    keys = [call.key for call, one in zip(calls, signatures) if one == typical]
    ends = [{call.key: call.end for call in trace.calls()} for trace in traces]
    # The first calls of a step are as good as the last ones, the same all the time.
    chosen = [key for key in keys[::in_period] if all(key in end for end in ends)]
    if len(chosen) < _FEWEST:
        return None
    name, dtype, nbytes, _, site = typical
    of = f" of {nbytes:,} bytes ({dtype})" if nbytes else ""
    every = f", every {in_period} of it" * (in_period > 1)
    return TrainingSteps(
        [np.array([end[key] for key in chosen]) for end in ends],
        f"the repeated {name}{of} at {site}{every}",
        guessed=True,
    )


def _period(signatures: Sequence[Any]) -> int | None:
    """Return after how many calls they repeat."""
    numbers = {one: number for number, one in enumerate(dict.fromkeys(signatures))}
    sequence = np.array([numbers[one] for one in signatures])
    for period in range(1, min(_LONGEST, len(sequence) // _FEWEST) + 1):
        if np.mean(sequence[period:] == sequence[:-period]) >= _ALIKE:
            return period
    return None


def _anchor(signatures: Sequence[Any], period: int) -> tuple[Any, int]:
    """Return a call of every period, and how often it is made in each: as rarely as can be."""
    windows = (
        frozenset(Counter(signatures[start : start + period]).items())
        for start in range(0, len(signatures) - period + 1, period)
    )
    usual = Counter(windows).most_common(1)[0][0]
    typical, count = min(usual, key=lambda item: (item[1], -(item[0][2] or 0), str(item[0])))
    return typical, count
