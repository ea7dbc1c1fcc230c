"""PyTorch's tensors, cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from collective.adapters.torch import functional
from collective.adapters.torch.tape import Tape
from collective.communicator import Communicator
from collective.training.differentiable import CollectiveStep
from collective.training.splits.blocks import Value
from collective.training.splits.exchanges import Exchanges
from collective.training.splits.over_ranks import OverRanks

from .serial import Tensors, wide

__all__ = ["TensorExchanges", "TensorsOverRanks"]

Tensor = torch.Tensor


class TensorExchanges(Tensors, Exchanges):
    """Tensors between ranks."""

    def entering(self, x: Tensor) -> Tensor:
        return x

    def on_host(self, x: Tensor) -> Any:
        return x.detach().cpu().numpy()

    def has_gradient(self, x: Any) -> bool:
        return isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad

    def used_together(self, arrays: Sequence[Tensor], comm: Communicator) -> Sequence[Tensor]:
        if not torch.is_grad_enabled():
            return arrays
        apply: Any = _Used.apply
        found: tuple[Tensor, ...] = apply(comm, *arrays)
        return found

    def record(self, node: CollectiveStep, array: Tensor) -> Tensor:
        return Tape.record(node, array)

    def join_bare(self, arrays: Sequence[Tensor], dimension: int) -> Tensor:
        return torch.cat(list(arrays), dimension)

    def copy_bare(self, array: Tensor) -> Tensor:
        return array.clone(memory_format=torch.contiguous_format)

    def zeros_bare(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        return like.new_zeros(shape)


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
        summed = iter(used_gradients(there, ctx.comm))
        return None, *(None if each is None else next(summed) for each in gradients)


def used_gradients(gradients: list[Tensor], comm: Communicator) -> list[Tensor]:
    """Return the sums of the ranks' gradients, which can be differentiated again."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in gradients):
        return [functional.all_reduce(each, comm) for each in gradients]
    found: list[Tensor] = comm.all_reduce(gradients) if gradients else []
    return found


class TensorsOverRanks(OverRanks):
    """Makes the calls of a forward pass on this rank's block of every tensor."""

    _generator: torch.Generator | None = None

    def moments(self, value: Value, groups: int | None) -> tuple[Tensor, Tensor, int]:
        x = wide(self._layered.piece(value))
        axes = range(len(value.lengths))
        if groups is None:
            y = x.transpose(0, 1).reshape(x.shape[1], -1)
            count = math.prod(value.lengths)
        else:
            each = x.shape[1] // groups
            y = x.reshape(x.shape[0], groups, each * math.prod(x.shape[2:]))
            count = each * math.prod(value.lengths[1:])
            axes = axes[1:]

        def mean(y: Tensor) -> Tensor:
            found: Tensor = self._layered.added(y.sum(-1), axes) / count
            if groups is not None:
                found = self._layered.joined(found, 0, value.lengths[0])
            return found

        average = mean(y)
        near = self.shared(value, False)(average)
        if groups is not None:
            rows = self._grid.block(value.lengths)[0]
            near = near.narrow(0, rows.start, len(rows))
        # Twice over the rows, so that no two large numbers are subtracted.
        return average, mean((y - near[..., None]).square()), count

    def generator(self) -> torch.Generator:
        """Return random numbers that are the same on all ranks, as masks have to be."""
        if self._generator is None:
            seed = int(torch.randint(2**62, ()))
            self._generator = torch.Generator()
            self._generator.manual_seed(self._grid.comm.broadcast_object(seed))
        return self._generator
