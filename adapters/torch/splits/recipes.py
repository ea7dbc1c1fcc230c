"""PyTorch's functions as steps: which rows they read, and how they are called on a piece.

A recipe has the signature of the function that it stands for, after :class:`Context`, and returns
a :class:`~collective.training.splits.blocks.Step` or None where this call reads its whole input in
a way that no rule says. Padding is put here, explicitly and only where a piece lies at an end of
the axis; the function itself is then called without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from collective.training.splits.blocks import Read, Run, Step, Value
from collective.training.splits.serial import dimension
from collective.training.splits.windows import Rule, Taken, Transposed, Window

__all__ = ["Context", "pointwise", "recipe_of"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Context:
    """One call that is to become a step.

    Attributes:
        function: the function, without gradients of its own.
        name: of the layer and the function.
        shape: of the result.
        sources: the values among the arguments.
        shared: from a tensor that is no source to the one whose gradient is that of all pieces.
        shared_in_part: the same where a piece has some channels and uses theirs of the tensor.
    """

    function: Callable[..., Any]
    name: str
    shape: tuple[int, ...]
    sources: tuple[Value, ...]
    shared: Callable[[Any], Any]
    shared_in_part: Callable[[Any], Any]

    def step(self, rules: Sequence[Rule | None], run: Run, **options: Any) -> Step:
        """Make the step."""
        channels = self.shape[1] if len(self.shape) > 1 else 0
        return Step(self.name, self.sources, tuple(rules), run, channels, **options)


Recipe = Callable[..., "Step | None"]


# -- what is shared by several ---------------------------------------------------------------


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """Return a number for each data axis, given as one for all or as a sequence."""
    if isinstance(value, int):
        return (value,) * axes
    found = tuple(int(each) for each in value)
    return found * axes if len(found) == 1 else found


def _padded(array: Tensor, padding: Sequence[tuple[int, int]], fill: float = 0.0) -> Tensor:
    """Pad the axes of the batch and the data; a piece may be nothing but padding."""
    if not any(before or after for before, after in padding):
        return array
    if array.numel():
        flat = [count for pair in reversed(padding[1:]) for count in pair]
        return functional.pad(array, flat, value=fill)
    shape = list(array.shape)
    for axis, pair in enumerate(padding):
        shape[dimension(axis)] += sum(pair)
    return _tied(array.new_full(shape, fill), array)


def _tied(result: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return ``result`` with ``tensors`` in its graph, where nothing was computed of them.

    Other ranks compute something of theirs, and every rank has to take part in the backward
    collectives that come of it.
    """
    for tensor in tensors:
        if tensor is not None:
            result = result + tensor.reshape(-1)[:0].sum()
    return result


def _nothing(arrays: Sequence[Tensor], read: Read, channels: int, *used: Tensor | None) -> Tensor:
    """Return a block of zeros, which may be one without a row."""
    rows = [len(rows) for rows in read.out]
    return _tied(arrays[0].new_zeros((rows[0], channels, *rows[1:])), *arrays, *used)


def _guarded(run: Run, channels: int, *used: Tensor | None) -> Run:
    """Let a function that refuses empty arrays not see them."""

    def guarded(arrays: Sequence[Any], read: Read) -> Any:
        if all(read.out):
            return run(arrays, read)
        return _nothing(arrays, read, channels, *used)

    return guarded


# -- convolutions ----------------------------------------------------------------------------


def _convolution(
    context: Context, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Step | None:  # fmt: skip
    axes = weight.dim() - 2
    strides, dilations = _each(stride, axes), _each(dilation, axes)
    kernel = weight.shape[2:]
    if padding == "same":
        missing = [d * (k - 1) for k, d in zip(kernel, dilations)]
        ends = [(each // 2, each - each // 2) for each in missing]
    else:
        ends = [(p, p) for p in _each(0 if padding == "valid" else padding, axes)]
    rules = [
        Window(k, s, before, after, d)
        for k, s, (before, after), d in zip(kernel, strides, ends, dilations)
    ]
    function = context.function

    def some(w: Tensor, b: Tensor | None, groups: int) -> Run:
        def run(arrays: Sequence[Any], read: Read) -> Any:
            padded = _padded(arrays[0], read.padding)
            return function(padded, w, b, strides, 0, dilations, groups)

        return _guarded(run, w.shape[0], w, b)

    return _layer(context, [None, *rules], some, weight, bias, groups, 0)


def _transposed(
    context: Context, x: Value, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Step | None:  # fmt: skip
    axes = weight.dim() - 2
    numbers = (_each(each, axes) for each in (stride, padding, dilation, output_padding))
    rules = [
        Transposed(k, s, p, p, d, extra) for k, s, p, d, extra in zip(weight.shape[2:], *numbers)
    ]
    strides, dilations = _each(stride, axes), _each(dilation, axes)
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
                y = _nothing(arrays, read, w.shape[1] * groups, w)
            return y if b is None else y + b.reshape(-1, *(1 for _ in rules))

        return _guarded(run, w.shape[1] * groups, w, b)

    return _layer(context, [None, *rules], some, weight, bias, groups, 1)


def _rows(array: Tensor, at: int, have: range, want: range) -> Tensor:
    """Cut ``want`` out of the rows ``have``, with zeros where there are none."""
    start, stop = max(have.start, want.start), min(have.stop, want.stop)
    if stop <= start:
        shape = list(array.shape)
        shape[at] = len(want)
        return _tied(array.new_zeros(shape), array)
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

    Args:
        some: makes the function for some weights, bias and groups.
        groups: as in a convolution; 1 group reads all channels.
        outputs: the weights' dimension of output channels; the other one is that of inputs.
    """
    w, b = context.shared(weight), context.shared(bias)
    part, part_b = context.shared_in_part(weight), context.shared_in_part(bias)
    whole = some(w, b, groups)
    if groups == 1:

        def columns(channels: range) -> Run:
            mine = None if part_b is None else part_b[channels.start : channels.stop]
            return some(part.narrow(outputs, channels.start, len(channels)), mine, 1)

        def rows(channels: range) -> Run:
            return some(part.narrow(1 - outputs, channels.start, len(channels)), None, 1)

        def after(array: Tensor) -> Tensor:
            assert b is not None
            return array + b.reshape(-1, *(1 for _ in range(array.dim() - 2)))

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


def _linear(context: Context, x: Value, weight: Tensor, bias: Tensor | None = None) -> Step | None:
    function, shape = context.function, context.shape
    if len(shape) == 2:

        def some(w: Tensor, b: Tensor | None, groups: int) -> Run:
            return lambda arrays, read: function(arrays[0], w, b)

        return _layer(context, [None], some, weight, bias, 1, 0)
    # Along the last data axis every row of the result reads every row of the input.
    n = x.lengths[len(x.lengths) - 1]
    everything = range(n)
    w, b = context.shared(weight), context.shared(bias)

    def run(arrays: Sequence[Any], read: Read) -> Any:
        *_, made = read.out
        rows = slice(made.start, made.stop)
        return function(arrays[0], w[rows], None if b is None else b[rows])

    rules = [None] * (len(shape) - 2) + [Taken(lambda i: everything, shape[len(shape) - 1])]
    return context.step(rules, _guarded(run, shape[1], w, b), along=lambda channels: run)


# -- pooling ---------------------------------------------------------------------------------


def _windows(
    context: Context, x: Value, kernel: Any, stride: Any, padding: Any, dilation: Any = 1
) -> list[Window]:
    axes = len(context.shape) - 2
    numbers = [_each(each, axes) for each in (kernel, kernel if stride is None or stride == [] else
                                               stride, padding, dilation)]  # fmt: skip
    windows = []
    for n, m, k, s, p, d in zip(x.lengths[1:], context.shape[2:], *numbers):
        window = Window(k, s, p, p, d)
        # As far as the last window reaches: with ceil_mode it may hang over the end.
        windows.append(window._replace(after=(m - 1) * s + window.reach - n - p))
    return windows


def _max_pool(
    context: Context, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> Step | None:  # fmt: skip
    if return_indices:
        return None
    windows = _windows(context, x, kernel_size, stride, padding, dilation)
    function = context.function
    kernels, strides, dilations = zip(*((w.kernel, w.stride, w.dilation) for w in windows))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        lowest = -math.inf if arrays[0].is_floating_point() else torch.iinfo(arrays[0].dtype).min
        padded = _padded(arrays[0], read.padding, lowest)
        return function(padded, kernels, strides, 0, dilations)

    run = _guarded(run, context.shape[1])
    return context.step([None, *windows], run, along=lambda channels: run)


def _avg_pool(
    context: Context, x: Value, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Step | None:  # fmt: skip
    windows = _windows(context, x, kernel_size, stride, padding)
    function = context.function
    kernels, strides = zip(*((w.kernel, w.stride) for w in windows))
    ends = _each(padding, len(windows))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        padded = _padded(arrays[0], read.padding)
        y = function(padded, kernels, strides) * math.prod(kernels)
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

    run = _guarded(run, context.shape[1])
    return context.step([None, *windows], run, along=lambda channels: run)


def _within(rows: range, first: int, last: int) -> int:
    return min(rows.stop, last) - max(rows.start, first)


def _adaptive(
    context: Context, x: Value, output_size: Any, *rest: Any, **options: Any
) -> Step | None:
    if rest or options:
        return None
    function, shape = context.function, context.shape
    rules = []
    for n, m in zip(x.lengths[1:], shape[2:]):
        # Row i is made of the rows from floor(i n / m) to ceil((i + 1) n / m).
        rules.append(Taken(lambda i, n=n, m=m: range(i * n // m, -(-(i + 1) * n // m)), m))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        if all(len(out) == m for out, m in zip(read.out[1:], shape[2:])):
            return function(arrays[0], shape[2:])
        y = arrays[0]
        for axis, (rule, rows, out) in enumerate(zip(rules, read.rows[1:], read.out[1:])):
            size = [None] * (y.dim() - 2)
            made = []
            for i in out:
                size = [1 if each == axis else y.shape[each + 2] for each in range(y.dim() - 2)]
                taken = rule.rows(i)
                piece = y.narrow(axis + 2, taken[0] - rows.start, len(taken))
                made.append(function(piece, size))
            y = torch.cat(made, axis + 2)
        return y

    run = _guarded(run, shape[1])
    return context.step([None, *rules], run, along=lambda channels: run)


# -- rows taken one by one -------------------------------------------------------------------


def _interpolate(
    context: Context, x: Value, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Step | None:  # fmt: skip
    linear = mode in ("linear", "bilinear", "trilinear")
    if antialias or not (linear or mode in ("nearest", "nearest-exact")):
        return None
    axes = len(context.shape) - 2
    scales = [None] * axes if scale_factor is None else list(
        scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * axes)  # fmt: skip
    rules, coordinates = [], []
    for n, m, scale in zip(x.lengths[1:], context.shape[2:], scales):
        # PyTorch itself says where each row comes from: of the rows' own numbers it makes them.
        ramp = torch.arange(n, dtype=torch.float64).reshape(1, 1, n)
        how = {"size": m} if scale is None else {"scale_factor": scale}
        at = functional.interpolate(
            ramp, **how, mode="linear" if linear else mode, align_corners=align_corners,
            recompute_scale_factor=recompute_scale_factor,
        ).reshape(m)  # fmt: skip
        low = at.floor().long()
        high = (low + 1).clamp(max=n - 1)
        pairs = list(zip(low.tolist(), high.tolist())) if linear else [(i,) for i in low.tolist()]
        rules.append(Taken(lambda i, pairs=pairs: pairs[i], m))
        coordinates.append((low, high, at - low))

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = arrays[0]
        for axis, ((low, high, share), rows, out) in enumerate(
            zip(coordinates, read.rows[1:], read.out[1:]), start=2
        ):
            cut = slice(out.start, out.stop)
            at = (low[cut] - rows.start).to(y.device)
            taken = y.index_select(axis, at)
            if linear:
                next_ = y.index_select(axis, (high[cut] - rows.start).to(y.device))
                weight = share[cut].to(y).reshape(-1, *(1 for _ in range(y.dim() - axis - 1)))
                taken = taken * (1 - weight) + next_ * weight
            y = taken
        return y

    run = _guarded(run, context.shape[1])
    return context.step([None, *rules], run, along=lambda channels: run)


def _pad(
    context: Context,
    x: Value,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Step | None:
    axes = len(context.shape) - 2
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    if any(any(pair) for pair in pairs[axes:]):
        return None
    ends = [*reversed(pairs[:axes])]
    ends = [(0, 0)] * (axes - len(ends)) + ends
    if mode == "constant":
        windows = [Window(1, 1, *each) for each in ends]

        def run(arrays: Sequence[Any], read: Read) -> Any:
            return _padded(arrays[0], read.padding, value or 0.0)

        return context.step([None, *windows], run, along=lambda channels: run)
    maps = []
    for n, (before, after) in zip(x.lengths[1:], ends):
        ramp = torch.arange(n, dtype=torch.float64).reshape(1, 1, n)
        maps.append(functional.pad(ramp, (before, after), mode=mode).reshape(-1).long())
    return _taken(context, maps)


def _taken(context: Context, maps: Sequence[Tensor], before: Any = None) -> Step:
    """Make the step that takes the rows ``maps`` along the data axes."""
    rules = [
        Taken(lambda i, numbers=numbers.tolist(): (numbers[i],), len(numbers)) for numbers in maps
    ]

    def run(arrays: Sequence[Any], read: Read) -> Any:
        y = arrays[0]
        for axis, (numbers, rows, out) in enumerate(
            zip(maps, read.rows[1:], read.out[1:]), start=2
        ):
            y = y.index_select(axis, (numbers[out.start : out.stop] - rows.start).to(y.device))
        return y

    run = _guarded(run, context.shape[1])
    return context.step([None, *rules], run, along=lambda channels: run)


def _getitem(context: Context, x: Value, index: Any) -> Step | None:
    """Slices of the data axes; the batch and the channels whole."""
    places = index if isinstance(index, tuple) else (index,)
    if Ellipsis in places:
        at = places.index(Ellipsis)
        missing = len(x.lengths) + 1 - (len(places) - 1)
        places = (*places[:at], *[slice(None)] * missing, *places[at + 1 :])
    places = (*places, *[slice(None)] * (len(x.lengths) + 1 - len(places)))
    if not all(isinstance(each, slice) for each in places) or any(
        each != slice(None) for each in places[:2]
    ):
        return None
    maps = [torch.arange(n)[each] for n, each in zip(x.lengths[1:], places[2:])]
    return _taken(context, maps)


def _cat(context: Context, tensors: Sequence[Value], dim: int = 0) -> Step | None:
    if dim % len(context.shape) != 1:
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return torch.cat(list(arrays), 1)

    return context.step([None] * len(tensors[0].lengths), run)


def _flatten(context: Context, x: Value, start_dim: int = 0, end_dim: int = -1) -> Step | None:
    dims = len(x.lengths) + 1
    if start_dim % dims != 1 or end_dim % dims != dims - 1:
        return None
    return context.step([None], lambda arrays, read: arrays[0].flatten(1))


_RECIPES: dict[Any, Recipe] = {
    **{getattr(functional, f"conv{n}d"): _convolution for n in (1, 2, 3)},
    **{getattr(functional, f"conv_transpose{n}d"): _transposed for n in (1, 2, 3)},
    **{getattr(functional, f"max_pool{n}d"): _max_pool for n in (1, 2, 3)},
    **{getattr(torch, f"max_pool{n}d"): _max_pool for n in (1, 2, 3)},
    **{getattr(functional, f"avg_pool{n}d"): _avg_pool for n in (1, 2, 3)},
    **{getattr(functional, f"adaptive_avg_pool{n}d"): _adaptive for n in (1, 2, 3)},
    functional.linear: _linear,
    functional.interpolate: _interpolate,
    functional.pad: _pad,
    torch.Tensor.__getitem__: _getitem,
    torch.cat: _cat,
    torch.flatten: _flatten,
    torch.Tensor.flatten: _flatten,
}


def recipe_of(function: Any) -> Recipe | None:
    """Return the recipe of a function that reads windows of rows."""
    return _RECIPES.get(function)


# -- row for row -----------------------------------------------------------------------------

_UNARY = (
    "abs acos acosh asin asinh atan atanh ceil celu clamp clamp_max clamp_min clip clone contiguous "
    "cos cosh deg2rad detach double elu elu_ erf erfc erfinv exp exp2 expm1 float floor frac gelu "
    "half bfloat16 hardshrink hardsigmoid hardswish hardtanh leaky_relu leaky_relu_ lgamma log log10 "
    "log1p log2 logit logsigmoid mish nan_to_num neg negative positive prelu reciprocal relu relu6 "
    "relu_ round rrelu rsqrt selu selu_ sgn sigmoid sign silu sin sinh softplus softshrink softsign "
    "sqrt square tan tanh tanhshrink threshold to trunc type_as isnan isinf isfinite logical_not "
    "sigmoid_ tanh_ hardtanh_ celu_ threshold_ clamp_ exp_ neg_ abs_ mul_ add_ sub_ div_"
).split()
_BINARY = (
    "add sub mul div true_divide pow atan2 fmod remainder maximum minimum where lerp addcmul addcdiv "
    "eq ne lt le gt ge logical_and logical_or logical_xor rsub "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ "
    "__rtruediv__ __itruediv__ __div__ __rdiv__ __idiv__ __pow__ __rpow__ __neg__ __abs__ __eq__ "
    "__ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__"
).split()

_POINTWISE = {
    getattr(owner, name)
    for name in (*_UNARY, *_BINARY)
    for owner in (torch, torch.Tensor, functional)
    if hasattr(owner, name)
}


def pointwise(function: Any) -> bool:
    """Return whether a function makes each row of its result of the same rows of its inputs."""
    return function in _POINTWISE
