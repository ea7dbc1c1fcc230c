"""Steps of convolutions, their transposes and linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collective.training.splits.blocks import Read, Run, Step, Value
from collective.training.splits.recipes import Context, guarded, nothing
from collective.training.splits.weighted import biased, convolved, layer, written
from collective.training.splits.windows import Taken, Transposed, Window

from .windows import per_axis

__all__ = ["convolution", "linear", "transposed"]

Tensor = torch.Tensor


def convolution(
    context: Context, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Step | None:  # fmt: skip
    """Return the step of ``conv1d`` to ``conv3d``."""
    axes = weight.dim() - 2
    strides, dilations = per_axis(stride, axes), per_axis(dilation, axes)
    kernel = weight.shape[2:]
    if padding == "same":
        missing = [d * (k - 1) for k, d in zip(kernel, dilations)]
        ends = [(rows // 2, rows - rows // 2) for rows in missing]
    else:
        ends = [(p, p) for p in per_axis(0 if padding == "valid" else padding, axes)]
    rules = [
        Window(k, s, before, after, d)
        for k, s, (before, after), d in zip(kernel, strides, ends, dilations)
    ]

    def function(x: Tensor, read: Read, groups: int, w: Tensor, b: Tensor | None = None) -> Any:
        def call(x: Tensor, ends: tuple[int, ...]) -> Any:
            return context.function(x, w, b, strides, ends, dilations, groups)

        return convolved(context.arrays, x, rules, read, call)

    return layer(context, [None, *rules], function, weight, bias, groups, 0)


def transposed(
    context: Context, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Step | None:  # fmt: skip
    """Return the step of ``conv_transpose1d`` to ``conv_transpose3d``."""
    axes = weight.dim() - 2
    numbers = (per_axis(value, axes) for value in (stride, padding, dilation, output_padding))
    rules = [
        Transposed(k, s, p, p, d, extra) for k, s, p, d, extra in zip(weight.shape[2:], *numbers)
    ]
    strides, dilations = per_axis(stride, axes), per_axis(dilation, axes)

    def function(x: Tensor, read: Read, groups: int, w: Tensor, *bias: Tensor) -> Any:
        if all(read.rows):
            y = context.function(x, w, None, strides, 0, 0, groups, dilations)
            y = written(context.arrays, y, rules, read)
        else:  # no input row writes to these output rows: they are gaps, or behind the last row
            y = nothing(context.arrays, [x, w], read, w.shape[1] * groups)
        return biased(y, *bias)

    return layer(context, [None, *rules], function, weight, bias, groups, 1)


def linear(context: Context, x: Value, weight: Tensor, bias: Tensor | None = None) -> Step | None:
    """Return the step of ``linear``, for the channels or along the last data axis."""
    if not context.lengths:

        def function(x: Tensor, read: Read, groups: int, *parameters: Tensor) -> Any:
            return context.function(x, *parameters)

        return layer(context, [None], function, weight, bias, 1, 0)
    # Along the last data axis, every row of the result reads every row of the input.
    everything = range(context.lengths[len(context.lengths) - 1])
    arguments = [context.executor.parameter(p) for p in (weight, bias) if p is not None]

    def run_of(channels: int, used: slice) -> Run:
        def run(inputs: Sequence[Any], read: Read) -> Any:
            x, *parameters = inputs
            *_, out = read.out
            rows = (context.arrays.slice(parameter, 0, out) for parameter in parameters[used])
            return context.function(x, *rows)

        return guarded(context.arrays, run, channels, used)

    def along(channels: range) -> Run:
        # All channels use all weights, so the weights' gradients are also sums over the channels of
        # all ranks.
        return run_of(len(channels), slice(len(arguments), None))

    rules = [None] * len(context.lengths) + [Taken(lambda i: everything, arguments[0].shape[0])]
    run = run_of(context.channels, slice(len(arguments)))
    return context.step(rules, run, along=along, uses=context.uses(arguments))
