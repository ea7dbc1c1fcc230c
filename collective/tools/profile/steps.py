"""Search for the training steps of a program in its trace."""

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
# Share of calls that must equal those one period before. It is below 1 because programs test, log
# and save between steps.
_ALIKE = 0.8
_LONGEST = 2048
# Signatures count that together move at least this share of the bytes of the largest signature.
_MATTERS = 0.01


class TrainingSteps(NamedTuple):
    """Training steps of all ranks.

    Attributes:
        boundaries: for each rank, the times at which a step ended and the next began; the same
            number on all ranks.
        how: how the steps were found, as text for people.
        guessed: whether the steps have no marks. Then a step may include the same call several
            times.
    """

    boundaries: list[Vector]
    how: str
    guessed: bool = False


def find(traces: Sequence[RankTrace]) -> TrainingSteps | None:
    """Return the steps, by marks of the program, by its gradients, or by repeated calls.

    Returns:
        The steps; None if none were found.
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
            return TrainingSteps([times[:fewest] for times in marks], how)
    return _repeated(traces)


def _signature(call: Slice) -> tuple[Any, ...]:
    args = call.args
    return call.name, args.get("dtype"), args.get("bytes"), args.get("comm"), args.get("site")


def _repeated(traces: Sequence[RankTrace]) -> TrainingSteps | None:
    calls = traces[0].calls()
    moved: Counter[Any] = Counter()
    for call in calls:
        moved[_signature(call)] += call.args.get("bytes", 0)
    # Barriers, sums of losses and the like come irregularly, so they must not count.
    enough = _MATTERS * max(moved.values(), default=0)
    calls = [call for call in calls if moved[_signature(call)] >= enough]
    signatures = [_signature(call) for call in calls]
    period = _period(signatures)
    if period is None:
        return None
    typical, in_period = _anchor(signatures, period)
    keys = [call.key for call, signature in zip(calls, signatures) if signature == typical]
    ends = [{call.key: call.end for call in trace.calls()} for trace in traces]
    # Any of the calls in a step will do as its boundary, as long as it is always the same one.
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
    """Return the number of calls after which the signatures repeat; None if they do not."""
    numbers = {signature: number for number, signature in enumerate(dict.fromkeys(signatures))}
    sequence = np.array([numbers[signature] for signature in signatures])
    for period in range(1, min(_LONGEST, len(sequence) // _FEWEST) + 1):
        if np.mean(sequence[period:] == sequence[:-period]) >= _ALIKE:
            return period
    return None


def _anchor(signatures: Sequence[Any], period: int) -> tuple[Any, int]:
    """Return the call that periods make most rarely, and how often each period makes it."""
    windows = (
        frozenset(Counter(signatures[start : start + period]).items())
        for start in range(0, len(signatures) - period + 1, period)
    )
    usual = Counter(windows).most_common(1)[0][0]
    typical, count = min(usual, key=lambda item: (item[1], -(item[0][2] or 0), str(item[0])))
    return typical, count
