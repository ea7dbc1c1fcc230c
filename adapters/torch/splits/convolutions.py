"""Convolutions, their transposes and linear layers as steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from collective.training.splits.blocks import Read, Run, Step, Value
from collective.training.splits.filters import ALONG, ROWS
from collective.training.splits.windows import Rule, Taken, Transposed, Window

from .context import Context, guarded, nothing, padded, per_axis, tied

__all__ = ["convolution", "linear", "transposed"]

Tensor = torch.Tensor


def convolution(
    context: Context, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Step | None:  # fmt: skip
    """Recipe of ``conv1d`` to ``conv3d``."""
    axes = weight.dim() - 2
    strides, dilations = per_axis(stride, axes), per_axis(dilation, axes)
    kernel = weight.shape[2:]
    if padding == "same":
        missing = [d * (k - 1) for k, d in zip(kernel, dilations)]
        ends = [(each // 2, each - each // 2) for each in missing]
    else:
        ends = [(p, p) for p in per_axis(0 if padding == "valid" else padding, axes)]
    rules = [
        Window(k, s, before, after, d)
        for k, s, (before, after), d in zip(kernel, strides, ends, dilations)
    ]
    function = context.function

    def some(w: Tensor, b: Tensor | None, groups: int) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            array = padded(arrays[0], read.padding)
            return function(array, w, b, strides, 0, dilations, groups)

        return guarded(run, w.shape[0], w, b)

    return _layer(context, [None, *rules], some, weight, bias, groups, 0)


def transposed(
    context: Context, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Step | None:  # fmt: skip
    """Recipe of ``conv_transpose1d`` to ``conv_transpose3d``."""
    axes = weight.dim() - 2
    numbers = (per_axis(each, axes) for each in (stride, padding, dilation, output_padding))
    rules = [
        Transposed(k, s, p, p, d, extra) for k, s, p, d, extra in zip(weight.shape[2:], *numbers)
    ]
    strides, dilations = per_axis(stride, axes), per_axis(dilation, axes)
    function = context.function

    def some(w: Tensor, b: Tensor | None, groups: int) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            (array,) = arrays
            if all(read.rows):
                y = function(array, w, None, strides, 0, 0, groups, dilations)
                for axis, rule in enumerate(rules, start=1):
                    # y begins where the first row of the piece writes its first row.
                    first = read.rows[axis].start * rule.stride - rule.before
                    written = range(first, first + y.shape[axis + 1])
                    y = _rows(y, axis + 1, written, read.out[axis])
            else:  # holes between and behind what the rows write
                y = nothing(arrays, read, w.shape[1] * groups, w)
            return y if b is None else y + b.reshape(-1, *(1 for _ in rules))

        return guarded(run, w.shape[1] * groups, w, b)

    return _layer(context, [None, *rules], some, weight, bias, groups, 1)


def _rows(array: Tensor, at: int, have: range, want: range) -> Tensor:
    """Cut ``want`` out of the rows ``have``, with zeros where there are none."""
    start, stop = max(have.start, want.start), min(have.stop, want.stop)
    if stop <= start:
        shape = list(array.shape)
        shape[at] = len(want)
        return tied(array.new_zeros(shape), array)
    array = array.narrow(at, start - have.start, stop - start)
    ends = (start - want.start, want.stop - stop)
    if not any(ends):
        return array
    return functional.pad(array, [*(0, 0) * (array.dim() - 1 - at), *ends])


def _layer(
    context: Context,
    rules: Sequence[Rule | None],
    some: Callable[[Tensor, Tensor | None, int], Run],
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    outputs: int,
) -> Step:
    """Make the step of a layer with weights, and what it is for some of its channels.

    Where this rank has its own filters alone the step can be computed for these and no others.

    Args:
        some: makes the function for some weights, bias and groups.
        groups: as in a convolution; 1 group reads all channels.
        outputs: the weights' dimension of output channels; the other one is that of inputs.
    """
    own = context.own(weight, bias)
    if own is None:
        weight, bias = context.whole(weight), context.whole(bias)
    w, b = context.shared(weight), context.shared(bias)

    def after(array: Any, uses: Sequence[Any]) -> Any:
        assert b is not None
        return array + b.reshape(-1, *(1 for _ in range(array.dim() - 2)))

    if own is not None:
        mine = some(w, None if own == ROWS else b, w.shape[0] if own == ALONG else 1)
        add = after if own == ROWS and b is not None else None
        return context.step(rules, mine, own=own, after=add, **{own: lambda channels: mine})
    part, part_b = context.shared_in_part(weight), context.shared_in_part(bias)
    whole = some(w, b, groups)
    if groups == 1:

        def columns(channels: range) -> Run:
            mine = None if part_b is None else part_b[channels.start : channels.stop]
            return some(part.narrow(outputs, channels.start, len(channels)), mine, 1)

        def rows(channels: range) -> Run:
            return some(part.narrow(1 - outputs, channels.start, len(channels)), None, 1)

        return context.step(
            rules, whole, columns=columns, rows=rows, after=None if b is None else after
        )
    inputs = weight.shape[0] if outputs == 1 else weight.shape[1] * groups
    if groups != inputs or context.shape[1] != inputs:
        return context.step(rules, whole)

    def along(channels: range) -> Run:
        mine = slice(channels.start, channels.stop)
        return some(part[mine], None if part_b is None else part_b[mine], len(channels))

    return context.step(rules, whole, along=along)


def linear(context: Context, x: Value, weight: Tensor, bias: Tensor | None = None) -> Step | None:
    """Recipe of ``linear``, of channels or along the last data axis."""
    function, shape = context.function, context.shape
    if len(shape) == 2:

        def some(w: Tensor, b: Tensor | None, groups: int) -> Run:
            return lambda arrays, read: function(arrays[0], w, b)

        return _layer(context, [None], some, weight, bias, 1, 0)
    # Along the last data axis every row of the result reads every row of the input.
    n = x.lengths[len(x.lengths) - 1]
    everything = range(n)
    weight, bias = context.whole(weight), context.whole(bias)

    def run_of(w: Tensor, b: Tensor | None, channels: int) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            *_, made = read.out
            rows = slice(made.start, made.stop)
            return function(arrays[0], w[rows], None if b is None else b[rows])

        return guarded(run, channels, w, b)

    def along(channels: range) -> Run:
        # Each rank's channels meet all weights: their gradients are sums over the channels, too.
        part, part_b = context.shared_in_part(weight), context.shared_in_part(bias)
        return run_of(part, part_b, len(channels))

    run = run_of(context.shared(weight), context.shared(bias), shape[1])
    rules = [None] * (len(shape) - 2) + [Taken(lambda i: everything, shape[len(shape) - 1])]
    return context.step(rules, run, along=along)
