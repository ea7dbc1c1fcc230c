"""What a hand-written loop of synchronous SGD adds: equal weights, equal gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from .distributed_data_parallel import broadcast_state
from .sparse import all_reduce_sparse, empty_sparse

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.ops import Op

__all__ = ["sync_gradients", "sync_initial_weights"]


def sync_initial_weights(module: nn.Module, comm: Communicator, root: int = 0) -> None:
    """Give every rank the parameters and buffers of ``root``.

    Collective: every rank calls it, with the same module.

    Raises:
        MismatchError: the ranks' modules have not the same.
    """
    broadcast_state(module, comm, root)


def sync_gradients(
    parameters: nn.Module | Iterable[nn.Parameter], comm: Communicator, op: Op = "avg"
) -> None:
    """Fold the gradients over the ranks, between ``backward()`` and ``step()``.

    Those of one type are one message. :class:`DistributedDataParallel` starts earlier and
    copies nothing. A parameter without a gradient here counts as one with zeros if any rank
    has one.

    Collective: every rank calls it, with the same parameters.

    Args:
        parameters: or the module that has them; those that require no gradient are left out.
        op: ``"avg"`` or ``"sum"``.
    """
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    trained = [parameter for parameter in given if parameter.requires_grad]
    # How many axes are indexed by a sparse one, -1 of a dense one, None where there is none.
    mine = [None if p.grad is None else _sparse_dim(p.grad) for p in trained]
    every = zip(*comm.all_gather_object(mine))
    kinds = [next((kind for kind in each if kind is not None), None) for each in every]
    dense = []
    for parameter, kind in zip(trained, kinds):
        if kind is None:
            continue
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros if kind < 0 else empty_sparse(zeros, kind)
        if kind < 0:
            dense.append(parameter.grad)
        else:
            parameter.grad = all_reduce_sparse(parameter.grad, comm, op)
    if dense:
        comm.all_reduce(dense, op=op, out=dense)


def _sparse_dim(grad: torch.Tensor) -> int:
    return grad.sparse_dim() if grad.is_sparse else -1
