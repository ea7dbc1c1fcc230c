"""One forward pass in turn, on one device: the same as :mod:`.over_ranks` for ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .blocks import Step, Value, lengths_of
from .exchanges import Exchanges
from .serial import Serial

__all__ = ["InTurn"]


class InTurn:
    """Records the calls of a forward pass, and makes them in blocks where a result is needed.

    A framework adds statistics and random numbers.

    Args:
        arrays: what the framework does with its arrays; nothing of it is between ranks.
        parts: pieces along the batch and each data axis.
        channels: pieces along the channels.
        recompute: whether blocks are computed once more for their gradients.
    """

    def __init__(
        self, arrays: Exchanges, parts: Sequence[int], channels: int, recompute: bool
    ) -> None:
        self._arrays = arrays
        self._serial = Serial(arrays, parts, channels, recompute)

    def enter(self, x: Any) -> Value:
        """Bring the input in."""
        return self.enter_whole(x)

    def enter_whole(self, x: Any) -> Value:
        """Bring an array in."""
        return Value(lengths_of(x.shape), array=self._arrays.entering(x))

    def add(self, step: Step, lengths: Sequence[int]) -> Value:
        """Put a layer behind the values that it takes; return what it makes."""
        return Value(lengths, step)

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return all of the values."""
        self._serial.compute(values)
        return [value.array for value in values]

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return what the forward pass gives."""
        return self.whole(values)

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        """Return what gives a layer its parameters: as they are."""
        return lambda x: x

    def layout(self, weight: Any, bias: Any) -> None:
        """Return None: all filters are here."""

    def parameter(self, x: Any) -> Any:
        """Return a parameter, which is all here."""
        return x
