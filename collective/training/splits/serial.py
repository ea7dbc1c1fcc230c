"""Cuts in turn: one block after another on one device, each through as many layers as possible.

Calls are only recorded until a whole array is needed. The array is then computed block by block.
With ``recompute``, the forward pass of a block keeps only the arrays at its start. The backward
pass computes the block again, so that the arrays between its layers exist for one block at a time
(T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from .arrays import Arrays
from .blocks import Block, Read, Run, Step, Value, blocks, lengths_of, order, wanted
from .segments import ChannelSegment, segments, step_of
from .windows import pieces

#: Dimension of the channels in an array.
CHANNELS = 1


def dimension(axis: int) -> int:
    """Return the dimension of an axis: the batch is 0, the channels are 1, the data axes follow."""
    return axis if axis == 0 else axis + 1


def select_rows(arrays: Arrays, array: Any, axis: int, have: range, want: range) -> Any:
    """Return the rows ``want`` of an array that holds the rows ``have`` of a whole array."""
    if have == want:
        return array
    start = want.start - have.start if want else 0
    return arrays.slice(array, dimension(axis), range(start, start + len(want)))


def select(arrays: Arrays, array: Any, block: Block, rows: Block) -> Any:
    """Return the part ``rows`` of an array that holds the block ``block`` of a whole array."""
    for axis, (have, want) in enumerate(zip(block, rows, strict=True)):
        array = select_rows(arrays, array, axis, have, want)
    return array


class InTurn:
    """Executor that records a forward pass's calls, and computes blocks when a result is needed.

    Args:
        arrays: operations on the framework's arrays; none between ranks is used.
        parts: number of pieces along the batch and each data axis.
        channels: number of pieces along the channels.
        recompute: whether blocks are computed a second time for their gradients.
    """

    def __init__(
        self, arrays: Arrays, parts: Sequence[int], channels: int, recompute: bool
    ) -> None:
        self._arrays = arrays
        self._parts = tuple(parts)
        self._channels = channels
        self._recompute = recompute

    def enter(self, x: Any) -> Value:
        """Take in the input."""
        return self.enter_whole(x)

    def enter_whole(self, x: Any) -> Value:
        """Take in an array."""
        return Value(lengths_of(x.shape), array=self._arrays.entering(x))

    def add(self, step: Step) -> Value:
        """Add a layer that reads existing values, and return the value that it computes."""
        return Value(step.lengths, step)

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return the whole arrays of some values, and store them in ``Value.array``."""
        self._compute(values)
        return [value.array for value in values]

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return the results of the forward pass."""
        return self.whole(values)

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        """Return the function that gives a layer its parameters: here, unchanged."""
        return lambda x: x

    def layout(self, weight: Any, bias: Any) -> None:
        """Return None, because all filters are on this device."""

    def parameter(self, x: Any) -> Any:
        """Return a parameter, which is whole here."""
        return x

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of a whole array or parameter."""
        return tuple(x.shape)

    def moments(self, value: Value, groups: int | None, dtype: Any) -> tuple[Any, Any, int]:
        """Return means, variances and the number of values behind each: see `Arrays.moments`."""
        (x,) = self.whole([value])
        count = values_behind(value, x.shape[1], groups)
        return *self._arrays.moments(x, groups, dtype, lambda sums: sums / count, None), count

    def generator(self) -> Any:
        """Return the source of random numbers."""
        return self._arrays.generator(None)

    # -- blocks ----------------------------------------------------------------------------

    def _compute(self, targets: Sequence[Value]) -> None:
        targets = [value for value in dict.fromkeys(targets) if value.array is None]
        values = order(targets)
        if not values:
            return
        sources = read_by(values)
        inputs = [value.array for value in sources]
        whole = [tuple(range(n) for n in value.lengths) for value in sources]
        cuts = [blocks(value.lengths, self._parts_of(value)) for value in targets]
        pieces_of: dict[Value, list[Any]] = {value: [] for value in targets}
        count = max(map(len, cuts))
        # A single block is the whole array: if the backward pass computed it again, it would keep
        # as much as the forward pass would. Segments that are computed some channels at a time are
        # recomputed in any case.
        recompute = self._recompute and (count > 1 or self._channels == 1)
        for part in range(count):
            goals = {value: cut[part] for value, cut in zip(targets, cuts) if part < len(cut)}
            results = self._computed(values, goals, sources, inputs, whole, recompute)
            for value, array in zip(goals, results):
                pieces_of[value].append(array)
        for value, arrays in pieces_of.items():
            value.array = self._join(arrays, value)

    def _computed(
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
            values: values that the goals are computed from, in the order of :func:`order`.
            goals: values, each with the block to compute.
            given: values that are already computed, in the order of ``inputs``.
            inputs: arrays of the given values.
            have: blocks that these arrays hold.
            recompute: whether the whole block is computed a second time for its gradients.
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
        """Return the number of pieces along each axis: at least 1, and no more than rows."""
        return tuple(max(1, min(m, n)) for n, m in zip(value.lengths, self._parts))

    def _join(self, arrays: list[Any], value: Value) -> Any:
        """Join blocks, which are ordered with the last axis varying fastest."""
        for axis, parts in reversed(list(enumerate(self._parts_of(value)))):
            if parts > 1:
                arrays = [
                    self._arrays.concatenate(arrays[first : first + parts], dimension(axis))
                    for first in range(0, len(arrays), parts)
                ]
        (whole,) = arrays
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
        computed = dict(given)
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
                array = self._alone(value, wants, computed, uses[first])
            else:
                first = segment.steps[0]
                array = self._in_parts(segment, wants, computed, uses)
            computed[value] = array, wants[value]
            for source in set(first.sources):
                readers[source] -= 1
                if not readers[source] and source not in goals:
                    del computed[source]  # otherwise every layer's rows would exist until the end
        return tuple(computed[value][0] for value in goals)

    def _alone(
        self,
        value: Value,
        wants: Mapping[Value, Block],
        computed: Mapping[Value, tuple[Any, Block]],
        uses: Sequence[Any],
    ) -> Any:
        """Compute a value that exists whole, from inputs that exist whole."""
        step = step_of(value)
        read = step.read(wants[value])
        arrays = [*self._inputs(step, read, computed), *uses]
        if step.columns is None or self._channels == 1:
            return step.run(arrays, read)
        cuts = pieces(step.channels, max(1, min(self._channels, step.channels)))
        parts = [step.columns(channels)(arrays, read) for channels in cuts]
        return self._arrays.concatenate(parts, CHANNELS)

    def _in_parts(
        self,
        segment: ChannelSegment,
        wants: Mapping[Value, Block],
        computed: Mapping[Value, tuple[Any, Block]],
        uses: Mapping[Step, Sequence[Any]],
    ) -> Any:
        """Compute the last value of a segment, some channels at a time."""
        steps = segment.steps
        blocks = [wants[value] for value in segment.values]
        inputs = self._inputs(steps[0], steps[0].read(blocks[0]), computed)
        counts = [len(step.uses) for step in steps]
        arrays = [*inputs, *(array for step in steps for array in uses[step])]
        results: list[Any] = []
        for part in segment.parts(self._channels):

            def compute(*arrays: Any, part: range = part) -> tuple[Any]:
                rest = iter(arrays[len(inputs) :])
                used = [list(islice(rest, count)) for count in counts]
                return (self._through(segment, blocks, part, arrays[: len(inputs)], used),)

            (array,) = (
                self._arrays.checkpoint(compute, arrays) if self._recompute else compute(*arrays)
            )
            if segment.is_summed and results:
                array = results.pop() + array
            results.append(array)
        if not segment.is_summed:
            return self._arrays.concatenate(results, CHANNELS)
        (total,) = results
        last = step_of(segment.last)
        return total if last.after is None else last.after(total, uses[last])

    def _inputs(
        self, step: Step, read: Read, computed: Mapping[Value, tuple[Any, Block]]
    ) -> list[Any]:
        """Return the rows that a step reads of its sources."""
        return [select(self._arrays, *computed[source], read.rows) for source in step.sources]

    def _through(
        self,
        segment: ChannelSegment,
        blocks: Sequence[Block],
        part: range,
        arrays: Sequence[Any],
        uses: Sequence[Sequence[Any]],
    ) -> Any:
        """Compute the contribution of some of a segment's channels to its last value."""
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
    """Return the function that computes one step of a segment for some of its channels."""
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
    """Return the values that are already computed and that some of ``values`` read."""
    sources = (source for value in values if value.step for source in value.step.sources)
    return list(dict.fromkeys(source for source in sources if source.is_there))


def values_behind(value: Value, channels: int, groups: int | None) -> int:
    """Return the number of elements of a value behind one of its means: see `Arrays.moments`."""
    if groups is None:
        return math.prod(value.lengths)
    return channels // groups * math.prod(value.lengths[1:])
