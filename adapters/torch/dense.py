"""Gradients of dense layers, computed where they are reduced.

Autograd makes a new tensor of every gradient, which a wrapper has to copy to its bucket. The large
ones are mostly those of dense layers' weights. While a wrapped module's forward pass runs,
``linear`` is one with the same bits, whose backward pass computes the gradient of the weight in
the bucket; autograd takes it from there without a copy.

What is written there must be the gradient, all of it and nothing else. So the wrapper gives the
place to one contribution in a pass only, and to none where a gradient is already, or where it is
not for the parameter (``torch.autograd.grad``); and what records functions, or calls them in a way
of its own, gets PyTorch's: autocast, checkpoints, function transforms, forward-mode derivatives,
tracers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .untraced import untraced

__all__ = ["InBuckets", "Target", "dense_weights", "is_for"]

#: Returns the tensor in which a gradient may be computed, or None; of a parameter's number, and
#: the node of the graph that takes it.
Target = Callable[[int, Any], "torch.Tensor | None"]

# Below, a gradient is still in the second-level cache when it is copied, and the calls cost more.
_LEAST_BYTES = 1 << 20
_core: Any = torch._C
# What is asked of torch here has no public name; where one is missing, gradients are copied.
_COMPLETE = all(
    hasattr(_core, name)
    for name in ("_will_engine_execute_node", "_are_functorch_transforms_active", "_is_tracing")
) and hasattr(_core._autograd, "_top_saved_tensors_default_hooks")
_forward_ad: Any = importlib.import_module("torch.autograd.forward_ad")


def dense_weights(module: nn.Module, parameters: Sequence[nn.Parameter]) -> dict[int, int]:
    """Return the numbers of large weights of dense layers on the CPU, by their identity."""
    if not _COMPLETE:
        return {}
    dense = {id(each.weight) for each in module.modules() if isinstance(each, nn.Linear)}
    return {
        id(parameter): number
        for number, parameter in enumerate(parameters)
        if id(parameter) in dense
        and type(parameter) is nn.Parameter
        and parameter.device.type == "cpu"
        and parameter.is_contiguous()
        and parameter.numel() * parameter.element_size() >= _LEAST_BYTES
    }


def is_for(node: Any, parameter: nn.Parameter) -> bool:
    """Tell whether a node of the graph is about to add to a parameter's gradient, in this pass."""
    if getattr(node, "variable", None) is not parameter:
        return False
    try:
        found: bool = _core._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad hands it to its caller
        return False
    return found


@untraced
class InBuckets(TorchFunctionMode):
    """In the body, ``linear`` with some weights computes their gradients in their buckets.

    Args:
        numbers: of :func:`dense_weights`; the parameters outlive this.
        target: asked in the backward pass.
    """

    def __init__(self, numbers: dict[int, int], target: Target) -> None:
        super().__init__()
        self._numbers = numbers
        self._target = target

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, or what stands for it."""
        if torch.compiler.is_compiling():  # which a compiler reads as True: it sees no more of us
            return func(*args, **(kwargs or {}))
        if func is functional.linear and not kwargs and len(args) in (2, 3):
            number = self._numbers.get(id(args[1]))
            if number is not None and _is_plain(args[0], args[1]):
                bias = args[2] if len(args) == 3 else None
                return _linear(args[0], args[1], bias, number, self._target)
        return func(*args, **(kwargs or {}))


def _is_plain(x: Any, weight: torch.Tensor) -> bool:
    """Tell whether the backward pass of ``linear`` is the one that :class:`_LinearInBucket` has."""
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.dim() in (2, 3)
        and x.is_contiguous()
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        # A checkpoint computes the pass again without this, and has to find the same in it.
        and _core._autograd._top_saved_tensors_default_hooks(True) is None
        and not _core._are_functorch_transforms_active()
        and _forward_ad._current_level < 0
        and not _core._is_tracing()
    )


class _LinearInBucket(torch.autograd.Function):
    """``linear`` on two or three dimensions: the same products of the same operands."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        number: int,
        target: Target,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.number, ctx.target = number, target
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            of_x = (rows @ weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            into = None
            if not torch.is_grad_enabled():  # or the gradient has a graph of its own
                into = ctx.target(ctx.number, ctx.next_functions[1][0])
            x_rows = x.reshape(-1, x.shape[-1])
            if into is None:
                of_weight = rows.t() @ x_rows
            else:
                # Another tensor of the same memory: autograd keeps one that nobody else has.
                of_weight = torch.mm(rows.t(), x_rows, out=into).detach()
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None


_linear: Callable[..., torch.Tensor] = _LinearInBucket.apply
