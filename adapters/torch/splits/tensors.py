"""Operations on PyTorch's tensors that are cut, in turn and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from collective import Communicator
from collective.adapters.torch.functional import all_reduce
from collective.adapters.torch.tape import Tape
from collective.inner import differentiable
from collective.training.splits.arrays import Arrays

Tensor = torch.Tensor


class Tensors(Arrays):
    """Operations on tensors, on one rank and between ranks."""

    def entering(self, x: Tensor) -> Tensor:
        return x

    def bare(self, x: Tensor) -> Tensor:
        return x.detach()

    def is_array(self, x: Any) -> bool:
        return isinstance(x, Tensor)

    def has_gradient(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or nn.parameter.is_lazy(x):
            return False
        return torch.is_grad_enabled() and x.requires_grad

    def slice(self, array: Tensor, dimension: int, rows: range) -> Tensor:
        # An empty range may start behind the end of the array.
        return array.narrow(dimension, rows.start if rows else 0, len(rows))

    def take(self, array: Tensor, dimension: int, rows: Any) -> Tensor:
        return array.index_select(dimension, torch.as_tensor(rows, device=array.device))

    def concatenate(self, arrays: Sequence[Tensor], dimension: int) -> Tensor:
        return torch.cat(list(arrays), dimension)

    join_bare = concatenate

    def pad(self, array: Tensor, widths: Sequence[tuple[int, int]], fill: float) -> Tensor:
        return functional.pad(array, [n for pair in reversed(widths[2:]) for n in pair], value=fill)

    def tied(self, result: Tensor, *arrays: Tensor) -> Tensor:
        for array in arrays:
            result = result + array.reshape(-1)[:0].sum()
        return result

    def numbers(self, like: Tensor, dimension: int, numbers: Any) -> Tensor:
        return torch.from_numpy(numbers).to(like).reshape(-1, *(1,) * (like.dim() - dimension - 1))

    def full_bare(self, like: Tensor, shape: Sequence[int], fill: float) -> Tensor:
        return like.new_full(tuple(shape), fill)

    def copy_bare(self, array: Tensor) -> Tensor:
        return array.clone(memory_format=torch.contiguous_format)

    def checkpoint(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return function(*arrays)
        results: tuple[Any, ...]
        if self._kept is not None:  # the counter computes each piece once, and counts its tensors
            results = self._kept.compute_piece(function, arrays)
        else:
            # Random masks are drawn when a call is recorded, so that there is no state to restore.
            results = checkpoint(function, *arrays, use_reentrant=False, preserve_rng_state=False)
        return results

    def moments(
        self,
        x: Tensor,
        groups: int | None,
        dtype: Any,
        average: Callable[[Any], Any],
        near: Callable[[Any], Any] | None,
    ) -> tuple[Tensor, Tensor]:
        x = x.to(dtype)
        if groups is None:
            y = x.transpose(0, 1).reshape(1, x.shape[1], -1)
        else:
            y = x.reshape(x.shape[0], groups, x.shape[1] // groups * math.prod(x.shape[2:]))
        if near is None:
            variance, mean = torch.var_mean(y, -1, correction=0)
            return mean, variance
        mean = average(y.sum(-1))
        # A second pass over the rows avoids the subtraction of two large numbers.
        return mean, average((y - near(mean)[..., None]).square().sum(-1))

    def seed(self) -> int:
        return int(torch.randint(2**62, (), device="cpu"))

    def generator(self, seed: int | None) -> torch.Generator | None:
        return None if seed is None else torch.Generator().manual_seed(seed)

    def used_together(self, arrays: Sequence[Tensor], comm: Communicator) -> Sequence[Tensor]:
        if not torch.is_grad_enabled():
            return arrays
        apply: Any = _Used.apply
        used: tuple[Tensor, ...] = apply(comm, *arrays)
        return used

    def record(self, node: differentiable.CollectiveStep, array: Tensor) -> Tensor:
        return Tape().record(node, array)


class _Used(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Tensors that all ranks have and use: their gradients are summed over ranks in one call."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # All ranks made the same calls, so they have gradients of the same tensors.
        present = [gradient for gradient in gradients if gradient is not None]
        summed = iter(_summed(present, ctx.comm))
        return None, *(None if gradient is None else next(summed) for gradient in gradients)


def _summed(gradients: list[Tensor], comm: Communicator) -> list[Tensor]:
    """Return the sums of the ranks' gradients, which can be differentiated again."""
    if torch.is_grad_enabled() and any(gradient.requires_grad for gradient in gradients):
        return [all_reduce(gradient, comm) for gradient in gradients]
    sums: list[Tensor] = comm.all_reduce(gradients) if gradients else []
    return sums
