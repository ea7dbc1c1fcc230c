"""Cut in turn: blocks one after another on one device, each through as many layers as possible.

Calls are recorded, not made, until somebody needs a whole array; then it is computed block by
block. With ``recompute`` a block keeps nothing for the backward pass but the arrays at its start,
and is computed once more there, so that what the layers between hold exists for one block at a
time (T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from .arrays import Arrays
from .blocks import Block, Read, Run, Step, Value, blocks, order, wanted
from .segments import ChannelSegment, segments, step_of
from .windows import pieces

__all__ = ["CHANNELS", "Serial", "dimension", "read_by", "select", "select_rows"]

#: The dimension of the channels.
CHANNELS = 1


def dimension(axis: int) -> int:
    """Return the dimension of an axis: the batch is the first, channels the second, then data."""
    return axis if axis == 0 else axis + 1


def select_rows(arrays: Arrays, array: Any, axis: int, have: range, want: range) -> Any:
    """Return the rows ``want`` of an array that has the rows ``have`` of a whole one."""
    if have == want:
        return array
    start = want.start - have.start if want else 0
    return arrays.slice(array, dimension(axis), range(start, start + len(want)))


def select(arrays: Arrays, array: Any, block: Block, rows: Block) -> Any:
    """Return the part ``rows`` of an array that is the block ``block`` of a whole one."""
    for axis, (have, want) in enumerate(zip(block, rows, strict=True)):
        array = select_rows(arrays, array, axis, have, want)
    return array


class Serial:
    """Computes values in blocks.

    Args:
        arrays: the framework.
        parts: pieces along the batch, the channels and each data axis.
        recompute: whether blocks are computed once more for their gradients.
    """

    def __init__(
        self, arrays: Arrays, parts: Sequence[int], channels: int, recompute: bool
    ) -> None:
        self._arrays = arrays
        self._parts = tuple(parts)
        self._channels = channels
        self._recompute = recompute

    def compute(self, targets: Sequence[Value]) -> None:
        """Compute all of some values, and set their ``array``."""
        targets = [value for value in dict.fromkeys(targets) if value.array is None]
        values = order(targets)
        if not values:
            return
        given = read_by(values)
        inputs = [value.array for value in given]
        whole = [tuple(range(n) for n in value.lengths) for value in given]
        cuts = [blocks(value.lengths, self._parts_of(value)) for value in targets]
        found: dict[Value, list[Any]] = {value: [] for value in targets}
        count = max(map(len, cuts))
        # A single block is all there is, and keeps in the backward pass what it would keep before;
        # what it computes some channels at a time is computed again in any case.
        recompute = self._recompute and (count > 1 or self._channels == 1)
        for part in range(count):
            goals = {value: cut[part] for value, cut in zip(targets, cuts) if part < len(cut)}
            made = self.block(values, goals, given, inputs, whole, recompute)
            for value, array in zip(goals, made):
                found[value].append(array)
        for value, arrays in found.items():
            value.array = self._join(arrays, value)

    def block(
        self,
        values: Sequence[Value],
        goals: Mapping[Value, Block],
        given: Sequence[Value],
        inputs: Sequence[Any],
        have: Sequence[Block],
        recompute: bool,
    ) -> tuple[Any, ...]:
        """Compute a block of each goal.

        Args:
            values: what they are computed from, from :func:`order`.
            goals: values, with the block wanted of each.
            given: the values that are there, in the order of ``inputs``.
            inputs: their arrays.
            have: the blocks of them that these are.
            recompute: whether all of the block is computed once more for its gradients.
        """
        cut: Mapping[Value, ChannelSegment] = {}
        if self._channels > 1:
            cut = segments(values, list(goals), self._channels, self._recompute)
        steps = [value.step for value in values if value.step is not None]

        def compute(*arrays: Any) -> tuple[Any, ...]:
            known = dict(zip(given, zip(arrays, have)))
            rest = iter(arrays[len(given) :])
            uses = {step: tuple(islice(rest, len(step.uses))) for step in steps}
            return self._block(values, goals, known, uses, cut)

        arrays = [*inputs, *(array for step in steps for array in step.uses)]
        return self._arrays.checkpoint(compute, arrays) if recompute else compute(*arrays)

    def _parts_of(self, value: Value) -> tuple[int, ...]:
        """Return how many pieces an array is cut into along each axis: none without a row."""
        return tuple(max(1, min(m, n)) for n, m in zip(value.lengths, self._parts))

    def _join(self, found: list[Any], value: Value) -> Any:
        """Join blocks, which are in the order of their last axis first."""
        for axis, parts in reversed(list(enumerate(self._parts_of(value)))):
            if parts > 1:
                found = [
                    self._arrays.concatenate(found[first : first + parts], dimension(axis))
                    for first in range(0, len(found), parts)
                ]
        (whole,) = found
        return whole

    def _block(
        self,
        values: Sequence[Value],
        goals: Mapping[Value, Block],
        given: Mapping[Value, tuple[Any, Block]],
        uses: Mapping[Step, Sequence[Any]],
        cut: Mapping[Value, ChannelSegment],
    ) -> tuple[Any, ...]:
        wants = wanted(values, goals)
        found = dict(given)
        readers = Counter(
            source
            for value in values
            if value in wants
            for source in set(value.step.sources)  # type: ignore[union-attr]
        )
        inside = {value for segment in cut.values() for value in segment.values[:-1]}
        for value in values:
            if value not in wants or value in inside:
                continue
            segment = cut.get(value)
            if segment is None:
                first = step_of(value)
                array = self._alone(value, wants, found, uses[first])
            else:
                first = segment.steps[0]
                array = self._in_parts(segment, wants, found, uses)
            found[value] = array, wants[value]
            for source in set(first.sources):
                readers[source] -= 1
                if not readers[source] and source not in goals:
                    del found[source]  # or every layer's rows would be there until the end
        return tuple(found[value][0] for value in goals)

    def _alone(
        self,
        value: Value,
        wants: Mapping[Value, Block],
        found: Mapping[Value, tuple[Any, Block]],
        uses: Sequence[Any],
    ) -> Any:
        """Compute a value whose input exists whole, and which does so itself."""
        step = step_of(value)
        read = step.read(wants[value])
        arrays = [*self._inputs(step, read, found), *uses]
        if step.columns is None or self._channels == 1:
            return step.run(arrays, read)
        cuts = pieces(step.channels, max(1, min(self._channels, step.channels)))
        made = [step.columns(channels)(arrays, read) for channels in cuts]
        return self._arrays.concatenate(made, CHANNELS)

    def _in_parts(
        self,
        segment: ChannelSegment,
        wants: Mapping[Value, Block],
        found: Mapping[Value, tuple[Any, Block]],
        uses: Mapping[Step, Sequence[Any]],
    ) -> Any:
        """Compute the last value of a segment some channels at a time."""
        steps = segment.steps
        blocks = [wants[value] for value in segment.values]
        inputs = self._inputs(steps[0], steps[0].read(blocks[0]), found)
        counts = [len(step.uses) for step in steps]
        arrays = [*inputs, *(array for step in steps for array in uses[step])]
        made: list[Any] = []
        for part in segment.parts(self._channels):

            def compute(*arrays: Any, part: range = part) -> tuple[Any]:
                rest = iter(arrays[len(inputs) :])
                used = [list(islice(rest, count)) for count in counts]
                return (self._through(segment, blocks, part, arrays[: len(inputs)], used),)

            (array,) = (
                self._arrays.checkpoint(compute, arrays) if self._recompute else compute(*arrays)
            )
            if segment.is_summed and made:
                array = made.pop() + array
            made.append(array)
        if not segment.is_summed:
            return self._arrays.concatenate(made, CHANNELS)
        (total,) = made
        last = step_of(segment.last)
        return total if last.after is None else last.after(total, uses[last])

    def _inputs(
        self, step: Step, read: Read, found: Mapping[Value, tuple[Any, Block]]
    ) -> list[Any]:
        """Return the rows that a step reads of its sources."""
        return [select(self._arrays, *found[source], read.rows) for source in step.sources]

    def _through(
        self,
        segment: ChannelSegment,
        blocks: Sequence[Block],
        part: range,
        arrays: Sequence[Any],
        uses: Sequence[Sequence[Any]],
    ) -> Any:
        """Compute what some of a segment's channels give of its last value."""
        steps = segment.steps
        previous: Block | None = None
        for at, (step, block, used) in enumerate(zip(steps, blocks, uses)):
            read = step.read(block)
            if previous is not None:
                arrays = [select(self._arrays, arrays[0], previous, read.rows)]
            if at == segment.start and step.columns is None:
                arrays = [
                    self._arrays.slice(array, CHANNELS, segment.scaled(part, array.shape[CHANNELS]))
                    for array in arrays
                ]
            arrays = [_run(segment, steps, at, part)([*arrays, *used], read)]
            previous = block
        return arrays[0]


def _run(segment: ChannelSegment, steps: Sequence[Step], at: int, part: range) -> Run:
    """Return what computes one step of a segment for some of its channels."""
    step = steps[at]
    if at < segment.start:
        return step.run
    if at == len(steps) - 1 and segment.is_summed:
        assert step.rows is not None
        return step.rows(segment.scaled(part, steps[at - 1].channels))
    make = step.columns if at == segment.start and step.columns is not None else step.along
    assert make is not None
    return make(segment.scaled(part, step.channels))


def read_by(values: Sequence[Value]) -> list[Value]:
    """Return the values that are there and that some others are computed from."""
    sources = (source for value in values if value.step for source in value.step.sources)
    return list(dict.fromkeys(source for source in sources if source.is_there))
