"""Loop over a rank's virtual shards: one forward and one backward pass for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from collective.errors import GradientError, UnsupportedError
from collective.training.gradients import Gradients
from collective.training.shard_passes import ShardPasses, StateFold

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
    # Imported here, so that programs without shards run no code of it.
    from .splits.split import Split

    for name, inner in module.named_modules():
        if isinstance(inner, Split):
            raise UnsupportedError(
                f"DistributedDataParallel: {name or 'the module'} is a Split, whose pieces are on "
                "several ranks, with shards. These ranks could hold different numbers of shards, "
                "and would wait for each other. Leave one of them out."
            )
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
        passes = self.passes
        changing = list(self._module.buffers()) if self._module.training else []
        buffers = StateFold(passes, changing, torch.stack)
        self._forget_gradients()
        self.running = True
        try:
            for shard in passes:
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
            if not passes.shards.mine:
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
