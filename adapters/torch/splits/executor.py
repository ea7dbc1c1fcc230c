"""What carries out a forward pass of PyTorch's of which the layers are cut."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from collective.training.splits.blocks import Value
from collective.training.splits.executor import Executor

__all__ = ["TensorExecutor"]


class TensorExecutor(Executor, Protocol):
    """Carries out the steps of one forward pass."""

    def moments(self, value: Value, groups: int | None) -> tuple[Any, Any, int]:
        """Return the mean and the variance of the channels' rows, and how many rows there are.

        Args:
            value: what they are of.
            groups: of the channels of each sample, which share them; None: of each channel alone
                over the whole batch.
        """

    def generator(self) -> torch.Generator | None:
        """Return the source of random numbers; all ranks draw the same."""
