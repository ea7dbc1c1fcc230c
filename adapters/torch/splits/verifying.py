"""Comparison of a split module with the whole one: results, gradients, memory for backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from collective.memory import nested
from collective.training.splits.cuts import ModelCopy
from collective.training.splits.filters import whole_gradients
from collective.training.splits.report import Computation, MemoryReport, Verification

from .kept import Kept
from .session import Cut

__all__ = ["memory_report", "verify"]

Tensor = torch.Tensor


@contextlib.contextmanager
def _same_numbers(x: Tensor) -> Iterator[None]:
    """Restore the state of PyTorch's random number generators after the body."""
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices):
        yield


# -- results ---------------------------------------------------------------------------------


def verify(
    copies: Iterable[ModelCopy], x: Tensor, args: Sequence[Any], tolerance: float
) -> Verification:
    """Run the comparison that :meth:`Split.verify` describes."""

    def double(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().double() if is_real else value

    rest = [double(value) for value in args]
    outcomes = []
    for module, filters, compute in copies:
        module.double()
        inputs = double(x).requires_grad_()
        with _same_numbers(x), _outputs(module) as outputs:
            result, joined = compute(inputs, rest, {})
        torch.autograd.backward(_scalar(result))
        gradients = {"input": inputs.grad, **whole_gradients(module.named_parameters(), filters)}
        outcomes.append(Computation(outputs, gradients, joined))
    whole, parts = outcomes
    return Verification.of(whole, parts, tolerance)


@contextlib.contextmanager
def _outputs(module: torch.nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Record the outputs of each layer that contains no other layers."""
    outputs: list[tuple[str, Tensor]] = []

    def recorder(name: str) -> Callable[..., None]:
        def hook(layer: Any, args: Any, result: Any) -> None:
            for leaf in nested.flatten(result):
                if isinstance(leaf, Cut):
                    leaf = leaf.session.whole(leaf)
                if isinstance(leaf, Tensor):
                    outputs.append((name, leaf.detach().clone()))

        return hook

    hooks = [
        layer.register_forward_hook(recorder(f"{name or 'module'} ({type(layer).__name__})"))
        for name, layer in module.named_modules()
        if not any(layer.children())
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def _scalar(result: Any) -> Tensor:
    """Return a loss to which all elements contribute differently."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for leaf in nested.flatten(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype, device=leaf.device)
            total = total + (leaf * weights.reshape(leaf.shape)).sum().cpu()
    return total


# -- memory ----------------------------------------------------------------------------------


def memory_report(
    copies: Iterable[ModelCopy], x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> MemoryReport:
    """Count the bytes that :meth:`Split.memory_report` describes."""
    kept, weights = [], []
    # The modules are copies, so their statistics and other buffers may change.
    for module, _, compute in copies:
        weights.append(sum(parameter.nbytes for parameter in module.parameters()))
        count = Kept([x, *module.parameters(), *module.buffers()])
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
        with torch.enable_grad(), _same_numbers(x), hooks:
            result, joined = compute(x, args, kwargs, count)
            kept.append(count.sizes())
        del result
    whole, pieces = kept
    return MemoryReport(whole, pieces, count.piece, joined, (weights[0], weights[1]))
