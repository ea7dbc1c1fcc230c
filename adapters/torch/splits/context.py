"""What the recipes of PyTorch's functions have in common.

A recipe has the signature of the function that it stands for, after :class:`Context`, and returns
a :class:`~collective.training.splits.blocks.Step`, or None where this call reads its input in a way
that no rule says. Padding is put here, explicitly and only where a piece lies at an end of the
axis; the function itself is then called without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from collective.training.splits.blocks import Read, Run, Step, Value
from collective.training.splits.serial import dimension
from collective.training.splits.windows import Rule

__all__ = ["Context", "Recipe", "guarded", "nothing", "padded", "per_axis", "tied"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Context:
    """One call that is to become a step.

    Attributes:
        function: the function, without gradients of its own.
        name: of the layer and the function.
        shape: of the result.
        sources: the values among the arguments.
        shared: from a tensor that is no source to the one whose gradient is that of all pieces.
        shared_in_part: the same where a piece has some channels and uses theirs of the tensor.
        own: from a layer's weight and bias to how this rank's are cut; None if they are whole.
        whole: from a parameter of which this rank has a piece, or any other, to all of it.
    """

    function: Callable[..., Any]
    name: str
    shape: tuple[int, ...]
    sources: tuple[Value, ...]
    shared: Callable[[Any], Any]
    shared_in_part: Callable[[Any], Any]
    own: Callable[[Any, Any], str | None]
    whole: Callable[[Any], Any]

    def step(self, rules: Sequence[Rule | None], run: Run, **options: Any) -> Step:
        """Make the step."""
        channels = self.shape[1] if len(self.shape) > 1 else 0
        return Step(self.name, self.sources, tuple(rules), run, channels, **options)

    def by_channel(self, rules: Sequence[Rule], run: Run) -> Step:
        """Make the step of a function that works on each channel by itself, in the data axes."""
        run = guarded(run)
        return self.step([None, *rules], run, along=lambda channels: run)


Recipe = Callable[..., "Step | None"]


def per_axis(value: Any, axes: int) -> tuple[int, ...]:
    """Return a number for each data axis, given as one for all or as a sequence."""
    if isinstance(value, int):
        return (value,) * axes
    found = tuple(int(each) for each in value)
    return found * axes if len(found) == 1 else found


def padded(array: Tensor, padding: Sequence[tuple[int, int]], fill: float = 0.0) -> Tensor:
    """Pad the axes of the batch and the data; a piece may be nothing but padding."""
    if not any(before or after for before, after in padding):
        return array
    if array.numel():
        flat = [count for pair in reversed(padding[1:]) for count in pair]
        return functional.pad(array, flat, value=fill)
    shape = list(array.shape)
    for axis, pair in enumerate(padding):
        shape[dimension(axis)] += sum(pair)
    return tied(array.new_full(shape, fill), array)


def tied(result: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return ``result`` with ``tensors`` in its graph, where nothing was computed of them.

    Other ranks compute something of theirs, and every rank has to take part in the backward
    collectives that come of it.
    """
    for tensor in tensors:
        if tensor is not None:
            result = result + tensor.reshape(-1)[:0].sum()
    return result


def nothing(arrays: Sequence[Tensor], read: Read, channels: int, *used: Tensor | None) -> Tensor:
    """Return a block of zeros, which may be one without a row."""
    rows = [len(rows) for rows in read.out]
    return tied(arrays[0].new_zeros((rows[0], channels, *rows[1:])), *arrays, *used)


def guarded(run: Run, channels: int | None = None, *used: Tensor | None) -> Run:
    """Let a function that refuses empty arrays not see them.

    Args:
        run: the function.
        channels: of its result; None: as many as its input's.
        used: what else it uses.
    """

    def run_guarded(arrays: Sequence[Any], read: Read) -> Any:
        if all(read.out):
            return run(arrays, read)
        known = arrays[0].shape[1] if channels is None else channels
        return nothing(arrays, read, known, *used)

    return run_guarded
