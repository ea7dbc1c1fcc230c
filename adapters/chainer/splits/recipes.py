"""Rules for Chainer's functions: the functions that have one, and their recipes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import chainer.functions as F
import numpy as np
from chainer.functions.array.resize_images import ResizeImages

from collective.training.splits.blocks import Read, Step
from collective.training.splits.recipes import (
    LayerCall,
    check_windows,
    nothing,
    padded,
    resized,
    scaled,
    sliced,
)
from collective.training.splits.weighted import biased, convolved, layer, written
from collective.training.splits.windows import Transposed, WindowRule

_Numbers = tuple[int, ...]


def applied(node: Any, inputs: Sequence[Any], **settings: Any) -> Any:
    """Apply a copy of a function node, with some settings changed."""
    fresh = copy.copy(node)
    for name, value in settings.items():
        setattr(fresh, name, value)
    return fresh.apply(tuple(inputs))[0]


def _settings(node: Any) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return strides, padding and dilation of each axis."""
    if hasattr(node, "stride"):
        return node.stride, node.pad, node.dilate
    return (node.sy, node.sx), (node.ph, node.pw), (node.dy, node.dx)


def _padding(node: Any, ends: _Numbers) -> dict[str, Any]:
    """Return the settings by which a function pads each axis with ``ends`` rows at either end."""
    return {"pad": ends} if hasattr(node, "stride") else dict(zip(("ph", "pw"), ends))


def convolution(context: LayerCall, weight: Any, bias: Any = None) -> Step | None:
    """Return the step of ``Convolution2DFunction`` and ``ConvolutionND``."""
    node = context.function
    strides, pads, dilations = _settings(node)
    rules = []
    for n, k, s, p, d in zip(context.lengths, weight.shape[2:], strides, pads, dilations):
        window = WindowRule(k, s, p, p, d)
        rules.append(window.covering(n) if node.cover_all else window)

    def function(x: Any, read: Read, groups: int, *parameters: Any) -> Any:
        def call(x: Any, ends: _Numbers) -> Any:
            settings = _padding(node, ends)
            return applied(node, (x, *parameters), groups=groups, cover_all=False, **settings)

        return convolved(context.arrays, x, rules, read, call)

    return layer(context, [None, *rules], function, weight, bias, node.groups, 0)


def transposed(context: LayerCall, weight: Any, bias: Any = None) -> Step | None:
    """Return the step of ``Deconvolution2DFunction`` and ``DeconvolutionND``."""
    node = context.function
    strides, pads, dilations = _settings(node)
    uncut = _padding(node, (0,) * len(pads))
    if hasattr(node, "outs"):
        sizes = node.outs or (None,) * len(strides)
        whole: dict[str, Any] = {**uncut, "outs": None}
    else:
        sizes = node.outh, node.outw
        whole = {**uncut, "outh": None, "outw": None}
    rules = _transposed_rules(context, weight.shape[2:], strides, pads, dilations, sizes)

    def function(x: Any, read: Read, groups: int, weight: Any, *bias: Any) -> Any:
        if all(read.rows):
            y = applied(node, (x, weight), groups=groups, **whole)
            y = written(context.arrays, y, rules, read)
        else:  # the block lies in gaps, between or behind the rows that are written
            y = nothing(context.arrays, [x, weight], read, weight.shape[1] * groups)
        return biased(y, *bias)

    return layer(context, [None, *rules], function, weight, bias, node.groups, 1)


def _transposed_rules(
    context: LayerCall, kernel: Any, strides: Any, pads: Any, dilations: Any, sizes: Any
) -> list[Transposed]:
    rules = []
    for n, m, *numbers in zip(context.lengths, sizes, kernel, strides, pads, dilations):
        k, s, p, d = numbers
        rule = Transposed(k, s, p, p, d)
        rules.append(rule if m is None else rule._replace(extra=m - rule.length(n)))
    return rules


def unpooling(context: LayerCall) -> Step | None:
    """Return the step of ``Unpooling2D``: a transposed window of ones."""
    node = context.function
    kernel, strides, pads = (node.kh, node.kw), (node.sy, node.sx), (node.ph, node.pw)
    sizes = []
    for n, k, s, p, m in zip(context.lengths, kernel, strides, pads, (node.outh, node.outw)):
        covered = s * (n - 1) + k - s + 1 if node.cover_all else s * (n - 1) + k
        sizes.append(covered - 2 * p if m is None else m)
    rules = _transposed_rules(context, kernel, strides, pads, (1, 1), sizes)

    def run(arrays: Sequence[Any], read: Read) -> Any:
        (x,) = arrays
        if not all(read.rows):
            return nothing(context.arrays, arrays, read, x.shape[1])
        rows = [s * (n - 1) + k for n, k, s in zip(x.shape[2:], kernel, strides)]
        whole = F.unpooling_2d(x, kernel, strides, 0, rows, cover_all=False)
        return written(context.arrays, whole, rules, read)

    return context.by_channel(rules, run)


def dense(context: LayerCall, weight: Any, bias: Any = None) -> Step | None:
    """Return the step of ``LinearFunction``, on the batch's rows, with a convolution's channels."""

    def function(x: Any, read: Read, groups: int, *parameters: Any) -> Any:
        return applied(context.function, (x, *parameters))

    return layer(context, [None], function, weight, bias, 1, 0)


def _windows(context: LayerCall) -> tuple[list[WindowRule], dict[str, Any]]:
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
        window = WindowRule(k, s, p, p)
        windows.append(window.covering(n) if node.cover_all else window)
    check_windows(context, [None, *windows])
    return windows, unpadded


def max_pool(context: LayerCall) -> Step | None:
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


def avg_pool(context: LayerCall) -> Step | None:
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


def resize(context: LayerCall) -> Step | None:
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


def pad(context: LayerCall) -> Step | None:
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
    rules = [WindowRule(1, 1, *ends) for ends in widths[2:]]

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return padded(context.arrays, arrays[0], read.padding, fill)

    return context.by_channel(rules, run)


def getitem(context: LayerCall) -> Step | None:
    """Return the step of ``GetItem``: slices of the data axes, with whole batch and channels."""
    return sliced(context, context.function.slices)


def flatten(context: LayerCall) -> Step | None:
    """Return the step of ``Reshape`` to one row for each sample."""
    n, *rest = context.sources[0].lengths
    width = context.channels * math.prod(rest)
    if tuple(context.function.shape) not in ((n, -1), (-1, width), (n, width)):
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return F.reshape(arrays[0], (len(read.out[0]), width))

    return context.step([None], run, width)


#: Recipes for the functions of layers with weights.
LAYERS: dict[str, Callable[..., Step | None]] = {
    "Convolution2DFunction": convolution,
    "ConvolutionND": convolution,
    "Deconvolution2DFunction": transposed,
    "DeconvolutionND": transposed,
    "LinearFunction": dense,
}
#: Recipes for all functions that read windows of rows, or rearrange rows.
RECIPES: dict[str, Callable[..., Step | None]] = {
    **LAYERS,
    "Unpooling2D": unpooling,
    "MaxPooling2D": max_pool,
    "MaxPoolingND": max_pool,
    "AveragePooling2D": avg_pool,
    "AveragePoolingND": avg_pool,
    "ResizeImages": resize,
    "Pad": pad,
    "GetItem": getitem,
    "Reshape": flatten,
}
#: Functions whose result has rows that each depend on the same rows of the inputs.
ROW_FOR_ROW = set(
    "Absolute Add AddConstant Arccos Arcsin Arctan Arctan2 Ceil ClippedReLU Clip Cos Cosh Div "
    "DivFromConstant ELU Erf Erfc Exp Exp2 Expm1 Floor Fmod HardSigmoid Identity LeakyReLU "
    "Log Log10 Log1p Log2 Maximum Minimum Mul MulConstant MultiAdd Neg PowConstVar "
    "PowVarConst PowVarVar ReLU Reciprocal SELU Sigmoid Sign Sin Sinh Softplus Sqrt Square "
    "Sub SubFromConstant Swish Tan Tanh".split()
)
