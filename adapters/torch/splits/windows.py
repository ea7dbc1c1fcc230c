"""Steps of pooling, resizing, padding and slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from collective.training.splits.blocks import Read, Step, Value
from collective.training.splits.recipes import Context, padded, resized, scaled, sliced, taken
from collective.training.splits.windows import Taken, Window

__all__ = [
    "adaptive_pool", "avg_pool", "getitem", "interpolate", "max_pool", "pad", "per_axis",
]  # fmt: skip


def per_axis(value: Any, axes: int) -> tuple[int, ...]:
    """Return a number for each data axis, from a number for all axes or from a sequence."""
    if isinstance(value, int):
        return (value,) * axes
    numbers = tuple(int(number) for number in value)
    return numbers * axes if len(numbers) == 1 else numbers


def _windows(
    context: Context, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> list[Window]:
    settings = kernel, kernel if stride is None or stride == [] else stride, padding, dilation
    numbers = [per_axis(setting, len(context.lengths)) for setting in settings]
    windows = []
    for n, m, k, s, p, d in zip(context.lengths, context.shape[2:], *numbers):
        # With ceil_mode the last window may extend beyond the end.
        windows.append(Window(k, s, p, p, d).ending(n, m))
    return windows


def max_pool(
    context: Context, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Step | None:  # fmt: skip
    """Return the step of ``max_pool1d`` to ``max_pool3d``, without the indices."""
    if return_indices:
        return None
    windows = _windows(context, kernel_size, stride, padding, dilation)
    kernels, strides, dilations = zip(*((w.kernel, w.stride, w.dilation) for w in windows))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        lowest = -math.inf if arrays[0].is_floating_point() else torch.iinfo(arrays[0].dtype).min
        array = padded(context.arrays, arrays[0], read.padding, lowest)
        return context.function(array, kernels, strides, 0, dilations)

    return context.by_channel(windows, run)


def avg_pool(
    context: Context, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Step | None:  # fmt: skip
    """Return the step of ``avg_pool1d`` to ``avg_pool3d``."""
    windows = _windows(context, kernel_size, stride, padding)
    kernels, strides = zip(*((w.kernel, w.stride) for w in windows))
    ends = per_axis(padding if count_include_pad else 0, len(windows))

    def count(axis: int, rows: range) -> float:
        n, end = context.lengths[axis], ends[axis]
        counted = min(rows.stop, n + end) - max(rows.start, -end)
        return windows[axis].kernel / counted

    def run(arrays: Sequence[Any], read: Read) -> Any:
        array = padded(context.arrays, arrays[0], read.padding)
        y = context.function(array, kernels, strides)
        if divisor_override is not None:
            return y * math.prod(kernels) / divisor_override
        return scaled(context, y, windows, read, count)

    return context.by_channel(windows, run)


def adaptive_pool(context: Context, x: Value, output_size: Any) -> Step | None:
    """Return the step of ``adaptive_avg_pool1d`` to ``adaptive_avg_pool3d``."""
    rules = []
    for n, m in zip(context.lengths, context.shape[2:]):
        # Row i is the mean of the rows from floor(i n / m) to ceil((i + 1) n / m).
        ends = [(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
        rules.append(Taken([range(*pair) for pair in ends].__getitem__, m))

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


def interpolate(
    context: Context, x: Value, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Step | None:  # fmt: skip
    """Return the step of ``interpolate``, nearest or linear, for any number of axes."""
    linear = mode in ("linear", "bilinear", "trilinear")
    if antialias or not (linear or mode in ("nearest", "nearest-exact")):
        return None
    axes = len(context.lengths)
    scales = [None] * axes if scale_factor is None else list(
        scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * axes)  # fmt: skip
    ats = []
    for n, m, scale in zip(context.lengths, context.shape[2:], scales):
        # PyTorch itself computes where each row comes from: it interpolates the rows' numbers.
        how = {"size": m} if scale is None else {"scale_factor": scale}
        at = functional.interpolate(
            _ramp(n), **how, mode="linear" if linear else mode, align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
        )  # fmt: skip
        ats.append(at.reshape(m).numpy())
    return resized(context, ats, linear)


def _ramp(n: int) -> torch.Tensor:
    """Return the numbers of the rows of an axis, as a tensor."""
    return torch.arange(n, dtype=torch.float64, device="cpu").reshape(1, 1, n)


def pad(
    context: Context,
    x: Value,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Step | None:
    """Return the step of ``pad`` in all its modes, along data axes."""
    axes = len(context.lengths)
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    if any(any(pair) for pair in pairs[axes:]):
        return None
    ends = [*reversed(pairs[:axes])]
    ends = [(0, 0)] * (axes - len(ends)) + ends
    if mode == "constant":
        windows = [Window(1, 1, *pair) for pair in ends]

        def run(arrays: Sequence[Any], read: Read) -> Any:
            return padded(context.arrays, arrays[0], read.padding, value or 0.0)

        return context.by_channel(windows, run)
    maps = [functional.pad(_ramp(n), pair, mode=mode) for n, pair in zip(context.lengths, ends)]
    return taken(context, [rows.reshape(-1).long().numpy() for rows in maps])


def getitem(context: Context, x: Value, index: Any) -> Step | None:
    """Return the step of a slice of data axes that keeps the whole batch and all channels."""
    return sliced(context, index if isinstance(index, tuple) else (index,))
