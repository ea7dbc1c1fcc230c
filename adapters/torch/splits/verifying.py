"""Comparison of a split module with the whole one: results, gradients, memory for backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from collective.inner import Filters, nested, whole_gradients
from collective.training.splits import cuts, report, session

from .session import Cut

Tensor = torch.Tensor


@contextlib.contextmanager
def _same_numbers(x: Tensor) -> Iterator[None]:
    """Restore the state of PyTorch's random number generators after the body."""
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices):
        yield


# -- results ---------------------------------------------------------------------------------


def computation(
    module: torch.nn.Module, filters: Filters | None, compute: cuts.Compute, x: Tensor,
    args: Sequence[Any],
) -> report.Computation:  # fmt: skip
    """Compute a module in float64, for the comparison that :meth:`Split.verify` describes."""
    module.double()
    inputs = _double(x).requires_grad_()
    with _same_numbers(x), _outputs(module) as outputs:
        result, joined = compute(inputs, list(map(_double, args)), {})
    torch.autograd.backward(_scalar(result))
    gradients = {"input": inputs.grad, **whole_gradients(module.named_parameters(), filters)}
    return report.Computation(outputs, gradients, joined)


def _double(value: Any) -> Any:
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().double() if is_real else value


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


def memory(
    module: torch.nn.Module, compute: cuts.Compute, x: Tensor, args: Sequence[Any],
    kwargs: dict[str, Any],
) -> tuple[dict[str, int], int, tuple[str, ...], int]:  # fmt: skip
    """Count the bytes that :meth:`Split.memory_report` describes, of a module that may change."""
    weights = sum(parameter.nbytes for parameter in module.parameters())
    count = Kept([x, *module.parameters(), *module.buffers()])
    hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)
    with torch.enable_grad(), _same_numbers(x), hooks:
        _, joined = compute(x, args, kwargs, count)
    return count.sizes(), count.piece, joined, weights


class Kept:
    """Counter of the bytes that a backward pass keeps; tensors with the same memory count once.

    Args:
        there: tensors that are not counted.

    Attributes:
        piece: number of bytes of the recomputed piece that keeps most.
    """

    def __init__(self, there: Sequence[Tensor]) -> None:
        self.piece = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in there}
        self._found: dict[str, int] = {}
        # References to the counted tensors. Without them, a later tensor could get the same address
        # and would not be counted.
        self._alive: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """Count a tensor, and return it."""
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._seen and not tensor.is_meta:
            self._seen.add(memory.data_ptr())
            self._alive.append(tensor.detach())
            layer = session.names.current
            self._found[layer] = self._found.get(layer, 0) + memory.nbytes()
        return tensor

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes of each layer."""
        return dict(self._found)

    def compute_piece(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        """Compute a piece that keeps only ``arrays``, and count the bytes of its recomputation."""
        for array in arrays:
            self(array)
        outer = self._seen, self._found, self._alive, self.piece
        self._seen, self._found, self._alive, self.piece = set(self._seen), {}, [], 0
        try:
            result = function(*arrays)
            inside = sum(self._found.values()) + self.piece
        finally:
            self._seen, self._found, self._alive, self.piece = outer
        self.piece = max(self.piece, inside)
        return result
