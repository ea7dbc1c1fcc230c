"""Loop over a rank's virtual shards: one forward and one backward pass for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from collective.errors import GradientError, UnsupportedError
from collective.shards import ShardFold
from collective.training.gradients import Gradients
from collective.training.shard_passes import ShardPasses

from .batch_norm import SyncBatchNorm

__all__ = ["ShardLoop", "refuse_with_shards"]


def refuse_with_shards(module: nn.Module, **chosen: bool) -> None:
    """Refuse what cannot be combined with virtual shards.

    Args:
        module: module that is wrapped.
        chosen: arguments of the wrapper, and whether the caller passed them.
    """
    for name in (name for name, passed in chosen.items() if passed):
        raise UnsupportedError(
            f"DistributedDataParallel: {name} with shards. Leave one of them out: the passes of "
            "shards always use all parameters, and their average is that over the shards."
        )
    for name, inner in module.named_modules():
        if isinstance(inner, SyncBatchNorm):
            raise UnsupportedError(
                f"DistributedDataParallel: {name} is a SyncBatchNorm, which joins the ranks' "
                "batches, with shards. Use PyTorch's own BatchNorm, whose statistics are then "
                "those of each shard."
            )
        if getattr(inner, "sparse", False) is True:
            raise UnsupportedError(
                f"DistributedDataParallel: {name} has sparse gradients, with shards. Make it with "
                "sparse=False."
            )


class ShardLoop:
    """Loop over the shards of this rank, for a wrapper of a module.

    Args:
        module: wrapped module.
        parameters: parameters in the order of the engine.
        gradients: engine that reduces the gradients by ``passes``.
        passes: passes of the shards.

    Attributes:
        running: whether the program is in the body of the loop.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], gradients: Gradients,
        passes: ShardPasses,
    ) -> None:  # fmt: skip
        self._module = module
        self._parameters = parameters
        self._gradients = gradients
        self.passes = passes
        self.running = False
        self._finished = False

    def __iter__(self) -> Iterator[int]:
        passes, mine = self.passes, self.passes.shards.mine
        passes.begin()
        buffers = _BufferFold(self._module, passes)
        self._forget_gradients()
        self.running = True
        try:
            for shard in mine:
                passes.is_last = shard == mine[-1]
                buffers.restore()
                self._finished = False
                yield shard
                if not self._finished:
                    raise GradientError(
                        f"DistributedDataParallel: the body of shard {shard} made no backward pass "
                        f"[rank {passes.comm.rank} of {passes.comm.size}]. Make one forward and "
                        "one backward pass for each shard of each_shard()."
                    )
                buffers.add()
                if not passes.is_last:
                    self._forget_gradients()
            if not mine:
                self._gradients.shadow()
                for parameter, view in zip(self._parameters, self._gradients.views):
                    parameter.grad = view
            buffers.reduce()
        finally:
            self.running = False

    def finish_pass(self) -> bool:
        """Note the end of a backward pass; return whether further passes of this rank follow."""
        if self._finished:
            raise GradientError(
                "DistributedDataParallel: a second backward pass for one shard "
                f"[rank {self.passes.comm.rank} of {self.passes.comm.size}]. Make one backward "
                "pass for each shard, of the sum of its losses."
            )
        self._finished = True
        return not self.passes.is_last

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class _BufferFold:
    """Buffers of a module in training, such as the running statistics of batch normalisation.

    The forward pass of every shard begins with the values from before the step. After the step
    floating-point buffers are the average over all shards, and integers the maximum. So they do not
    depend on which rank computed a shard, nor on how many a rank computed.

    Args:
        module: module with the buffers; if it is not in training, its buffers stay alone.
        passes: passes of the shards.
    """

    def __init__(self, module: nn.Module, passes: ShardPasses) -> None:
        self._passes = passes
        self._groups: list[tuple[list[torch.Tensor], torch.Tensor, ShardFold]] = []
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in module.buffers() if module.training else ():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for dtype, buffers in by_dtype.items():
            before = _joined(buffers)
            op = "avg" if dtype.is_floating_point or dtype.is_complex else "max"
            self._groups.append((buffers, before, ShardFold(passes.shards, op, like=before)))

    def restore(self) -> None:
        """Set the buffers to their values from before the step."""
        for buffers, before, _ in self._groups:
            _separate(before, buffers)

    def add(self) -> None:
        """Add the buffers after the forward pass of a shard."""
        for buffers, _, fold in self._groups:
            fold.add(_joined(buffers))

    def reduce(self) -> None:
        """Set the buffers to the fold over all shards. Collective."""
        passes = self._passes
        for buffers, _, fold in self._groups:
            folded = passes.comm.all_reduce(fold, op=fold.op, order=passes.shards)
            _separate(folded, buffers)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _separate(joined: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, part in zip(tensors, joined.split([t.numel() for t in tensors])):
            tensor.copy_(part.view(tensor.shape))
