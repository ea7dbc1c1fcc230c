"""Sums of sparse tensors over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from collective.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collective.communicator import Communicator
    from collective.ops import Op

__all__ = ["all_reduce_sparse", "empty_sparse"]


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
    mine = x.detach().coalesce()
    # One column an element, so that what is gathered is cut along the first axis.
    indices = comm.all_gather(mine.indices().t().contiguous())
    values = comm.all_gather(mine.values().contiguous())
    found = torch.sparse_coo_tensor(indices.t(), values, x.shape, check_invariants=False).coalesce()
    return found / comm.size if op == "avg" else found
