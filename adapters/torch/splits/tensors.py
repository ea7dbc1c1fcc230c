"""What is done with PyTorch's tensors that are cut, in turn and over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from collective.adapters.torch.functional import all_reduce
from collective.adapters.torch.tape import Tape
from collective.communicator import Communicator
from collective.training.differentiable import CollectiveStep
from collective.training.splits.arrays import Arrays

__all__ = ["Tensors"]

Tensor = torch.Tensor


class Tensors(Arrays):
    """Tensors, on a rank and between ranks."""

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
        # Of no rows the first one may lie behind the end.
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
        found: tuple[Any, ...]
        if self._kept is not None:  # which has pieces computed once, with all that they keep
            found = self._kept.compute_piece(function, arrays)
        else:
            # Random masks are drawn when a call is recorded, so that there is no state to restore.
            found = checkpoint(function, *arrays, use_reentrant=False, preserve_rng_state=False)
        return found

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
        # Twice over the rows, so that no two large numbers are subtracted.
        return mean, average((y - near(mean)[..., None]).square().sum(-1))

    def seed(self) -> int:
        return int(torch.randint(2**62, ()))

    def generator(self, seed: int | None) -> torch.Generator | None:
        return None if seed is None else torch.Generator().manual_seed(seed)

    def used_together(self, arrays: Sequence[Tensor], comm: Communicator) -> Sequence[Tensor]:
        if not torch.is_grad_enabled():
            return arrays
        apply: Any = _Used.apply
        found: tuple[Tensor, ...] = apply(comm, *arrays)
        return found

    def record(self, node: CollectiveStep, array: Tensor) -> Tensor:
        return Tape.record(node, array)


class _Used(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Tensors that all ranks have and use: their gradients are summed in one call."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        # The ranks made the same calls, so that they have gradients of the same tensors.
        there = [each for each in gradients if each is not None]
        summed = iter(_summed(there, ctx.comm))
        return None, *(None if each is None else next(summed) for each in gradients)


def _summed(gradients: list[Tensor], comm: Communicator) -> list[Tensor]:
    """Return the sums of the ranks' gradients, which can be differentiated again."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in gradients):
        return [all_reduce(each, comm) for each in gradients]
    found: list[Tensor] = comm.all_reduce(gradients) if gradients else []
    return found
