"""Gradients of dense layers that are computed directly in the buckets that reduce them.

Autograd makes a new tensor for every gradient, which a wrapper has to copy to its bucket. Most
large gradients are those of dense layers' weights. While a wrapped module's forward pass runs, this
module replaces ``linear`` by a function with the same bits. Its backward pass computes the gradient
of the weight in the bucket, and autograd takes that gradient without a copy.

The bucket must then hold the complete gradient and nothing else. So the wrapper gives the bucket's
view to only one contribution in a pass. It gives the view to none if the parameter already has a
gradient, or if the gradient is not for the parameter (``torch.autograd.grad``). PyTorch's own
``linear`` runs under autocast, checkpoints, function transforms, forward-mode derivatives and
tracers, which record functions or call them in their own way.
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

#: Function of a parameter's number and of the graph's node that takes the gradient. It returns the
#: tensor in which the gradient may be computed, or None.
Target = Callable[[int, Any], "torch.Tensor | None"]

# A smaller gradient is still in the second-level cache when it is copied, so that the additional
# calls would cost more than the copy.
_LEAST_BYTES = 1 << 20
_core: Any = torch._C
# These functions of torch are private. If one of them is missing, gradients are copied.
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
    """Return whether a node of the graph will add to a parameter's gradient in this pass."""
    if getattr(node, "variable", None) is not parameter:
        return False
    try:
        executed: bool = _core._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad returns the gradient to its caller instead
        return False
    return executed


@untraced
class InBuckets(TorchFunctionMode):
    """Context in which ``linear`` with some weights computes their gradients in their buckets.

    Args:
        numbers: result of :func:`dense_weights`; the parameters must outlive this context.
        target: function that the backward pass calls for the place of a gradient.
    """

    def __init__(self, numbers: dict[int, int], target: Target) -> None:
        super().__init__()
        self._numbers = numbers
        self._target = target

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, or its replacement."""
        # A compiler evaluates this condition as true, and so does not trace the rest.
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func is functional.linear and not kwargs and len(args) in (2, 3):
            number = self._numbers.get(id(args[1]))
            if number is not None and _is_plain(args[0], args[1]):
                bias = args[2] if len(args) == 3 else None
                return _linear(args[0], args[1], bias, number, self._target)
        return func(*args, **(kwargs or {}))


def _is_plain(x: Any, weight: torch.Tensor) -> bool:
    """Return whether :class:`_LinearInBucket` computes the same as ``linear`` for an input."""
    return (
        type(x) in (torch.Tensor, nn.Parameter)
        and x.dtype == weight.dtype
        and x.device == weight.device
        and x.dim() in (2, 3)
        and x.is_contiguous()
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        # A checkpoint recomputes the pass without this context, and must save the same tensors.
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
            # With gradients enabled, the gradient gets a graph, and cannot be computed in place.
            if not torch.is_grad_enabled():
                into = ctx.target(ctx.number, ctx.next_functions[1][0])
            x_rows = x.reshape(-1, x.shape[-1])
            if into is None:
                of_weight = rows.t() @ x_rows
            else:
                # Return another tensor over the same memory. Autograd takes a tensor without a
                # copy only if there is no other reference to that tensor.
                of_weight = torch.mm(rows.t(), x_rows, out=into).detach()
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None


_linear: Callable[..., torch.Tensor] = _LinearInBucket.apply
