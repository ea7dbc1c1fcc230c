"""PyTorch's tensors, cut in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from collective.training.splits.blocks import Value
from collective.training.splits.in_turn import InTurn

if TYPE_CHECKING:
    from .kept import Kept

__all__ = ["Tensors", "TensorsInTurn", "moments", "wide"]

Tensor = torch.Tensor


class Tensors:
    """What the framework-neutral executors do with tensors.

    Args:
        kept: counts what is kept, and has pieces computed once, with all that they keep.
    """

    def __init__(self, kept: Kept | None = None) -> None:
        self._kept = kept

    def slice(self, array: Tensor, dimension: int, rows: range) -> Tensor:
        return array.narrow(dimension, rows.start, len(rows))

    def concatenate(self, arrays: Sequence[Tensor], dimension: int) -> Tensor:
        return torch.cat(list(arrays), dimension)

    def checkpoint(
        self, function: Callable[..., tuple[Any, ...]], arrays: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return function(*arrays)
        if self._kept is not None:
            return self._kept.compute_piece(function, arrays)
        # Random masks are drawn when a call is recorded, so that there is no state to restore.
        found: tuple[Any, ...] = checkpoint(
            function, *arrays, use_reentrant=False, preserve_rng_state=False
        )
        return found


class TensorsInTurn(InTurn):
    """Makes the calls of a forward pass block by block."""

    def moments(self, value: Value, groups: int | None) -> tuple[Tensor, Tensor, int]:
        (x,) = self.whole([value])
        return moments(x, groups)

    def generator(self) -> None:
        return None


def wide(x: Tensor) -> Tensor:
    """Return rows as they are summed: half precision has no numbers for sums of many."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def moments(x: Tensor, groups: int | None) -> tuple[Tensor, Tensor, int]:
    """Return the means, the variances and the count of values behind each, single at the least.

    Args:
        x: ``(N, C, ...)``.
        groups: of the channels, a mean of each in each sample: ``[N, groups]``. None: a mean of
            each channel over the batch, ``[C]``.
    """
    x = wide(x)
    if groups is None:
        y = x.transpose(0, 1).reshape(x.shape[1], -1)
    else:
        y = x.reshape(x.shape[0], groups, -1)
    var, mean = torch.var_mean(y, -1, correction=0)
    return mean, var, y.shape[y.dim() - 1]
