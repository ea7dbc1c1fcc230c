"""Requirements of a graph of layers for a block of its result.

Each call of a model is a :class:`Step`, with the rule by which its rows depend on its sources'
rows. To compute a block of the result, first walk the steps backwards: each value must provide the
hull of the blocks that its readers need. Then walk forwards and compute each value for that block
only. Padding rows belong to no array: a step adds them where a window reaches over an end of the
axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .windows import Rule, clip, pieces

#: The rows of an array along each axis that may be cut: the batch, and the data axes.
Block = tuple[range, ...]


class Value:
    """Array of a forward pass, cut along its batch or its data axes.

    Attributes:
        lengths: number of rows of the whole array along each of these axes.
        step: step that computes the array; None for an array that existed from the start.
        array: the whole array, or None if only its step is known.
        piece: this rank's block of the array, if each rank has one.
    """

    __slots__ = ("array", "lengths", "piece", "step")

    def __init__(self, lengths: Sequence[int], step: Step | None = None, array: Any = None) -> None:
        self.lengths = tuple(lengths)
        self.step = step
        self.array = array
        self.piece: Any = None

    @property
    def is_there(self) -> bool:
        """Whether the whole array or a piece of it has been computed."""
        return self.array is not None or self.piece is not None


class Read(NamedTuple):
    """Rows that a step reads of its sources for a block of its result.

    Attributes:
        out: block of the result.
        rows: rows of the sources.
        padding: number of padding rows before and after these rows, for each axis.
    """

    out: Block
    rows: Block
    padding: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the model, which computes a value from other values.

    Attributes:
        name: name of the layer and the function, for messages.
        sources: values that the step reads, all of the same lengths.
        rules: rules, one for each axis of the result, by which its rows depend on the sources'
            rows; None: each row depends on the same row. Further axes of the sources are read
            whole.
        run: function that computes a block of the result: ``run(arrays, read)``. ``arrays`` are
            the sources' rows, followed by ``uses``.
        columns: function ``columns(channels)`` that returns a ``run`` for some channels of the
            result only, each of which reads all channels of the source; else None.
        rows: function ``rows(channels)`` that returns a ``run`` for the contribution of some
            channels of the source to the result; else None. A term that is added once (a bias) is
            in ``after``.
        after: function ``after(sum, uses)`` that completes the sum over all channels, if there is
            a term to add.
        along: function ``along(channels)`` that returns a ``run`` for some channels of the
            result, which read the same channels of the sources, or the same groups of channels;
            else None.
        groups: number of groups of channels that ``along`` keeps apart; 0: each channel.
        own: which of ``columns``, ``rows`` and ``along`` the step's weights are for, if this rank
            has only the weights of its own channels; else None.
        channels: number of channels of the result.
        uses: whole arrays that are combined with the sources' rows. A framework that computes a
            block again needs a list of them.
    """

    name: str
    sources: tuple[Value, ...]
    rules: tuple[Rule | None, ...]
    run: Run
    channels: int = 0
    columns: Callable[[range], Run] | None = None
    rows: Callable[[range], Run] | None = None
    after: Callable[[Any, Sequence[Any]], Any] | None = None
    along: Callable[[range], Run] | None = None
    groups: int = 0
    own: str | None = None
    uses: tuple[Any, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of rows of the result along each axis."""
        axes = zip(self.rules, self.sources[0].lengths)
        return tuple(n if rule is None else rule.length(n) for rule, n in axes)

    def read(self, out: Block) -> Read:
        """Return the rows that the step reads for ``out``."""
        rows, padding = [], []
        lengths = self.sources[0].lengths
        for rule, made, n in zip(self.rules, out, lengths):
            there, before, after = clip(rule.needs(made) if rule else made, n)
            rows.append(there)
            padding.append((before, after))
        if all(out):
            rows += [range(n) for n in lengths[len(out) :]]
        else:  # an empty block reads no rows of the further axes either
            rows += [range(0) for _ in lengths[len(out) :]]
        padding += [(0, 0)] * (len(rows) - len(padding))
        return Read(out, tuple(rows), tuple(padding))


#: ``run(arrays, read)``: computes a block of a result from its sources' rows.
Run = Callable[[Sequence[Any], Read], Any]


def lengths_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the number of rows of an array along its batch and its data axes."""
    return (*shape[:1], *shape[2:])


def blocks(lengths: Sequence[int], parts: Sequence[int]) -> list[Block]:
    """Cut an array into ``parts`` runs along each axis, including runs without rows."""
    return list(itertools.product(*(pieces(n, m) for n, m in zip(lengths, parts, strict=True))))


def hull(a: Block, b: Block) -> Block:
    """Return the smallest block that contains both; an empty block adds nothing."""
    if not all(a) or not all(b):
        return b if all(b) else a
    return tuple(range(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b))


def order(targets: Iterable[Value]) -> list[Value]:
    """Return the values to be computed for ``targets``, each after the values that it reads."""
    ordered: dict[Value, None] = {}
    stack = [(value, False) for value in targets]
    while stack:
        value, entered = stack.pop()
        if value in ordered or value.step is None or value.is_there:
            continue
        if entered:
            ordered[value] = None
            continue
        stack.append((value, True))
        stack.extend((source, False) for source in value.step.sources)
    return list(ordered)


def wanted(values: Sequence[Value], targets: Mapping[Value, Block]) -> dict[Value, Block]:
    """Return the block that each value has to provide so that ``targets`` can be computed.

    Args:
        values: values in the order in which they are computed, from :func:`order`.
        targets: required block of each target.

    Returns:
        Blocks for ``values`` and for the arrays that they read. Rows in the padding are in no
        block, and rows that several steps read are counted once.
    """
    block_of = dict(targets)
    for value in reversed(values):
        if value not in block_of or value.step is None:
            continue
        rows = value.step.read(block_of[value]).rows
        for source in value.step.sources:
            block_of[source] = hull(block_of[source], rows) if source in block_of else rows
    return block_of
