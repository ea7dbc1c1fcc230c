"""Rules for PyTorch's functions: the functions that have one, and their recipes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from collective.training.splits.blocks import Read, Run, Step, Value
from collective.training.splits.recipes import (
    LayerCall,
    guarded,
    nothing,
    padded,
    resized,
    scaled,
    sliced,
    taken,
)
from collective.training.splits.weighted import biased, convolved, layer, written
from collective.training.splits.windows import Taken, Transposed, WindowRule

Tensor = torch.Tensor


def convolution(
    context: LayerCall, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
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
        WindowRule(k, s, before, after, d)
        for k, s, (before, after), d in zip(kernel, strides, ends, dilations)
    ]

    def function(x: Tensor, read: Read, groups: int, w: Tensor, b: Tensor | None = None) -> Any:
        def call(x: Tensor, ends: tuple[int, ...]) -> Any:
            return context.function(x, w, b, strides, ends, dilations, groups)

        return convolved(context.arrays, x, rules, read, call)

    return layer(context, [None, *rules], function, weight, bias, groups, 0)


def transposed(
    context: LayerCall, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
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


def linear(context: LayerCall, x: Value, weight: Tensor, bias: Tensor | None = None) -> Step | None:
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


def per_axis(value: Any, axes: int) -> tuple[int, ...]:
    """Return a number for each data axis, from a number for all axes or from a sequence."""
    if isinstance(value, int):
        return (value,) * axes
    numbers = tuple(int(number) for number in value)
    return numbers * axes if len(numbers) == 1 else numbers


def _windows(
    context: LayerCall, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> list[WindowRule]:
    settings = kernel, kernel if stride is None or stride == [] else stride, padding, dilation
    numbers = [per_axis(setting, len(context.lengths)) for setting in settings]
    windows = []
    for n, m, k, s, p, d in zip(context.lengths, context.shape[2:], *numbers):
        # With ceil_mode the last window may extend beyond the end.
        windows.append(WindowRule(k, s, p, p, d).ending(n, m))
    return windows


def max_pool(
    context: LayerCall, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
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
    context: LayerCall, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
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


def adaptive_pool(context: LayerCall, x: Value, output_size: Any) -> Step | None:
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
    context: LayerCall, x: Value, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
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
    context: LayerCall,
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
        windows = [WindowRule(1, 1, *pair) for pair in ends]

        def run(arrays: Sequence[Any], read: Read) -> Any:
            return padded(context.arrays, arrays[0], read.padding, value or 0.0)

        return context.by_channel(windows, run)
    maps = [functional.pad(_ramp(n), pair, mode=mode) for n, pair in zip(context.lengths, ends)]
    return taken(context, [rows.reshape(-1).long().numpy() for rows in maps])


def getitem(context: LayerCall, x: Value, index: Any) -> Step | None:
    """Return the step of a slice of data axes that keeps the whole batch and all channels."""
    return sliced(context, index if isinstance(index, tuple) else (index,))


#: Function that makes the step of a PyTorch function. It takes a context, and then the arguments of
#: the PyTorch function.
Recipe = Callable[..., "Step | None"]

#: Recipes that can handle a piece of a parameter.
LAYERS = convolution, transposed, linear


def _cat(context: LayerCall, tensors: Sequence[Value], dim: int = 0) -> Step | None:
    if dim % len(context.shape) != 1:
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return torch.cat(list(arrays), 1)

    return context.step([None] * len(tensors[0].lengths), run, context.shape[1])


def _flatten(context: LayerCall, x: Value, start_dim: int = 0, end_dim: int = -1) -> Step | None:
    dims = len(x.lengths) + 1
    if start_dim % dims != 1 or end_dim % dims != dims - 1:
        return None
    return context.step([None], lambda arrays, read: arrays[0].flatten(1), context.shape[1])


_RECIPES: dict[Any, Recipe] = {
    **{getattr(functional, f"conv{n}d"): convolution for n in (1, 2, 3)},
    **{getattr(functional, f"conv_transpose{n}d"): transposed for n in (1, 2, 3)},
    **{getattr(functional, f"max_pool{n}d"): max_pool for n in (1, 2, 3)},
    **{getattr(torch, f"max_pool{n}d"): max_pool for n in (1, 2, 3)},
    **{getattr(functional, f"avg_pool{n}d"): avg_pool for n in (1, 2, 3)},
    **{getattr(functional, f"adaptive_avg_pool{n}d"): adaptive_pool for n in (1, 2, 3)},
    functional.linear: linear,
    functional.interpolate: interpolate,
    functional.pad: pad,
    torch.Tensor.__getitem__: getitem,
    torch.cat: _cat,
    torch.flatten: _flatten,
    torch.Tensor.flatten: _flatten,
}


def recipe_of(function: Any) -> Recipe | None:
    """Return the recipe of a function that reads windows of rows."""
    return _RECIPES.get(function)


_NAMES = """
__abs__ __add__ __and__ __div__ __eq__ __ge__ __gt__ __iadd__ __idiv__ __imul__ __invert__
__isub__ __itruediv__ __le__ __lt__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__ __rdiv__
__rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__ __xor__ abs abs_ acos acosh add add_
addcdiv addcmul asin asinh atan atan2 atanh bfloat16 ceil celu celu_ clamp clamp_ clamp_max
clamp_min clip clone contiguous cos cosh deg2rad detach div div_ double elu elu_ eq erf erfc
erfinv exp exp2 exp_ expm1 float floor fmod frac ge gelu gt half hardshrink hardsigmoid hardswish
hardtanh hardtanh_ isfinite isinf isnan le leaky_relu leaky_relu_ lerp lgamma log log10 log1p log2
logical_and logical_not logical_or logical_xor logit logsigmoid lt maximum minimum mish mul mul_
nan_to_num ne neg neg_ negative positive pow prelu reciprocal relu relu6 relu_ remainder round
rsqrt rsub selu selu_ sgn sigmoid sigmoid_ sign silu sin sinh softplus softshrink softsign sqrt
square sub sub_ tan tanh tanh_ tanhshrink threshold threshold_ to true_divide trunc type_as where
""".split()

_POINTWISE = {
    getattr(owner, name)
    for name in _NAMES
    for owner in (torch, torch.Tensor, functional)
    if hasattr(owner, name)
}


def pointwise(function: Any) -> bool:
    """Return whether each row of a function's result depends only on that row of its inputs."""
    return function in _POINTWISE


def in_place(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that a call writes into; None if it writes into no tensor."""
    name = getattr(function, "__name__", "")
    ends = name.endswith("_") and not name.endswith("__")
    augmented = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    if ends or augmented or name in ("__setitem__", "__set__") or kwargs.get("inplace"):
        return args[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return None
