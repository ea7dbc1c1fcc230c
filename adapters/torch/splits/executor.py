"""What carries out a forward pass of which the layers are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from collective.training.splits.blocks import Step, Value

__all__ = ["Executor"]


class Executor(Protocol):
    """Carries out the steps of one forward pass."""

    def enter(self, array: Any) -> Value:
        """Return the value of an array that is there."""

    def enter_whole(self, array: Any) -> Value:
        """Return the value of an array that every rank has whole."""

    def add(self, step: Step, lengths: Sequence[int]) -> Value:
        """Return the value that a step makes."""

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return whole arrays."""

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return what the module returns for some values."""

    def moments(self, value: Value, groups: int | None) -> tuple[Any, Any, int]:
        """Return the mean and the variance of the channels' rows, and how many rows there are.

        Args:
            value: what they are of.
            groups: of the channels of each sample, which share them; None: of each channel alone
                over the whole batch.
        """

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        """Return what tensors that meet pieces of ``value`` go through, for their gradients.

        Args:
            value: whose rows they meet.
            in_part: whether each piece has some channels, and uses theirs of the tensor.
        """

    def layout(self, weight: Any, bias: Any) -> str | None:
        """Return how this rank's weights of a layer are cut; None if they are whole."""

    def parameter(self, x: Any) -> Any:
        """Return all of a parameter of which this rank has a piece, and any other as it is."""

    def generator(self) -> torch.Generator | None:
        """Return the source of random numbers; all ranks draw the same."""
