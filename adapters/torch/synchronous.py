"""Functions for a loop of synchronous SGD: they make weights and gradients equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch import nn

from collective import InvalidArgumentError
from collective.inner import Op, StateEntry, call_in_place, comm_or_current, refuse_differences

if TYPE_CHECKING:
    from collective import Communicator


def broadcast_state(module: nn.Module, comm: Communicator | None = None, root: int = 0) -> None:
    """Give every rank the parameters and buffers of ``root``.

    Args:
        comm: ranks that take part; None: those of the current communicator.

    Raises:
        MismatchError: the parameters or buffers of the ranks' modules differ in number, shape or
            dtype.
    """
    comm = comm_or_current(comm, "broadcast_state")
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    broadcast_tensors({**parameters, **dict(module.named_buffers())}, comm, root)


def broadcast_tensors(
    tensors: Mapping[str, torch.Tensor], comm: Communicator, root: int = 0
) -> None:
    """Give every rank the values of ``root`` for some tensors, in one message.

    The names are a part of the call, so the error that ranks with other tensors get has them.
    """

    def call(out: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        results = None if out is None else dict(zip(tensors, out))
        named: dict[str, torch.Tensor] = comm.broadcast(dict(tensors), root=root, out=results)
        return list(named.values())

    if tensors:
        call_in_place(call, list(tensors.values()))


def sync_initial_weights(
    module: nn.Module, comm: Communicator | None = None, root: int = 0
) -> None:
    """Give every rank the parameters and buffers of ``root``.

    Collective: every rank calls it, with the same module.

    Args:
        comm: ranks that take part; None: those of the current communicator.

    Raises:
        MismatchError: the parameters or buffers of the ranks' modules differ in number, shape or
            dtype.
    """
    broadcast_state(module, comm_or_current(comm, "sync_initial_weights"), root)


def sync_gradients(
    parameters: nn.Module | Iterable[nn.Parameter],
    comm: Communicator | None = None,
    op: Op = "avg",
) -> None:
    """Average or sum the gradients over the ranks; call it between ``backward()`` and ``step()``.

    Gradients of the same dtype are sent in one message. :class:`DistributedDataParallel` starts
    earlier and makes no copies. If a parameter has a gradient on some ranks, it counts as zeros on
    the other ranks. If it is sparse on some ranks and dense on others, it becomes dense.

    Collective: every rank calls it, with the same parameters.

    Args:
        parameters: parameters, or a module that has them. Parameters that require no gradient are
            ignored.
        comm: communicator that connects the ranks; None: the current communicator.
        op: ``"avg"`` or ``"sum"``.

    Raises:
        MismatchError: the ranks' parameters differ; every rank raises it.
    """
    comm = comm_or_current(comm, "sync_gradients")
    if isinstance(parameters, nn.Module):
        named = list(parameters.named_parameters())
    else:
        named = [(f"parameter {number}", p) for number, p in enumerate(parameters)]
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    described = [StateEntry(name, parameter).layout for name, parameter in named]
    trained = [parameter for _, parameter in named]
    # For each parameter: the number of indexed axes of a sparse gradient, -1 for a dense gradient,
    # None without a gradient.
    kinds_here = [None if p.grad is None else _sparse_dim(p.grad) for p in trained]
    digest = blake2b(repr(described).encode(), digest_size=16).digest()
    replies = comm.all_gather_object((digest, kinds_here))
    if any(other != replies[0][0] for other, _ in replies):
        every = comm.all_gather_object(described)
        remedy = "Pass the same parameters on every rank, with the same ones frozen."
        refuse_differences("sync_gradients", "parameters", every, comm, remedy)
    columns = zip(*(theirs for _, theirs in replies))
    kinds = [_joint_kind({kind for kind in column if kind is not None}) for column in columns]
    dense = []
    for parameter, kind in zip(trained, kinds):
        if kind is None:
            continue
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros if kind < 0 else empty_sparse(zeros, kind)
        if kind < 0:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            dense.append(parameter.grad)
        else:
            parameter.grad = all_reduce_sparse(parameter.grad, comm, op)
    if dense:
        comm.all_reduce(dense, op=op, out=dense)


def _joint_kind(kinds: set[int]) -> int | None:
    """Return how the ranks send a gradient, given its kinds on the ranks that have one."""
    return -1 if len(kinds) > 1 else next(iter(kinds), None)


def _sparse_dim(grad: torch.Tensor) -> int:
    return grad.sparse_dim() if grad.is_sparse else -1


def empty_sparse(like: torch.Tensor, sparse_dim: int = 1) -> torch.Tensor:
    """Return a sparse tensor without elements, by default in the form of an embedding's gradient.

    Args:
        like: dense tensor with the shape, dtype and device of the result.
        sparse_dim: number of leading axes that are indexed.
    """
    indices = torch.zeros((sparse_dim, 0), dtype=torch.int64, device=like.device)
    values = like.new_zeros((0, *like.shape[sparse_dim:]))
    return torch.sparse_coo_tensor(
        indices, values, like.shape, device=like.device, check_invariants=False
    )


def all_reduce_sparse(
    x: torch.Tensor, comm: Communicator | None = None, op: Op = "sum"
) -> torch.Tensor:
    """Return the elementwise sum or average of the ranks' sparse tensors.

    The ranks gather indices and values. So the amount of data depends on the number of elements on
    all ranks, not on the shape.

    Collective: every rank calls it, with the same shape and dtype.

    Args:
        x: tensor in COO format, coalesced or not. Ranks may have different numbers of elements.
        comm: communicator that connects the ranks; None: the current communicator.
        op: ``"sum"`` or ``"avg"``.

    Returns:
        A coalesced tensor of the same shape and dtype.

    Raises:
        InvalidArgumentError: the op is another one, or the tensor is not in COO format.
    """
    comm = comm_or_current(comm, "all_reduce_sparse")
    if op not in ("sum", "avg") or x.layout is not torch.sparse_coo:
        raise InvalidArgumentError(
            f"all_reduce_sparse: got op {op!r} and a {x.layout} tensor (expected 'sum' or 'avg', "
            f"and a tensor in COO format) [rank {comm.rank} of {comm.size}]. Use x.to_sparse(), or "
            "all_reduce."
        )
    total = sum_sparse(x, comm)
    return total / comm.size if op == "avg" else total


def sum_sparse(x: torch.Tensor, comm: Communicator, timeout: float | None = None) -> torch.Tensor:
    """Return the coalesced sum of the ranks' tensors in COO format. Collective."""
    mine = x.detach().coalesce()
    # The indices are transposed to one row per element, because all_gather joins along axis 0.
    indices = comm.all_gather(mine.indices().t().contiguous(), timeout=timeout)
    values = comm.all_gather(mine.values().contiguous(), timeout=timeout)
    total = torch.sparse_coo_tensor(
        indices.t(), values, x.shape, device=x.device, check_invariants=False
    )
    return total.coalesce()
