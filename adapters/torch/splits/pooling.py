"""Pooling as steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from collective.training.splits.blocks import Read, Step, Value
from collective.training.splits.windows import Taken, Window

from .context import Context, padded, per_axis

__all__ = ["adaptive_pool", "avg_pool", "max_pool"]


def _windows(
    context: Context, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> list[Window]:
    axes = len(context.shape) - 2
    given = kernel, kernel if stride is None or stride == [] else stride, padding, dilation
    numbers = [per_axis(number, axes) for number in given]
    windows = []
    for n, m, k, s, p, d in zip(x.lengths[1:], context.shape[2:], *numbers):
        # With ceil_mode the last one may hang over the end.
        windows.append(Window(k, s, p, p, d).ending(n, m))
    return windows


def max_pool(
    context: Context, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Step | None:  # fmt: skip
    """Recipe of ``max_pool1d`` to ``max_pool3d``, without the indices."""
    if return_indices:
        return None
    windows = _windows(context, x, kernel_size, stride, padding, dilation)
    function = context.function
    kernels, strides, dilations = zip(*((w.kernel, w.stride, w.dilation) for w in windows))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        lowest = -math.inf if arrays[0].is_floating_point() else torch.iinfo(arrays[0].dtype).min
        array = padded(arrays[0], read.padding, lowest)
        return function(array, kernels, strides, 0, dilations)

    return context.by_channel(windows, run)


def avg_pool(
    context: Context, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Step | None:  # fmt: skip
    """Recipe of ``avg_pool1d`` to ``avg_pool3d``."""
    windows = _windows(context, x, kernel_size, stride, padding)
    function = context.function
    kernels, strides = zip(*((w.kernel, w.stride) for w in windows))
    ends = per_axis(padding, len(windows))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        array = padded(arrays[0], read.padding)
        y = function(array, kernels, strides) * math.prod(kernels)
        if divisor_override is not None:
            return y / divisor_override
        for axis, (window, n, end, out) in enumerate(
            zip(windows, x.lengths[1:], ends, read.out[1:])
        ):
            first, last = (-end, n + end) if count_include_pad else (0, n)
            counts = [_within(window.needs(range(i, i + 1)), first, last) for i in out]
            shape = [len(counts) if each == axis + 2 else 1 for each in range(y.dim())]
            y = y / torch.tensor(counts, dtype=y.dtype, device=y.device).reshape(shape)
        return y

    return context.by_channel(windows, run)


def _within(rows: range, first: int, last: int) -> int:
    return min(rows.stop, last) - max(rows.start, first)


def adaptive_pool(context: Context, x: Value, output_size: Any) -> Step | None:
    """Recipe of ``adaptive_avg_pool1d`` to ``adaptive_avg_pool3d``."""
    rules = []
    for n, m in zip(x.lengths[1:], context.shape[2:]):
        # Row i is the mean of the rows from floor(i n / m) to ceil((i + 1) n / m).
        ends = [(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        rules.append(Taken([range(*each) for each in ends].__getitem__, m))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = arrays[0]
        for at, (rule, rows, out) in enumerate(zip(rules, read.rows[1:], read.out[1:]), start=2):
            means = []
            for i in out:
                taken = rule.rows(i)
                piece = y.narrow(at, taken[0] - rows.start, len(taken))
                means.append(piece.mean(at, keepdim=True))
            y = torch.cat(means, at)
        return y

    return context.by_channel(rules, run)
