"""Choice of the layers of a graph that are computed some channels at a time, to keep least memory.

A layer that mixes channels reads all of its input. Consider two places of a network where all
channels exist. A *segment* of layers between them can be cut along the channels only if at most two
of its layers mix channels. The first of these computes some channels of its output (*columns*).
Layers that work on channels, or groups of channels, separately follow (*along*). The second mixing
layer adds the contribution of these channels to all channels of its output (*rows*). These are the
column- and row-parallel layers of M. Shoeybi et al., "Megatron-LM" (2019), section 3. A segment may
also begin with some channels of an existing array, or end with channels that are joined.

Arrays at the ends of segments exist whole, and are kept until the backward pass has come there.
Arrays inside exist for one part of the channels of one segment at a time. Dynamic programming
chooses the segments so that the sum of both is smallest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .blocks import Step, Value
from .windows import pieces

# Number of limits to try for the memory that one part may keep, evenly spaced among all possible
# limits.
_LIMITS = 24


@dataclass(frozen=True)
class ChannelSegment:
    """Chain of values, each computed from the previous one, of which some channels exist at a time.

    Attributes:
        values: values in the order in which they are computed; the last one exists whole.
        start: index of the first value that is cut. The values before it are computed whole for
            each part of the channels.
        units: number of groups of channels that stay apart from ``values[start]`` on.
        kept: number of array elements that one part keeps.
    """

    values: tuple[Value, ...]
    start: int
    units: int
    kept: float

    @property
    def steps(self) -> list[Step]:
        """Calls that compute the values."""
        return [step_of(value) for value in self.values]

    @property
    def is_summed(self) -> bool:
        """Whether the last value is the sum of the parts, and not their join."""
        return len(self.values) - self.start > 1 and step_of(self.last).rows is not None

    @property
    def last(self) -> Value:
        """Last value, which exists whole."""
        return self.values[len(self.values) - 1]

    def parts(self, channels: int) -> list[range]:
        """Cut the units into at most ``channels`` parts."""
        return pieces(self.units, min(channels, self.units))

    def scaled(self, part: range, channels: int) -> range:
        """Return the channels, out of ``channels``, that belong to some of the units."""
        width = channels // self.units
        return range(part.start * width, part.stop * width)


def step_of(value: Value) -> Step:
    """Return the step that computes a value; the value must have one."""
    assert value.step is not None
    return value.step


def segments(
    values: Sequence[Value], targets: Sequence[Value], channels: int, recompute: bool
) -> dict[Value, ChannelSegment]:
    """Choose the segments of a graph.

    Args:
        values: values of the graph, each after the values that it is computed from.
        targets: values that have to exist whole at the end.
        channels: number of parts of the channels.
        recompute: whether a part keeps nothing. Otherwise a value that is computed for each part
            would be kept for each part, and every segment is a pair of layers.

    Returns:
        Segments, by their last values.
    """
    runs = [(run, _segments_of(run, channels, recompute)) for run in _runs(values, set(targets))]
    best, chosen = math.inf, []
    for limit in _limits([segments for _, segments in runs]):
        choices = [_cheapest(run, endings, limit) for run, endings in runs]
        cost = limit + sum(elements for elements, _ in choices)
        if cost < best:
            best, chosen = cost, [segment for _, some in choices for segment in some]
    return {segment.last: segment for segment in chosen}


def _limits(runs: Sequence[Sequence[Sequence[ChannelSegment]]]) -> list[float]:
    """Return limits for the memory of one part: 0, and a selection of the segments' needs."""
    every = sorted({segment.kept for run in runs for ending in run for segment in ending})
    steps = max(1, len(every) // _LIMITS)
    return [0.0, *every[::steps], *every[-1:]]


def _runs(values: Sequence[Value], kept: set[Value]) -> list[list[Value]]:
    """Divide a graph into runs of values, each read only by the next value of its run."""
    readers: dict[Value, list[Value]] = {}
    for value in values:
        for source in step_of(value).sources:
            readers.setdefault(source, []).append(value)
    runs: list[list[Value]] = []
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
        runs.append(run)
    return runs


def _segments_of(
    run: Sequence[Value], channels: int, recompute: bool
) -> list[list[ChannelSegment]]:
    """Return all segments of a run, in lists by the index of their last value."""
    endings: list[list[ChannelSegment]] = [[] for _ in run]
    for first in range(len(run)):
        for start in range(first, len(run)):
            for segment in _begun(run, first, start, channels):
                if recompute or (start == first and segment.is_summed and _mixes(run[start])):
                    endings[first + len(segment.values) - 1].append(segment)
            step = step_of(run[start])
            # Other steps would be too much work to repeat for each part.
            if step.along is None or step.groups:
                break
    return endings


def _begun(run: Sequence[Value], first: int, start: int, channels: int) -> Iterator[ChannelSegment]:
    """Yield the segments that begin with one value and are cut from another value on."""
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
    """Return the least that a run keeps, and the segments for it; no part exceeds ``limit``."""
    # costs[i]: elements that the values before index i keep, except the last of these values.
    # The reader of the last value determines whether that value is kept.
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
    selection: list[ChannelSegment] = []
    at = len(run)
    while at:
        last = chosen[at - 1]
        if last is not None:
            selection.append(last)
        at -= 1 if last is None else len(last.values)
    return costs[len(run)] + _size(run[len(run) - 1]), selection


def _mixes(value: Value) -> bool:
    return step_of(value).columns is not None


def _saved(value: Value, reader: Value | None) -> int:
    """Return an estimate of how many elements of a value are kept for the backward pass.

    A layer with weights keeps its input and not its output. A function that reads windows of rows
    does the same. An elementwise function keeps its output or its input.
    """
    if not _has_weights(value) or reader is None or _has_weights(reader):
        return _size(value)
    return _size(value) if any(step_of(reader).rules) else 0


def _has_weights(value: Value) -> bool:
    step = step_of(value)
    return bool(step.columns or step.rows or step.groups)


def _size(value: Value) -> int:
    """Return the number of elements of a value."""
    return step_of(value).channels * math.prod(value.lengths)
