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
from .blocks import Block, Run, Step, Value, blocks, order, wanted
from .windows import pieces

__all__ = [
    "CHANNELS", "Serial", "chains", "dimension", "read_by", "select",
    "select_rows",
]  # fmt: skip

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
        for part in range(max(map(len, cuts))):
            goals = {value: cut[part] for value, cut in zip(targets, cuts) if part < len(cut)}
            made = self.block(values, goals, given, inputs, whole)
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
    ) -> tuple[Any, ...]:
        """Compute a block of each goal.

        Args:
            values: what they are computed from, from :func:`order`.
            goals: values, with the block wanted of each.
            given: the values that are there, in the order of ``inputs``.
            inputs: their arrays.
            have: the blocks of them that these are.
        """
        paired = chains(values, list(goals)) if self._channels > 1 else {}
        steps = [value.step for value in values if value.step is not None]

        def compute(*arrays: Any) -> tuple[Any, ...]:
            known = dict(zip(given, zip(arrays, have)))
            rest = iter(arrays[len(given) :])
            uses = {step: tuple(islice(rest, len(step.uses))) for step in steps}
            return self._block(values, goals, known, uses, paired)

        arrays = [*inputs, *(array for step in steps for array in step.uses)]
        return self._arrays.checkpoint(compute, arrays) if self._recompute else compute(*arrays)

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
        paired: Mapping[Value, list[Value]],
    ) -> tuple[Any, ...]:
        wants = wanted(values, goals)
        found = dict(given)
        readers = Counter(
            source
            for value in values
            if value in wants
            for source in set(value.step.sources)  # type: ignore[union-attr]
        )
        inside = {value for chain in paired.values() for value in chain[:-1]}
        for value in values:
            if value not in wants or value in inside:
                continue
            chain = paired.get(value, [value])
            first = chain[0].step
            assert first is not None
            found[value] = self._chain(chain, wants, found, uses), wants[value]
            for source in set(first.sources):
                readers[source] -= 1
                if not readers[source] and source not in goals:
                    del found[source]  # or every layer's rows would be there until the end
        return tuple(found[value][0] for value in goals)

    def _chain(
        self,
        chain: Sequence[Value],
        wants: Mapping[Value, Block],
        found: Mapping[Value, tuple[Any, Block]],
        uses: Mapping[Step, Sequence[Any]],
    ) -> Any:
        """Compute a value, or the last of a chain of values some channels at a time."""
        steps = [value.step for value in chain if value.step is not None]
        first = steps[0]
        read = first.read(wants[chain[0]])
        inputs = [select(self._arrays, *found[source], read.rows) for source in first.sources]
        cuts = pieces(first.channels, max(1, min(self._channels, first.channels)))
        if len(chain) == 1:
            if first.columns is None or self._channels == 1:
                return first.run([*inputs, *uses[first]], read)
            made = [first.columns(channels)([*inputs, *uses[first]], read) for channels in cuts]
            return self._arrays.concatenate(made, CHANNELS)
        blocks = [wants[value] for value in chain]
        counts = [len(step.uses) for step in steps]
        arrays = [*inputs, *(array for step in steps for array in uses[step])]
        total: Any = None
        for channels in cuts:

            def part(*arrays: Any, channels: range = channels) -> tuple[Any]:
                rest = iter(arrays[len(inputs) :])
                used = [list(islice(rest, count)) for count in counts]
                return (self._through(steps, blocks, channels, arrays[: len(inputs)], used),)

            (made_,) = self._arrays.checkpoint(part, arrays) if self._recompute else part(*arrays)
            total = made_ if total is None else total + made_
        last = steps[len(steps) - 1]
        return total if last.after is None else last.after(total, uses[last])

    def _through(
        self,
        steps: Sequence[Step],
        blocks: Sequence[Block],
        channels: range,
        arrays: Sequence[Any],
        uses: Sequence[Sequence[Any]],
    ) -> Any:
        """Compute what some of a chain's inner channels add to its result."""
        previous: Block | None = None
        for at, (step, block, used) in enumerate(zip(steps, blocks, uses)):
            read = step.read(block)
            if previous is not None:
                arrays = [select(self._arrays, arrays[0], previous, read.rows)]
            run = _some(step, channels, at, len(steps))
            arrays = [run([*arrays, *used], read)]
            previous = block
        return arrays[0]


def _some(step: Step, channels: range, at: int, length: int) -> Run:
    make = step.columns if at == 0 else step.rows if at == length - 1 else step.along
    assert make is not None
    return make(channels)


def read_by(values: Sequence[Value]) -> list[Value]:
    """Return the values that are there and that some others are computed from."""
    sources = (source for value in values if value.step for source in value.step.sources)
    return list(dict.fromkeys(source for source in sources if source.is_there))


def chains(values: Sequence[Value], targets: Sequence[Value]) -> dict[Value, list[Value]]:
    """Find the layers between which channels may exist some at a time.

    A chain begins with a layer whose every output channel reads all input channels, ends with one
    that sums over its input channels, and has between them what works on each channel by itself.
    Nobody else reads the values within. It is the pair of column- and row-parallel layers of M.
    Shoeybi et al., "Megatron-LM" (2019), section 3.

    Returns:
        Of the last value of each chain, the chain.
    """
    readers: dict[Value, list[Value]] = {}
    for value in values:
        assert value.step is not None
        for source in value.step.sources:
            readers.setdefault(source, []).append(value)
    kept = set(targets)
    found: dict[Value, list[Value]] = {}
    taken: set[Value] = set()
    for first in values:
        assert first.step is not None
        if first.step.columns is None or first in taken:
            continue
        chain = [first]
        while chain[-1] not in kept and len(readers.get(chain[-1], ())) == 1:
            (reader,) = readers[chain[-1]]
            step = reader.step
            assert step is not None
            if len(step.sources) != 1:
                break
            chain.append(reader)
            if step.along is None:
                break
        last = chain[-1].step
        assert last is not None
        if len(chain) > 1 and last.rows is not None:
            found[chain[-1]] = chain
            taken.update(chain)
    return found
