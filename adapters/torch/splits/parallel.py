"""PyTorch's tensors, cut over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collective.adapters.torch import functional
from collective.adapters.torch.tape import Tape
from collective.communicator import Communicator
from collective.training.differentiable import Step as Node
from collective.training.splits.blocks import Step, Value
from collective.training.splits.chained import Chained
from collective.training.splits.exchanges import Exchanges
from collective.training.splits.layered import Grid, Layered
from collective.training.splits.options import check_same

from .filters import ModuleFilters
from .serial import Tensors

__all__ = ["OverRanks", "TensorExchanges"]

Tensor = torch.Tensor


class TensorExchanges(Tensors, Exchanges):
    """Tensors between ranks."""

    def used(self, array: Tensor, comm: Communicator) -> Tensor:
        return used([array], comm)[0]

    def record(self, node: Node, array: Tensor) -> Tensor:
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


def used(tensors: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """Return tensors that all ranks have, with the ranks' gradients summed."""
    apply: Any = _Used.apply
    if not torch.is_grad_enabled():
        return tuple(tensors)
    found: tuple[Tensor, ...] = apply(comm, *tensors)
    return found


class OverRanks:
    """Makes the calls of a forward pass on this rank's block of every tensor.

    Args:
        grid: who has which block.
        layered: makes the calls.
        parameters: of the module; their gradients are summed together.
        from_pieces: whether the input is this rank's rows.
        to_pieces: whether results are.
        filters: which parameters this rank has a piece of.
    """

    def __init__(
        self,
        grid: Grid,
        layered: Layered | Chained,
        parameters: Sequence[Tensor],
        from_pieces: bool,
        to_pieces: bool,
        filters: ModuleFilters | None = None,
    ) -> None:
        self._grid = grid
        self._filters = filters
        self._layered = layered
        self._parameters = list(parameters)
        self._from_pieces, self._to_pieces = from_pieces, to_pieces
        self._versions: dict[tuple[int, bool], dict[int, Tensor]] = {}
        self._generator: torch.Generator | None = None

    def enter(self, array: Tensor) -> Value:
        lengths = (*array.shape[:1], *array.shape[2:])
        if self._from_pieces:
            return self._layered.enter_piece(array, lengths)
        if self._grid.comm.check == "always":
            check_same(self._grid.comm, array.detach().cpu().numpy())
        return self.enter_whole(array)

    def enter_whole(self, array: Tensor) -> Value:
        value = Value((*array.shape[:1], *array.shape[2:]), array=array)
        self._layered.enter(value)
        return value

    def add(self, step: Step, lengths: Sequence[int]) -> Value:
        return self._layered.add(step, lengths)

    def whole(self, values: Sequence[Value]) -> list[Tensor]:
        return [self._layered.whole(value) for value in values]

    def results(self, values: Sequence[Value]) -> list[Tensor]:
        if self._to_pieces:
            return [self._layered.piece(value) for value in values]
        return self.whole(values)

    def moments(self, value: Value, groups: int | None) -> tuple[Tensor, Tensor, int]:
        x = self._layered.piece(value)
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

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        axes = len(value.lengths)

        def share(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or not torch.is_grad_enabled():
                return tensor
            if not tensor.requires_grad:
                return tensor
            known = self._version(axes, in_part)
            found = known.get(id(tensor))
            if found is None:
                (found,) = self._through([tensor], axes, in_part)
            return found

        return share

    def _version(self, axes: int, in_part: bool) -> dict[int, Tensor]:
        known = self._versions.get((axes, in_part))
        if known is None:
            wanted = [each for each in self._parameters if each.requires_grad]
            if in_part and self._filters is not None:  # each rank's is a gradient of its own
                wanted = [each for each in wanted if self._filters.share(each) is None]
            found = self._through(wanted, axes, in_part)
            known = self._versions[axes, in_part] = dict(zip(map(id, wanted), found))
        return known

    def _through(self, tensors: Sequence[Tensor], axes: int, in_part: bool) -> Sequence[Tensor]:
        groups = [*self._grid.groups[:axes], self._grid.channel_group if in_part else None]
        for group in groups:
            if group is not None:
                tensors = used(tensors, group)
        return tensors

    def layout(self, weight: Any, bias: Any) -> str | None:
        return None if self._filters is None else self._filters.layout(weight, bias)

    def parameter(self, x: Any) -> Any:
        share = None if self._filters is None else self._filters.share(x)
        if share is None or self._filters is None:
            return x
        # Every rank has the same gradient of it, or that is summed before it gets here.
        counts = share.counts
        return TensorExchanges().joined(x, self._filters.group, share.dimension, counts)

    def generator(self) -> torch.Generator:
        """Return random numbers that are the same on all ranks, as masks have to be."""
        if self._generator is None:
            seed = int(torch.randint(2**62, ()))
            self._generator = torch.Generator()
            self._generator.manual_seed(self._grid.comm.broadcast_object(seed))
        return self._generator
