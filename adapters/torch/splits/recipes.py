"""Rules for PyTorch's functions: the functions that have one, and their recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from collective.training.splits.blocks import Read, Step, Value
from collective.training.splits.recipes import Context

from .layers import convolution, linear, transposed
from .windows import adaptive_pool, avg_pool, getitem, interpolate, max_pool, pad

__all__ = ["LAYERS", "in_place", "pointwise", "recipe_of"]

#: Function that makes the step of a PyTorch function. It takes a context, and then the arguments of
#: the PyTorch function.
Recipe = Callable[..., "Step | None"]

#: Recipes that can handle a piece of a parameter.
LAYERS = convolution, transposed, linear


def _cat(context: Context, tensors: Sequence[Value], dim: int = 0) -> Step | None:
    if dim % len(context.shape) != 1:
        return None

    def run(arrays: Sequence[Any], read: Read) -> Any:
        return torch.cat(list(arrays), 1)

    return context.step([None] * len(tensors[0].lengths), run, context.shape[1])


def _flatten(context: Context, x: Value, start_dim: int = 0, end_dim: int = -1) -> Step | None:
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
