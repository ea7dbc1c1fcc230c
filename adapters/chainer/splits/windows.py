"""Steps of Chainer's pooling, resizing, padding and slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import chainer.functions as F
import numpy as np
from chainer.functions.array.resize_images import ResizeImages

from collective.training.splits.blocks import Read, Step
from collective.training.splits.recipes import (
    Context,
    check_windows,
    padded,
    resized,
    scaled,
    sliced,
)
from collective.training.splits.windows import Window

from .layers import applied

__all__ = ["avg_pool", "flatten", "getitem", "max_pool", "pad", "resize"]


def _windows(context: Context) -> tuple[list[Window], dict[str, Any]]:
    """Return the windows of a pooling, and settings without padding."""
    node = context.function
    if hasattr(node, "ksize"):
        kernel, strides, pads = node.ksize, node.stride, node.pad
        unpadded: dict[str, Any] = {"pad": (0,) * len(pads), "cover_all": False}
    else:
        kernel, strides, pads = (node.kh, node.kw), (node.sy, node.sx), (node.ph, node.pw)
        unpadded = {"ph": 0, "pw": 0, "cover_all": False}
    windows = []
    for n, k, s, p in zip(context.lengths, kernel, strides, pads):
        window = Window(k, s, p, p)
        windows.append(window.covering(n) if node.cover_all else window)
    check_windows(context, [None, *windows])
    return windows, unpadded


def max_pool(context: Context) -> Step | None:
    """Return the step of ``MaxPooling2D`` and ``MaxPoolingND``."""
    windows, unpadded = _windows(context)
    node = context.function
    if node.return_indices:
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return applied(
            node, (padded(context.arrays, arrays[0], read.padding, -math.inf),), **unpadded
        )

    return context.by_channel(windows, run)


def avg_pool(context: Context) -> Step | None:
    """Return the step of ``AveragePooling2D`` and ``AveragePoolingND``."""
    windows, unpadded = _windows(context)
    node = context.function
    if node.return_indices:
        return None
    # If pad_value is None, padding does not count. Otherwise it counts as zeros.
    counts_padding = getattr(node, "pad_value", 0) is not None
    settings = unpadded if not hasattr(node, "pad_value") else {**unpadded, "pad_value": 0}

    def count(axis: int, rows: range) -> float:
        there = min(rows.stop, context.lengths[axis]) - max(rows.start, 0)
        return windows[axis].kernel / there

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = applied(node, (padded(context.arrays, arrays[0], read.padding),), **settings)
        return y if counts_padding else scaled(context, y, windows, read, count)

    return context.by_channel(windows, run)


def resize(context: Context) -> Step | None:
    """Return the step of ``ResizeImages``, nearest and bilinear."""
    node = context.function
    if node.mode not in ("nearest", "bilinear"):
        return None
    ats = []
    for n, m in zip(context.lengths, (node.out_H, node.out_W)):
        # Chainer's own function, applied to the rows' numbers, gives the position for each row.
        ramp = np.arange(n, dtype=np.float64).reshape(1, 1, n, 1)
        (at,) = ResizeImages((m, 1), node.mode, node.align_corners).forward((ramp,))
        ats.append(at.reshape(m))
    return resized(context, ats, node.mode == "bilinear")


def pad(context: Context) -> Step | None:
    """Return the step of ``Pad`` with constants, on the data axes.

    Chainer itself computes other modes, because its gradient for them is not the derivative:
    mirrored rows contribute nothing to it. A split link computes the same as the whole link, also
    in this case.
    """
    node = context.function
    fill: Any = node.keywords.get("constant_values", 0)
    widths = np.broadcast_to(np.asarray(node.pad_width), (len(context.lengths) + 2, 2)).tolist()
    if node.mode != "constant" or np.ndim(fill) or any(map(any, widths[:2])):
        return None
    rules = [Window(1, 1, *ends) for ends in widths[2:]]

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return padded(context.arrays, arrays[0], read.padding, fill)

    return context.by_channel(rules, run)


def getitem(context: Context) -> Step | None:
    """Return the step of ``GetItem``: slices of the data axes, with whole batch and channels."""
    return sliced(context, context.function.slices)


def flatten(context: Context) -> Step | None:
    """Return the step of ``Reshape`` to one row for each sample."""
    n, *rest = context.sources[0].lengths
    width = context.channels * math.prod(rest)
    if tuple(context.function.shape) not in ((n, -1), (-1, width), (n, width)):
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return F.reshape(arrays[0], (len(read.out[0]), width))

    return context.step([None], run, width)
