"""What a graph of layers needs for a block of its result.

Each call of a model is a :class:`Step`, with the rule by which its rows depend on its sources'.
To compute a block of the result, walk the steps backwards: a value has to give the
hull of what its readers need of it. Then walk forwards and compute each value for that block and
no more. Padding is nobody's rows: a step puts it where a window reaches over an end of the axis.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .windows import Rule, clip, pieces

__all__ = [
    "Block", "Read", "Run", "Step", "Value", "blocks", "hull", "lengths_of", "order", "wanted",
]  # fmt: skip

#: The rows of an array along each axis that may be cut: the batch, and the data axes.
Block = tuple[range, ...]


class Value:
    """An array of a forward pass that is cut along its batch or its data axes.

    Attributes:
        lengths: the whole array's rows along each of these axes.
        step: what computes it; None for one that was there from the start.
        array: all of it, or None where only the recipe is known.
        piece: this rank's block of it, where ranks have one each.
    """

    __slots__ = ("array", "lengths", "piece", "step")

    def __init__(self, lengths: Sequence[int], step: Step | None = None, array: Any = None) -> None:
        self.lengths = tuple(lengths)
        self.step = step
        self.array = array
        self.piece: Any = None

    @property
    def is_there(self) -> bool:
        """Whether it has been computed, all of it or a piece."""
        return self.array is not None or self.piece is not None


class Read(NamedTuple):
    """What a step reads of its sources for a block of its result.

    Attributes:
        out: the block of the result.
        rows: the rows of the sources.
        padding: how many rows of padding come before and after them, an axis each.
    """

    out: Block
    rows: Block
    padding: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Step:
    """One call of the model, which makes a value of others.

    Attributes:
        name: of the layer and the function, for people.
        sources: the values that it reads, all of the same lengths.
        rules: for each axis of the result, how its rows depend on the sources'; None: row for row.
            What axes the sources have behind these are read whole.
        run: computes a block of the result: ``run(arrays, read)`` of the sources' rows, and behind
            them ``uses``.
        columns: ``columns(channels)`` is a ``run`` for some channels of the result alone, where
            each of them reads all channels of the source; else None.
        rows: ``rows(channels)`` is a ``run`` for what some channels of the source add to the
            result; what is added once (a bias) is in ``after``. Else None.
        after: ``after(sum, uses)`` completes the sum over all channels, where there is something
            to add.
        along: ``along(channels)`` is a ``run`` for some channels of the result, which read the
            same channels of the sources, or the same groups of them; else None.
        groups: how many groups of channels ``along`` keeps apart; 0: each channel.
        own: which of ``columns``, ``rows`` and ``along`` the step's weights are for, where this
            rank has those of its own channels alone; else None.
        channels: how many the result has.
        uses: whole arrays that are combined with the sources' rows, where a framework has to be
            told which they are to compute a block again.
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
        """The result's rows along each axis."""
        axes = zip(self.rules, self.sources[0].lengths)
        return tuple(n if rule is None else rule.length(n) for rule, n in axes)

    def read(self, out: Block) -> Read:
        """Return what is read for ``out``."""
        rows, padding = [], []
        lengths = self.sources[0].lengths
        for rule, made, n in zip(self.rules, out, lengths):
            there, before, after = clip(rule.needs(made) if rule else made, n)
            rows.append(there)
            padding.append((before, after))
        if all(out):
            rows += [range(n) for n in lengths[len(out) :]]
        else:  # of nothing nothing is read
            rows += [range(0) for _ in lengths[len(out) :]]
        padding += [(0, 0)] * (len(rows) - len(padding))
        return Read(out, tuple(rows), tuple(padding))


#: ``run(arrays, read)``: a block of a result from its sources' rows.
Run = Callable[[Sequence[Any], Read], Any]


def lengths_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of an array along its batch and its data axes."""
    return (*shape[:1], *shape[2:])


def blocks(lengths: Sequence[int], parts: Sequence[int]) -> list[Block]:
    """Cut an array into ``parts`` runs along each data axis, those of no rows included."""
    return list(itertools.product(*(pieces(n, m) for n, m in zip(lengths, parts, strict=True))))


def hull(a: Block, b: Block) -> Block:
    """Return the smallest block that holds both; one without rows adds nothing."""
    if not all(a) or not all(b):
        return b if all(b) else a
    return tuple(range(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b))


def order(targets: Iterable[Value]) -> list[Value]:
    """Return the values to be computed for ``targets``, each after those it is computed from."""
    found: dict[Value, None] = {}
    stack = [(value, False) for value in targets]
    while stack:
        value, entered = stack.pop()
        if value in found or value.step is None or value.is_there:
            continue
        if entered:
            found[value] = None
            continue
        stack.append((value, True))
        stack.extend((source, False) for source in value.step.sources)
    return list(found)


def wanted(values: Sequence[Value], targets: Mapping[Value, Block]) -> dict[Value, Block]:
    """Return the block that each value has to give for blocks of some of them.

    Args:
        values: in the order in which they are computed, from :func:`order`.
        targets: the blocks asked for.

    Returns:
        Blocks for ``values`` and for the arrays that they read: what lies in the padding is asked
        of nobody, and what several steps read is asked for once.
    """
    found = dict(targets)
    for value in reversed(values):
        if value not in found or value.step is None:
            continue
        rows = value.step.read(found[value]).rows
        for source in value.step.sources:
            found[source] = hull(found[source], rows) if source in found else rows
    return found
