"""What carries out a forward pass of which the layers are cut, and which of them is running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .blocks import Step, Value

__all__ = ["Executor", "LayerNames"]


class LayerNames(threading.local):
    """Which of a model's layers are running, in this thread, one within another."""

    def __init__(self) -> None:
        self.stack: list[str] = []

    @property
    def current(self) -> str:
        """The innermost; "forward" outside of them."""
        return self.stack[len(self.stack) - 1] if self.stack else "forward"


class Executor(Protocol):
    """Carries out the steps of one forward pass, in turn or over ranks.

    A framework's own adds statistics and random numbers.
    """

    def enter(self, array: Any) -> Value:
        """Return the value of an array that is there."""

    def enter_whole(self, array: Any) -> Value:
        """Return the value of an array that every rank has whole."""

    def add(self, step: Step, lengths: Sequence[int]) -> Value:
        """Return the value that a step makes."""

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return whole arrays."""

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return what the model returns for some values."""

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        """Return what arrays that meet pieces of ``value`` go through, for their gradients.

        Args:
            value: whose rows they meet.
            in_part: whether each piece has some channels, and uses theirs of the array.
        """

    def layout(self, weight: Any, bias: Any) -> str | None:
        """Return how this rank's weights of a layer are cut; None if they are whole."""

    def parameter(self, x: Any) -> Any:
        """Return all of a parameter of which this rank has a piece, and any other as it is."""
