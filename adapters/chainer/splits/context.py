"""What the recipes of Chainer's functions have in common.

A recipe gets the function node that was to be applied, with its settings in it, and returns a
:class:`~collective.training.splits.blocks.Step`, or None where no rule says what the function
reads. A copy of the node is applied to each piece. Padding is put here, explicitly and only where
a piece lies at an end of the axis; the copy is then applied without.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import chainer
import chainer.functions as F

from collective.training.splits.blocks import Read, Run, Step, Value
from collective.training.splits.serial import dimension
from collective.training.splits.windows import Rule

__all__ = ["Context", "applied", "guarded", "nothing", "padded", "tied"]


@dataclass(frozen=True)
class Context:
    """One function that is to become a step.

    Attributes:
        node: of a function, not applied yet.
        name: of the link and the function.
        x: the value that it reads.
        shape, dtype: of that.
        rest: its other inputs.
        shared: from an input to the one whose gradient is that of all pieces.
        shared_in_part: the same where a piece has some channels and uses theirs of the input.
        own: how this rank's weights are cut, if these are the ``rest``; None if they are whole.
        weight_shape: of the whole weight of a layer.
    """

    node: Any
    name: str
    x: Value
    shape: tuple[int, ...]
    dtype: Any
    rest: tuple[Any, ...]
    shared: Callable[[Any], Any]
    shared_in_part: Callable[[Any], Any]
    own: str | None = None
    weight_shape: tuple[int, ...] = ()

    def step(
        self, shape: Sequence[int], rules: Sequence[Rule | None], run: Run, **options: Any
    ) -> tuple[Step, tuple[int, ...]]:
        """Make the step, and say what shape its result has."""
        made = Step(self.name, (self.x,), tuple(rules), run, shape[1], **options)
        return made, tuple(shape)

    def by_channel(self, rules: Sequence[Rule], run: Run) -> tuple[Step, tuple[int, ...]]:
        """Make the step of a function that works on each channel by itself, in the data axes."""
        rows = (rule.length(n) for rule, n in zip(rules, self.shape[2:]))
        run = guarded(run)
        shape = (*self.shape[:2], *rows)
        return self.step(shape, [None, *rules], run, along=lambda channels: run)


def applied(node: Any, inputs: Sequence[Any], **settings: Any) -> Any:
    """Apply a copy of a function node, with some settings changed."""
    fresh = copy.copy(node)
    for name, value in settings.items():
        setattr(fresh, name, value)
    return fresh.apply(tuple(inputs))[0]


def padded(x: Any, padding: Sequence[tuple[int, int]], fill: float = 0.0) -> Any:
    """Pad the axes of the batch and the data; a piece may be nothing but padding."""
    if not any(before or after for before, after in padding):
        return x
    if x.size:
        widths = [padding[0], (0, 0), *padding[1:]]
        return F.pad(x, widths, "constant", constant_values=fill)
    shape = list(x.shape)
    for axis, pair in enumerate(padding):
        shape[dimension(axis)] += sum(pair)
    return tied(x.xp.full(shape, fill, x.dtype), x)


def tied(result: Any, *variables: Any) -> Any:
    """Return ``result`` with ``variables`` in its graph, where nothing was computed of them.

    Other ranks compute something of theirs, and every rank has to take part in the backward
    collectives that come of it.
    """
    result = chainer.as_variable(result)
    for x in variables:
        if x is not None:
            # A sum of nothing: the zero that it is does not depend on what x holds.
            nothing_of_it = F.sum(F.reshape(x, (-1,))[:0])
            result = result + F.broadcast_to(F.cast(nothing_of_it, result.dtype), result.shape)
    return result


def nothing(arrays: Sequence[Any], read: Read, channels: int) -> Any:
    """Return a block of zeros, which may be one without a row."""
    rows = [len(rows) for rows in read.out]
    first = arrays[0]
    zeros = first.xp.zeros((rows[0], channels, *rows[1:]), first.dtype)
    return tied(zeros, *arrays)


def guarded(run: Run, channels: int | None = None, used: slice = slice(None)) -> Run:
    """Let a function that refuses empty arrays not see them.

    Args:
        run: the function.
        channels: of its result; None: as many as its input's.
        used: which arrays it takes beside its input. Ranks that have rows call for the gradients
            of these alone.
    """

    def run_guarded(arrays: Sequence[Any], read: Read) -> Any:
        if all(read.out):
            return run(arrays, read)
        x, *others = arrays
        known = x.shape[1] if channels is None else channels
        return nothing([x, *others[used]], read, known)

    return run_guarded
