"""Search for the steps of a program in its trace: by marks, or by the calls that repeat."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .events import RankTrace, Slice

Vector = np.ndarray[Any, np.dtype[Any]]

#: These calls allocate memory and do not move data.
MEMORY = frozenset({"empty", "adopt"})
# Sources of the marks between steps, the best first, and their names for people.
_MARKS = {
    "program": "marks of the program",
    "gradients": "gradients reduced, once a step",
    "optimizer": "steps of the optimizer",
}
# A program has steps if there are this many marks, or repetitions of a loop.
_FEWEST = 4
# Share of all calls that a loop must have. A few calls repeat in any program.
_PART = 0.25
# Maximum length of a loop, in runs of equal calls.
_LONGEST = 2048
# Share of the bursts of equal calls that must have the same length.
_ALIKE = 0.8
# Maximum number of calls of a loop whose places are listed.
_LISTED = 4


class Steps(NamedTuple):
    """Steps of all ranks.

    Attributes:
        how: how the steps were found, as text for people.
        starts, ends: for each rank, the times of the steps in seconds; as many on each rank.
    """

    how: str
    starts: list[Vector]
    ends: list[Vector]


class _RepeatedCalls(NamedTuple):
    """Part of the sequence of calls that is repeated without other calls between.

    Attributes:
        block: symbols of the calls of a repetition; runs of equal calls count once.
        visits: for each time that the program entered the loop, the index of its first call, and
            the indices of the last calls of the repetitions.
    """

    block: list[int]
    visits: list[tuple[int, Vector]]

    @property
    def repetitions(self) -> int:
        return sum(len(ends) for _, ends in self.visits)

    @property
    def calls(self) -> int:
        return sum(int(ends[-1]) - first + 1 for first, ends in self.visits)


def find(traces: Sequence[RankTrace]) -> Steps | None:
    """Return the steps, by the best marks that the trace has, or by the calls that repeat.

    Returns:
        The steps; None if none were found.
    """
    for by, how in _MARKS.items():
        marks = [np.array(trace.steps.get(by, ())) for trace in traces]
        count = min(map(len, marks))  # the ranks may have ended in different steps
        if count >= _FEWEST:
            return Steps(how, [at[: count - 1] for at in marks], [at[1:count] for at in marks])
    return _repeated(traces)


def _repeated(traces: Sequence[RankTrace]) -> Steps | None:
    by_key = [{call.key: call for call in trace.calls()} for trace in traces]
    calls = [
        call for key, call in by_key[0].items()
        if call.name not in MEMORY and all(key in known for known in by_key)
    ]  # fmt: skip
    # With the sizes, a loop over buckets of different sizes has several calls, and its equal calls
    # do not look like steps. Without them, calls whose sizes change from step to step are equal.
    sized = _numbered(
        [(call.name, call.args.get("site"), call.args.get("bytes")) for call in calls]
    )
    plain = _numbered([(call.name, call.args.get("site")) for call in calls])
    loops = [loop for symbols in (sized, plain) for loop in _loops(symbols)]
    if not loops:
        return None
    loop = _main(loops, calls)
    visits, burst = loop.visits, 1
    if len(loop.block) == 1:
        visits, burst = _bursts(loop, calls)
    starts, ends = [], []
    for known in by_key:
        times = [np.array([known[calls[index].key].end for index in at]) for _, at in visits]
        starts.append(np.concatenate([at[:-1] for at in times]))
        ends.append(np.concatenate([at[1:] for at in times]))
    first, last = loop.visits[0][0], loop.visits[0][1][0]
    return Steps(_name(calls[first : last + 1], burst), starts, ends)


def _numbered(values: Sequence[tuple[Any, ...]]) -> Vector:
    """Return a number for each value, the same for equal values."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], int)


def _loops(symbols: Vector) -> Iterator[_RepeatedCalls]:
    """Yield the loops with enough repetitions and calls, the shortest first."""
    if not len(symbols):
        return
    first = np.flatnonzero(np.concatenate(([True], symbols[1:] != symbols[:-1])))
    last = np.concatenate((first[1:], [len(symbols)])) - 1
    runs = symbols[first]
    for period in range(1, max(1, min(_LONGEST, len(runs) // _FEWEST)) + 1):
        # The same calls in the same loop are the same loop, wherever the trace enters it.
        loops: dict[tuple[int, ...], _RepeatedCalls] = {}
        for start, ends in _visits(runs, first, last, period):
            block = runs[start : start + period].tolist()
            loop = loops.setdefault(tuple(sorted(block)), _RepeatedCalls(block, []))
            loop.visits.append((int(first[start]), ends))
        for loop in loops.values():
            if loop.repetitions >= _FEWEST and loop.calls >= _PART * len(symbols):
                yield loop


def _visits(runs: Vector, first: Vector, last: Vector, period: int) -> Iterator[tuple[int, Vector]]:
    """Yield the first run of each repeated part, and the last calls of its repetitions."""
    if period == 1:  # each call of a run of equal calls is a repetition
        for start in np.flatnonzero(last > first).tolist():
            yield start, np.arange(first[start], last[start] + 1)
        return
    alike = np.concatenate(([0], runs[period:] == runs[:-period], [0]))
    changes = np.flatnonzero(np.diff(alike))
    for start, end in zip(changes[::2].tolist(), changes[1::2].tolist()):
        if end - start >= period:
            yield start, last[start + period - 1 : end + period : period]


def _main(loops: Sequence[_RepeatedCalls], calls: Sequence[Slice]) -> _RepeatedCalls:
    """Return the loop whose repetitions are the steps.

    It fills at least half of the time of the loop that fills most. Of several, that is the
    innermost that a visit repeats at least as often as the program visits it: a loop over ten
    buckets in each of a hundred steps is not the loop over steps, and a loop over a hundred batches
    in each of ten epochs is.
    """
    seconds = [
        sum(calls[ends[-1]].end - calls[first].start for first, ends in loop.visits)
        for loop in loops
    ]
    large = [loop for loop, took in zip(loops, seconds) if took >= max(seconds) / 2]
    entered = (loop for loop in large if loop.repetitions >= len(loop.visits) ** 2)
    return next(entered, loops[int(np.argmax(seconds))])


def _bursts(loop: _RepeatedCalls, calls: Sequence[Slice]) -> tuple[list[tuple[int, Vector]], int]:
    """Return the visits of a loop of one call, by bursts of calls if the calls come in bursts.

    Equal buckets, one after the other, look like steps except for the time between them.

    Returns:
        The visits, with the last call of each burst in place of every call; the number of calls in
        a burst.
    """
    pauses = [
        np.array([max(0.0, calls[b].start - calls[a].end) for a, b in itertools.pairwise(ends)])
        for _, ends in loop.visits
    ]
    ordered = np.sort(np.concatenate(pauses))
    total = np.cumsum(ordered)
    # Half of the time between calls is in pauses of this length or longer ones.
    usual = ordered[np.searchsorted(total, total[-1] / 2)]
    visits = [
        (first, ends[:-1][pause >= usual / 4]) for (first, ends), pause in zip(loop.visits, pauses)
    ]
    lengths = Counter(length for _, ends in visits for length in np.diff(ends).tolist())
    length, count = max(lengths.items(), key=lambda item: item[1], default=(1, 0))
    if length == 1 or count < max(_FEWEST - 1, _ALIKE * lengths.total()):
        return loop.visits, 1
    return visits, length


def _name(calls: Sequence[Slice], burst: int) -> str:
    """Return the text for people about the loop with these calls."""
    places = dict.fromkeys(
        f"{call.name} at {os.path.basename(call.args.get('site') or '?').split(' in ')[0]}"
        for call in calls
    )
    listed = ", ".join([*places][:_LISTED]) + ", …" * (len(places) > _LISTED)
    return f"the repeated {f'{burst} calls of ' * (burst > 1)}{listed}"
