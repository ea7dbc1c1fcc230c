"""Which layers of a graph are computed some channels at a time, so that least is kept.

A layer that mixes channels reads all of its input. So between two places of a network where all
channels exist, a *segment* of layers can be cut along the channels only if it has at most two
layers that mix them: the first makes some channels of its output (*columns*), layers that work on
channels or groups of channels by themselves follow (*along*), and the second adds what these
channels give to all channels of its output (*rows*). These are the column- and row-parallel layers
of M. Shoeybi et al., "Megatron-LM" (2019), section 3. A segment may also begin with channels of an
array that is there, or end with channels that are joined.

What exists whole at the ends of segments is kept until the backward pass has come there; what is
between them exists for one part of the channels of one segment at a time. Which layers make a
segment is chosen by dynamic programming, so that the sum of both is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .blocks import Step, Value
from .windows import pieces

__all__ = ["ChannelSegment", "segments"]

# So many limits of what one part may keep are tried, evenly among those that there are.
_LIMITS = 24


@dataclass(frozen=True)
class ChannelSegment:
    """Values, each computed from the one before, of which some channels exist at a time.

    Attributes:
        values: in the order in which they are computed; the last one exists whole.
        start: the index of the first that is cut. Those before it are computed whole for each part
            of the channels.
        units: how many groups of channels stay apart from ``values[start]`` on.
        kept: numbers that one part keeps.
    """

    values: tuple[Value, ...]
    start: int
    units: int
    kept: float

    @property
    def steps(self) -> list[Step]:
        """The calls that make the values."""
        return [step_of(value) for value in self.values]

    @property
    def is_summed(self) -> bool:
        """Whether the parts add up to the last value, and are not joined."""
        return len(self.values) - self.start > 1 and step_of(self.last).rows is not None

    @property
    def last(self) -> Value:
        """The value that exists whole."""
        return self.values[len(self.values) - 1]

    def parts(self, channels: int) -> list[range]:
        """Cut the units into at most so many parts."""
        return pieces(self.units, min(channels, self.units))

    def scaled(self, part: range, channels: int) -> range:
        """Return which of so many channels are some of the units."""
        each = channels // self.units
        return range(part.start * each, part.stop * each)


def step_of(value: Value) -> Step:
    """Return what computes a value that is not there."""
    assert value.step is not None
    return value.step


def segments(
    values: Sequence[Value], targets: Sequence[Value], channels: int, recompute: bool
) -> dict[Value, ChannelSegment]:
    """Choose the segments of a graph.

    Args:
        values: of the graph, each after those that it is computed from.
        targets: those that have to exist whole at the end.
        channels: parts of the channels.
        recompute: whether a part keeps nothing. Otherwise a value that is computed for each part
            would be kept for each, and segments are pairs of layers alone.

    Returns:
        Of the last value of each segment, the segment.
    """
    runs = [(run, _segments_of(run, channels, recompute)) for run in _runs(values, set(targets))]
    best, chosen = math.inf, []
    for limit in _limits([segments for _, segments in runs]):
        found = [_cheapest(run, endings, limit) for run, endings in runs]
        cost = limit + sum(each for each, _ in found)
        if cost < best:
            best, chosen = cost, [segment for _, some in found for segment in some]
    return {segment.last: segment for segment in chosen}


def _limits(runs: Sequence[Sequence[Sequence[ChannelSegment]]]) -> list[float]:
    """Return what one part may keep: nothing, and some of what parts of segments keep."""
    every = sorted({segment.kept for run in runs for ending in run for segment in ending})
    steps = max(1, len(every) // _LIMITS)
    return [0.0, *every[::steps], *every[-1:]]


def _runs(values: Sequence[Value], kept: set[Value]) -> list[list[Value]]:
    """Part a graph into runs of values that are each read by the next one alone."""
    readers: dict[Value, list[Value]] = {}
    for value in values:
        for source in step_of(value).sources:
            readers.setdefault(source, []).append(value)
    found: list[list[Value]] = []
    taken: set[Value] = set()
    for value in values:
        if value in taken:
            continue
        run = [value]
        while run[-1] not in kept and len(readers.get(run[-1], ())) == 1:
            (reader,) = readers[run[-1]]
            if len(step_of(reader).sources) != 1:
                break
            run.append(reader)
        taken.update(run)
        found.append(run)
    return found


def _segments_of(
    run: Sequence[Value], channels: int, recompute: bool
) -> list[list[ChannelSegment]]:
    """Return by the index of its last value every segment of a run."""
    found: list[list[ChannelSegment]] = [[] for _ in run]
    for first in range(len(run)):
        for start in range(first, len(run)):
            for segment in _begun(run, first, start, channels):
                if recompute or (start == first and segment.is_summed and _mixes(run[start])):
                    found[first + len(segment.values) - 1].append(segment)
            step = step_of(run[start])
            if step.along is None or step.groups:  # too much work to be done for each part
                break
    return found


def _begun(run: Sequence[Value], first: int, start: int, channels: int) -> Iterator[ChannelSegment]:
    """Yield the segments that begin with a value and are cut from another one on."""
    whole = float(sum(map(_saved, run[first:start], run[first + 1 :])))
    cut, units = 0.0, 0
    for at in range(start, len(run)):
        step = step_of(run[at])
        values = tuple(run[first : at + 1])
        if at > start and step.rows is not None:
            yield ChannelSegment(values, start - first, units, whole + cut / min(channels, units))
            return
        if step.along is None and not (at == start and _mixes(run[at])):
            return
        units = math.gcd(units, step.channels, step.groups or step.channels)
        if units < 2:
            return
        if at > first:
            kept = cut + _saved(run[at], None)
            yield ChannelSegment(values, start - first, units, whole + kept / min(channels, units))
        if at + 1 < len(run):
            cut += _saved(run[at], run[at + 1])


def _cheapest(
    run: Sequence[Value], endings: Sequence[Sequence[ChannelSegment]], limit: float
) -> tuple[float, list[ChannelSegment]]:
    """Return what a run keeps at the least, and its segments, of which no part keeps more."""
    # What the values before each index keep, without the last of them: what reads that one says
    # whether it is kept.
    costs: list[float] = [0.0]
    chosen: list[ChannelSegment | None] = []
    for at, value in enumerate(run):
        best, taken = costs[at] + (_saved(run[at - 1], value) if at else 0), None
        for segment in endings[at]:
            first = at + 1 - len(segment.values)
            cost = costs[first] + (_size(run[first - 1]) if first else 0)
            if segment.kept <= limit and cost < best:
                best, taken = cost, segment
        costs.append(best)
        chosen.append(taken)
    found: list[ChannelSegment] = []
    at = len(run)
    while at:
        last = chosen[at - 1]
        if last is not None:
            found.append(last)
        at -= 1 if last is None else len(last.values)
    return costs[len(run)] + _size(run[len(run) - 1]), found


def _mixes(value: Value) -> bool:
    return step_of(value).columns is not None


def _saved(value: Value, reader: Value | None) -> int:
    """Return how many numbers of a value are kept for the backward pass, at a guess.

    A layer with weights keeps its input and not its output, and so do functions that read windows
    of rows; a function that works number by number keeps its output or its input.
    """
    if not _has_weights(value) or reader is None or _has_weights(reader):
        return _size(value)
    return _size(value) if any(step_of(reader).rules) else 0


def _has_weights(value: Value) -> bool:
    step = step_of(value)
    return bool(step.columns or step.rows or step.groups)


def _size(value: Value) -> int:
    """Return how many numbers a value has."""
    return step_of(value).channels * math.prod(value.lengths)
