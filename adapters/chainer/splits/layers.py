"""Chainer's convolutions, their transposes and dense layers as steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer.functions as F

from collective.training.splits.blocks import Read, Run, Step
from collective.training.splits.filters import ALONG, ROWS
from collective.training.splits.windows import Rule, Transposed, Window

from .context import Context, applied, guarded, nothing, padded

__all__ = ["convolution", "dense", "transposed", "unpooling"]

Made = tuple[Step, tuple[int, ...]]
_Numbers = tuple[int, ...]


def _settings(node: Any) -> tuple[_Numbers, _Numbers, _Numbers, dict[str, Any]]:
    """Return strides, padding and dilation an axis, and the settings that pad nothing."""
    if hasattr(node, "stride"):
        return node.stride, node.pad, node.dilate, {"pad": (0,) * len(node.pad)}
    strides, pads = (node.sy, node.sx), (node.ph, node.pw)
    return strides, pads, (node.dy, node.dx), {"ph": 0, "pw": 0}


def convolution(context: Context) -> Made | None:
    """Recipe of ``Convolution2DFunction`` and ``ConvolutionND``."""
    node = context.node
    weight, *bias = context.rest
    strides, pads, dilations, unpadded = _settings(node)
    rules = []
    for n, k, s, p, d in zip(context.shape[2:], weight.shape[2:], strides, pads, dilations):
        window = Window(k, s, p, p, d)
        rules.append(window.covering(n) if node.cover_all else window)

    def some(groups: int) -> Callable[..., Any]:
        def function(x: Any, read: Read, *inputs: Any) -> Any:
            x = padded(x, read.padding)
            return applied(node, (x, *inputs), groups=groups, cover_all=False, **unpadded)

        return function

    return _layer(context, rules, some, weight, bias, node.groups, 0)


def transposed(context: Context) -> Made | None:
    """Recipe of ``Deconvolution2DFunction`` and ``DeconvolutionND``."""
    node = context.node
    weight, *bias = context.rest
    strides, pads, dilations, uncut = _settings(node)
    if hasattr(node, "outs"):
        sizes = node.outs or (None,) * len(strides)
        whole: dict[str, Any] = {**uncut, "outs": None}
    else:
        sizes = node.outh, node.outw
        whole = {**uncut, "outh": None, "outw": None}
    rules = _transposed_rules(context, weight.shape[2:], strides, pads, dilations, sizes)

    def some(groups: int) -> Callable[..., Any]:
        def function(x: Any, read: Read, weight: Any, *bias: Any) -> Any:
            if all(read.rows):
                y = applied(node, (x, weight), groups=groups, **whole)
                y = _written(y, rules, read)
            else:  # holes between and behind what the rows write
                y = nothing([x, weight], read, weight.shape[1] * groups)
            return _biased(y, bias)

        return function

    return _layer(context, rules, some, weight, bias, node.groups, 1)


def _transposed_rules(
    context: Context, kernel: Any, strides: Any, pads: Any, dilations: Any, sizes: Any
) -> list[Transposed]:
    rules = []
    for n, m, *numbers in zip(context.shape[2:], sizes, kernel, strides, pads, dilations):
        k, s, p, d = numbers
        rule = Transposed(k, s, p, p, d)
        rules.append(rule if m is None else rule._replace(extra=m - rule.length(n)))
    return rules


def unpooling(context: Context) -> Made | None:
    """Recipe of ``Unpooling2D``: a transposed window of ones."""
    node = context.node
    kernel, strides = (node.kh, node.kw), (node.sy, node.sx)
    sizes = []
    for n, k, s, p, m in zip(
        context.shape[2:], kernel, strides, (node.ph, node.pw), (node.outh, node.outw)
    ):
        covered = s * (n - 1) + k - s + 1 if node.cover_all else s * (n - 1) + k
        sizes.append(covered - 2 * p if m is None else m)
    rules = _transposed_rules(context, kernel, strides, (node.ph, node.pw), (1, 1), sizes)

    def run(arrays: Sequence[Any], read: Read) -> Any:
        (x,) = arrays
        if not all(read.rows):
            return nothing(arrays, read, x.shape[1])
        rows = [s * (n - 1) + k for n, k, s in zip(x.shape[2:], kernel, strides)]
        whole = F.unpooling_2d(x, kernel, strides, 0, rows, cover_all=False)
        return _written(whole, rules, read)

    return context.by_channel(rules, run)


def _written(y: Any, rules: Sequence[Transposed], read: Read) -> Any:
    """Cut the block out of what a piece writes, with zeros where it writes nothing."""
    widths = [(0, 0), (0, 0)]
    cut = [slice(None), slice(None)]
    for axis, rule in enumerate(rules, start=1):
        # y begins where the first row of the piece writes its first row.
        first = read.rows[axis].start * rule.stride - rule.before
        last, want = first + y.shape[axis + 1], read.out[axis]
        start, stop = max(first, want.start), min(last, want.stop)
        cut.append(slice(start - first, max(start, stop) - first))
        if stop <= start:
            widths.append((0, len(want)))
        else:
            widths.append((start - want.start, want.stop - stop))
    y = y[tuple(cut)]
    return F.pad(y, widths, "constant") if any(map(any, widths)) else y


def _biased(y: Any, bias: Sequence[Any]) -> Any:
    if not bias:
        return y
    shape = (1, -1, *(1,) * (y.ndim - 2))
    return y + F.broadcast_to(F.reshape(bias[0], shape), y.shape)


def _layer(
    context: Context,
    rules: Sequence[Rule],
    some: Callable[[int], Callable[..., Any]],
    weight: Any,
    bias: Sequence[Any],
    groups: int,
    outputs: int,
) -> Made:
    """Make the step of a layer with weights, and what it is for some of its channels.

    Where this rank has its own filters alone the step can be computed for these and no others.

    What a step uses is the weight, the bias if there is one, and both once more for those of
    whose channels each piece has some.

    Args:
        some: makes the function ``f(x, read, weight, *bias)`` for a number of groups.
        groups: as in a convolution; 1 group reads all channels.
        outputs: the weights' dimension of output channels; the other one is that of inputs.
    """
    given = (weight, *bias)
    own = context.own
    in_part = given if own is None else ()
    uses = (*map(context.shared, given), *map(context.shared_in_part, in_part))
    count = len(given)
    channels = context.weight_shape[outputs] * (groups if outputs else 1)
    rows = (rule.length(n) for rule, n in zip(rules, context.shape[2:]))
    shape = (context.shape[0], channels, *rows)

    def run(arrays: Sequence[Any], read: Read) -> Any:
        x, *used = arrays
        return some(groups)(x, read, *used[:count])

    options: dict[str, Any] = {}
    if bias:
        options["after"] = lambda total, uses: _biased(total, uses[1:2])
    if own is not None:
        options |= _of_own(own, some, weight, outputs, channels)
    elif groups == 1:
        options |= _of_some(some, count, outputs, channels)
    elif groups == context.shape[1] == channels:
        options |= _each_alone(some, count)
    whole = guarded(run, channels, slice(count))
    return context.step(shape, [None, *rules], whole, uses=uses, **options)


def _of_own(
    own: str, some: Callable[[int], Callable[..., Any]], weight: Any, outputs: int, channels: int
) -> dict[str, Any]:
    """Return what a layer is of which this rank has its own filters alone."""

    def run(arrays: Sequence[Any], read: Read) -> Any:
        x, *used = arrays
        return some(x.shape[1] if own == ALONG else 1)(x, read, *used[taken])

    taken = slice(1) if own == ROWS else slice(None)  # without the bias, which is added once
    made = {ROWS: channels, ALONG: weight.shape[0]}.get(own, weight.shape[outputs])
    return {"own": own, own: lambda wanted: guarded(run, made, taken)}


def _of_some(
    some: Callable[[int], Callable[..., Any]], count: int, outputs: int, channels: int
) -> dict[str, Any]:
    """Return what a layer that mixes channels is for some that it makes, or that it reads."""

    def columns(wanted: range) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            x, *used = arrays
            part, *bias = used[count:]
            parts = _cut(part, outputs, wanted), *(_cut(each, 0, wanted) for each in bias)
            return some(1)(x, read, *parts)

        return guarded(run, len(wanted), slice(count, None))

    def rows(wanted: range) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            x, *used = arrays
            return some(1)(x, read, _cut(used[count], 1 - outputs, wanted))

        return guarded(run, channels, slice(count, count + 1))

    return {"columns": columns, "rows": rows}


def _each_alone(some: Callable[[int], Callable[..., Any]], count: int) -> dict[str, Any]:
    """Return what a layer that works on each channel by itself is for some of them."""

    def along(wanted: range) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            x, *used = arrays
            return some(len(wanted))(x, read, *(_cut(each, 0, wanted) for each in used[count:]))

        return guarded(run, len(wanted), slice(count, None))

    return {"along": along}


def _cut(x: Any, dimension: int, rows: range) -> Any:
    return x[(*(slice(None),) * dimension, slice(rows.start, rows.stop))]


def dense(context: Context) -> Made | None:
    """Recipe of ``LinearFunction``: of the batch's rows, with channels as in a convolution."""
    weight, *bias = context.rest
    node = context.node

    def some(groups: int) -> Callable[..., Any]:
        def function(x: Any, read: Read, *inputs: Any) -> Any:
            return applied(node, (x, *inputs))

        return function

    return _layer(context, [], some, weight, bias, 1, 0)
