"""Steps of Chainer's convolutions, their transposes and dense layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import chainer.functions as F

from collective.training.splits.blocks import Read, Step
from collective.training.splits.recipes import Context, nothing
from collective.training.splits.weighted import biased, convolved, layer, written
from collective.training.splits.windows import Transposed, Window

__all__ = ["applied", "convolution", "dense", "transposed", "unpooling"]

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


def convolution(context: Context, weight: Any, bias: Any = None) -> Step | None:
    """Return the step of ``Convolution2DFunction`` and ``ConvolutionND``."""
    node = context.function
    strides, pads, dilations = _settings(node)
    rules = []
    for n, k, s, p, d in zip(context.lengths, weight.shape[2:], strides, pads, dilations):
        window = Window(k, s, p, p, d)
        rules.append(window.covering(n) if node.cover_all else window)

    def function(x: Any, read: Read, groups: int, *parameters: Any) -> Any:
        def call(x: Any, ends: _Numbers) -> Any:
            settings = _padding(node, ends)
            return applied(node, (x, *parameters), groups=groups, cover_all=False, **settings)

        return convolved(context.arrays, x, rules, read, call)

    return layer(context, [None, *rules], function, weight, bias, node.groups, 0)


def transposed(context: Context, weight: Any, bias: Any = None) -> Step | None:
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
    context: Context, kernel: Any, strides: Any, pads: Any, dilations: Any, sizes: Any
) -> list[Transposed]:
    rules = []
    for n, m, *numbers in zip(context.lengths, sizes, kernel, strides, pads, dilations):
        k, s, p, d = numbers
        rule = Transposed(k, s, p, p, d)
        rules.append(rule if m is None else rule._replace(extra=m - rule.length(n)))
    return rules


def unpooling(context: Context) -> Step | None:
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


def dense(context: Context, weight: Any, bias: Any = None) -> Step | None:
    """Return the step of ``LinearFunction``, on the batch's rows, with a convolution's channels."""

    def function(x: Any, read: Read, groups: int, *parameters: Any) -> Any:
        return applied(context.function, (x, *parameters))

    return layer(context, [None], function, weight, bias, 1, 0)
