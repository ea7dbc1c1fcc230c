"""Equal weights and equal gradients, made at once: what a loop of synchronous SGD takes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from collective.errors import InvalidArgumentError
from collective.memory.overlap import call_in_place

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.ops import Op

__all__ = [
    "all_reduce_sparse",
    "broadcast_state",
    "broadcast_tensors",
    "empty_sparse",
    "sum_sparse",
    "sync_gradients",
    "sync_initial_weights",
]


def broadcast_state(module: nn.Module, comm: Communicator, root: int = 0) -> None:
    """Give every rank the parameters and buffers of ``root``.

    Raises:
        MismatchError: the ranks' modules have not the same.
    """
    tensors = [p.detach() for p in module.parameters()]
    broadcast_tensors([*tensors, *module.buffers()], comm, root)


def broadcast_tensors(tensors: list[torch.Tensor], comm: Communicator, root: int = 0) -> None:
    """Give every rank some tensors of ``root``, in one message."""
    if tensors:
        call_in_place(partial(comm.broadcast, tensors, root=root), tensors)


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


def empty_sparse(like: torch.Tensor, sparse_dim: int = 1) -> torch.Tensor:
    """Return a sparse tensor without elements, by default as an embedding's gradient is.

    Args:
        like: a dense one of its shape, dtype and device.
        sparse_dim: how many of the first axes are indexed.
    """
    indices = torch.zeros((sparse_dim, 0), dtype=torch.int64, device=like.device)
    values = like.new_zeros((0, *like.shape[sparse_dim:]))
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def all_reduce_sparse(x: torch.Tensor, comm: Communicator, op: Op = "sum") -> torch.Tensor:
    """Return the elementwise sum of the ranks' sparse tensors.

    Indices and values are gathered, so that what is sent grows with the elements that are
    there on all ranks, and not with the shape.

    Collective: every rank calls it, with one shape and dtype.

    Args:
        x: in COO format; coalesced or not; each rank has as many elements as it likes.
        op: ``"sum"`` or ``"avg"``.

    Returns:
        A coalesced tensor of the same shape and dtype.

    Raises:
        InvalidArgumentError: another op, or a dense tensor.
    """
    if op not in ("sum", "avg") or x.layout is not torch.sparse_coo:
        raise InvalidArgumentError(
            f"all_reduce_sparse: op {op!r} of a {x.layout} tensor; 'sum' or 'avg' of one in COO "
            f"format [rank {comm.rank} of {comm.size}]. Use x.to_sparse(), or all_reduce."
        )
    found = sum_sparse(x, comm)
    return found / comm.size if op == "avg" else found


def sum_sparse(x: torch.Tensor, comm: Communicator, timeout: float | None = None) -> torch.Tensor:
    """Return the sum of the ranks' tensors in COO format, coalesced; collective."""
    mine = x.detach().coalesce()
    # One column an element, so that what is gathered is cut along the first axis.
    indices = comm.all_gather(mine.indices().t().contiguous(), timeout=timeout)
    values = comm.all_gather(mine.values().contiguous(), timeout=timeout)
    return torch.sparse_coo_tensor(indices.t(), values, x.shape, check_invariants=False).coalesce()
