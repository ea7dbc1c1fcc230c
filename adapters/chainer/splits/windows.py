"""Chainer's pooling, resizing, padding and slices as steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import chainer.functions as F
import numpy as np
from chainer.functions.array.resize_images import ResizeImages

from collective.training.splits.blocks import Read, Step
from collective.training.splits.windows import Taken, Window, data_slices

from .context import Context, applied, padded

__all__ = ["avg_pool", "flatten", "getitem", "max_pool", "pad", "resize"]

Made = tuple[Step, tuple[int, ...]]


def _windows(context: Context) -> tuple[list[Window], dict[str, Any]]:
    """Return the windows of a pooling, and the settings that pad nothing."""
    node = context.node
    if hasattr(node, "ksize"):
        kernel, strides, pads = node.ksize, node.stride, node.pad
        unpadded: dict[str, Any] = {"pad": (0,) * len(pads), "cover_all": False}
    else:
        kernel, strides, pads = (node.kh, node.kw), (node.sy, node.sx), (node.ph, node.pw)
        unpadded = {"ph": 0, "pw": 0, "cover_all": False}
    windows = []
    for n, k, s, p in zip(context.shape[2:], kernel, strides, pads):
        window = Window(k, s, p, p)
        windows.append(window.covering(n) if node.cover_all else window)
    return windows, unpadded


def max_pool(context: Context) -> Made | None:
    """Recipe of ``MaxPooling2D`` and ``MaxPoolingND``."""
    windows, unpadded = _windows(context)
    node = context.node
    if node.return_indices:
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return applied(node, (padded(arrays[0], read.padding, -math.inf),), **unpadded)

    return context.by_channel(windows, run)


def avg_pool(context: Context) -> Made | None:
    """Recipe of ``AveragePooling2D`` and ``AveragePoolingND``."""
    windows, unpadded = _windows(context)
    node = context.node
    if node.return_indices:
        return None
    # None: padding does not count. Otherwise it counts as zeros.
    counts_padding = getattr(node, "pad_value", 0) is not None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        settings = unpadded if not hasattr(node, "pad_value") else {**unpadded, "pad_value": 0}
        y = applied(node, (padded(arrays[0], read.padding),), **settings)
        if counts_padding:
            return y
        for axis, (window, n, out) in enumerate(
            zip(windows, context.shape[2:], read.out[1:]), start=2
        ):
            needs = [window.needs(range(i, i + 1)) for i in out]
            shares = [window.kernel / (min(r.stop, n) - max(r.start, 0)) for r in needs]
            shape = [len(out) if each == axis else 1 for each in range(y.ndim)]
            factor = y.xp.asarray(shares, y.dtype).reshape(shape)
            y = y * y.xp.broadcast_to(factor, y.shape)
        return y

    return context.by_channel(windows, run)


def resize(context: Context) -> Made | None:
    """Recipe of ``ResizeImages``, nearest and bilinear."""
    node = context.node
    if node.mode not in ("nearest", "bilinear"):
        return None
    linear = node.mode == "bilinear"
    rules, coordinates = [], []
    for n, m in zip(context.shape[2:], (node.out_H, node.out_W)):
        # Chainer itself says where each row comes from: of the rows' own numbers it makes them.
        ramp = np.arange(n, dtype=np.float64).reshape(1, 1, n, 1)
        own = ResizeImages((m, 1), node.mode, node.align_corners)
        (at,) = own.forward((ramp,))
        at = at.reshape(m)
        low = np.clip(np.floor(at), 0, n - 1).astype(int)
        high = np.minimum(low + 1, n - 1)
        found = [low.tolist(), high.tolist()] if linear else [low.tolist()]
        rules.append(Taken.of(*found))
        coordinates.append((low, high, at - low))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = arrays[0]
        for axis, ((low, high, share), rows, out) in enumerate(
            zip(coordinates, read.rows[1:], read.out[1:]), start=2
        ):
            cut = slice(out.start, out.stop)
            taken = _take(y, axis, low[cut] - rows.start)
            if linear:
                following = _take(y, axis, high[cut] - rows.start)
                shape = [-1 if each == axis else 1 for each in range(y.ndim)]
                weight = y.xp.asarray(share[cut], y.dtype).reshape(shape)
                weight = y.xp.broadcast_to(weight, taken.shape)
                taken = taken * (1 - weight) + following * weight
            y = taken
        return y

    return context.by_channel(rules, run)


def _take(x: Any, axis: int, rows: Any) -> Any:
    return F.get_item(x, (*(slice(None),) * axis, x.xp.asarray(rows)))


def pad(context: Context) -> Made | None:
    """Recipe of ``Pad`` by constants, of the data axes.

    The other modes are left to Chainer, whose gradient for them is not the derivative: rows that
    are mirrored give nothing back. A link computes the same split or whole, this included.
    """
    node = context.node
    fill: Any = node.keywords.get("constant_values", 0)
    widths = np.broadcast_to(np.asarray(node.pad_width), (len(context.shape), 2)).tolist()
    if node.mode != "constant" or np.ndim(fill) or any(map(any, widths[:2])):
        return None
    rules = [Window(1, 1, *ends) for ends in widths[2:]]

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return padded(arrays[0], read.padding, fill)

    return context.by_channel(rules, run)


def getitem(context: Context) -> Made | None:
    """Recipe of ``GetItem``: slices of the data axes, with the batch and the channels whole."""
    slices = data_slices(context.node.slices, len(context.shape))
    if slices is None:
        return None
    maps = [np.arange(n)[each] for n, each in zip(context.shape[2:], slices)]
    rules = [Taken.of(numbers.tolist()) for numbers in maps]

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = arrays[0]
        for axis, (numbers, rows, out) in enumerate(
            zip(maps, read.rows[1:], read.out[1:]), start=2
        ):
            y = _take(y, axis, numbers[out.start : out.stop] - rows.start)
        return y

    return context.by_channel(rules, run)


def flatten(context: Context) -> Made | None:
    """Recipe of ``Reshape`` to a row for each sample."""
    n, *rest = context.shape
    wanted = tuple(context.node.shape)
    if wanted not in ((n, -1), (-1, math.prod(rest)), (n, math.prod(rest))):
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return F.reshape(arrays[0], (len(read.out[0]), math.prod(rest)))

    return context.step((n, math.prod(rest)), [None], run)
