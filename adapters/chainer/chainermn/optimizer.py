"""ChainerMN's double-buffering optimizer, without a GPU's streams."""

from __future__ import annotations

from typing import Any

from chainermn.optimizers import _MultiNodeOptimizer

from .communicator import CollectiveCommunicator
from .gradients import PackedGradients

__all__ = ["DoubleBufferingOptimizer"]


class DoubleBufferingOptimizer(_MultiNodeOptimizer):  # type: ignore[misc]  # Chainer has no types
    """Optimizer that averages the gradients of a step while the next step computes its own.

    As in ChainerMN, a step applies the means of the previous step. The first ``update()`` gives
    all ranks rank 0's parameters. The second one only starts the reduction of its gradients. Means
    that are in flight when training ends are not applied.

    Args:
        actual_optimizer: optimizer that applies the means.
        communicator: communicator that connects the ranks.
        zero_fill: whether gradients that are None count as zeros.
    """

    def __init__(
        self, actual_optimizer: Any, communicator: CollectiveCommunicator, zero_fill: bool
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill)
        # Set in the instance's dict, because the base class's __setattr__ passes attributes on to
        # the optimizer inside.
        own = self.__dict__
        own["_buffers"] = [PackedGradients(communicator.comm) for _ in range(2)]
        own["_under_way"] = False

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Compute gradients, if ``lossfun`` is given, and apply the means of the previous step."""
        target = self.target
        if lossfun is not None:
            loss = lossfun(*args, **kwds)
            if getattr(self, "_use_cleargrads", True):
                target.cleargrads()
            else:
                target.zerograds()
            loss.backward(loss_scale=self.actual_optimizer._loss_scale)
            del loss
        own = self.__dict__
        before, current = own["_buffers"]
        arrived = own["_under_way"]
        if self.is_changed(target):
            if arrived:
                before.wait()
            own["_under_way"] = False
            self.communicator.bcast_data(target)
            return
        wire = self.communicator.get_config("allreduce_grad_dtype")
        current.begin(target, self.zero_fill, wire, async_op=True)
        own["_buffers"], own["_under_way"] = [current, before], True
        if arrived:
            before.unpack()
            self.actual_optimizer.update(None, *args, **kwds)
