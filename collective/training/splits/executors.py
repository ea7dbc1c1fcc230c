"""Executors of a forward pass that is cut: in turn on one device, or over ranks.

Both executors take in the inputs, keep the values between layers, give layers their parameters, and
return the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .arrays import Arrays
from .blocks import Step, Value, lengths_of
from .filters import Filters
from .layered import BlockGrid, Layered
from .serial import Serial

__all__ = ["Executor", "InTurn", "OverRanks"]


class InTurn:
    """Recorder of a forward pass's calls, which computes them in blocks when a result is needed.

    Args:
        arrays: operations on the framework's arrays; none between ranks is used.
        parts: number of pieces along the batch and each data axis.
        channels: number of pieces along the channels.
        recompute: whether blocks are computed a second time for their gradients.
    """

    def __init__(
        self, arrays: Arrays, parts: Sequence[int], channels: int, recompute: bool
    ) -> None:
        self._arrays = arrays
        self._serial = Serial(arrays, parts, channels, recompute)

    def enter(self, x: Any) -> Value:
        """Take in the input."""
        return self.enter_whole(x)

    def enter_whole(self, x: Any) -> Value:
        """Take in an array."""
        return Value(lengths_of(x.shape), array=self._arrays.entering(x))

    def add(self, step: Step) -> Value:
        """Add a layer that reads existing values, and return the value that it computes."""
        return Value(step.lengths, step)

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return the whole arrays of the values."""
        self._serial.compute(values)
        return [value.array for value in values]

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return the results of the forward pass."""
        return self.whole(values)

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        """Return the function that gives a layer its parameters: here, unchanged."""
        return lambda x: x

    def layout(self, weight: Any, bias: Any) -> None:
        """Return None, because all filters are on this device."""

    def parameter(self, x: Any) -> Any:
        """Return a parameter, which is whole here."""
        return x

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of a whole array or parameter."""
        return tuple(x.shape)

    def moments(self, value: Value, groups: int | None, dtype: Any) -> tuple[Any, Any, int]:
        """Return means, variances and the number of values behind each: see `Arrays.moments`."""
        (x,) = self.whole([value])
        count = _count(value, x.shape[1], groups)
        return *self._arrays.moments(x, groups, dtype, lambda sums: sums / count, None), count

    def generator(self) -> Any:
        """Return the source of random numbers."""
        return self._arrays.generator(None)


class OverRanks:
    """Executor of a forward pass on this rank's block of every array.

    Args:
        grid: blocks of all ranks.
        layered: object that makes the calls.
        arrays: operations on the framework's arrays.
        parameters: parameters of the model; their gradients are summed together.
        from_pieces: whether the input is this rank's rows.
        to_pieces: whether the results are this rank's rows.
        filters: record of the parameters of which this rank has a piece.
    """

    def __init__(
        self,
        grid: BlockGrid,
        layered: Layered,
        arrays: Arrays,
        parameters: Sequence[Any],
        *,
        from_pieces: bool,
        to_pieces: bool,
        filters: Filters | None,
    ) -> None:
        self._grid, self._layered, self._arrays = grid, layered, arrays
        self._filters = filters
        self._parameters = list(parameters)
        self._from_pieces, self._to_pieces = from_pieces, to_pieces
        self._versions: dict[tuple[int, bool], dict[int, Any]] = {}
        self._generator: Any = None

    def enter(self, x: Any) -> Value:
        """Take in the input: this rank's piece or the whole array, as the settings say."""
        if self._from_pieces:
            return self._layered.enter_piece(self._arrays.entering(x), lengths_of(x.shape))
        return self.enter_whole(x)

    def enter_whole(self, x: Any) -> Value:
        """Take in an array that every rank has whole."""
        value = Value(lengths_of(x.shape), array=self._arrays.entering(x))
        self._layered.enter(value)
        return value

    def add(self, step: Step) -> Value:
        """Add a layer that reads existing values, and return the value that it computes."""
        return self._layered.add(step)

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return the whole arrays of the values, on every rank."""
        return [self._layered.whole(value) for value in values]

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return the results of the forward pass: pieces or whole arrays."""
        if self._to_pieces:
            return [self._layered.piece(value) for value in values]
        return self.whole(values)

    # -- parameters ------------------------------------------------------------------------

    def shared(self, value: Value, in_part: bool) -> Callable[[Any], Any]:
        """Return the function that gives a layer on ``value`` its parameters.

        The gradients of these parameters are summed over the ranks.

        Args:
            in_part: whether each rank computes a part of the layer's channels.
        """
        axes = len(value.lengths)

        def share(x: Any) -> Any:
            if not self._arrays.has_gradient(x):
                return x
            array = self._version(axes, in_part).get(id(x))
            return self._through([x], axes, in_part)[0] if array is None else array

        return share

    def layout(self, weight: Any, bias: Any) -> str | None:
        """Return how the ranks share a layer's filters; None if every rank has all of them."""
        return None if self._filters is None else self._filters.layout(weight, bias)

    def parameter(self, x: Any) -> Any:
        """Return a whole parameter, joined from the ranks' pieces."""
        share = None if self._filters is None else self._filters.share(x)
        if share is None or self._filters is None:
            return x
        # Every rank has the same gradient of the whole parameter, or the gradients are summed
        # before they arrive here.
        return self._arrays.joined(x, self._filters.group, share.dimension, share.counts)

    def shape(self, x: Any) -> tuple[int, ...]:
        """Return the shape of all of an array or a parameter."""
        share = None if self._filters is None else self._filters.share(x)
        return tuple(x.shape) if share is None else share.shape

    def _version(self, axes: int, in_part: bool) -> dict[int, Any]:
        """Return, by the ``id`` of a parameter, the array whose gradient is summed over ranks."""
        known = self._versions.get((axes, in_part))
        if known is None:
            wanted = [array for array in self._parameters if self._arrays.has_gradient(array)]
            if in_part and self._filters is not None:  # a rank's own piece has its own gradient
                wanted = [array for array in wanted if self._filters.share(array) is None]
            summed = self._through(wanted, axes, in_part)
            known = self._versions[axes, in_part] = dict(zip(map(id, wanted), summed))
        return known

    def _through(self, arrays: Sequence[Any], axes: int, in_part: bool) -> Sequence[Any]:
        groups = [*self._grid.groups[:axes], self._grid.channel_group if in_part else None]
        for group in groups:
            if group is not None and arrays:
                arrays = self._arrays.used_together(arrays, group)
        return arrays

    # -- statistics and random numbers -----------------------------------------------------

    def moments(self, value: Value, groups: int | None, dtype: Any) -> tuple[Any, Any, int]:
        """Return means, variances and the number of values behind each: see `Arrays.moments`."""
        x = self._layered.piece(value)
        count = _count(value, x.shape[1], groups)
        cut = range(0 if groups is None else 1, len(value.lengths))
        mine = self._grid.block(value.lengths)[0]

        def average(sums: Any) -> Any:
            local = self._layered.added(sums, cut) / count
            # With groups, a rank has the means of its own samples only, and the ranks join them.
            return local if groups is None else self._layered.joined(local, 0, value.lengths[0])

        def near(means: Any) -> Any:
            used = self.shared(value, False)(means)
            return used if groups is None else self._arrays.slice(used, 0, mine)

        return *self._arrays.moments(x, groups, dtype, average, near), count

    def generator(self) -> Any:
        """Return a source of random numbers that are equal on all ranks, as masks have to be."""
        if self._generator is None:
            seed = self._grid.comm.broadcast_object(self._arrays.seed())
            self._generator = self._arrays.generator(seed)
        return self._generator


Executor = InTurn | OverRanks


def _count(value: Value, channels: int, groups: int | None) -> int:
    """Return the number of values behind a mean."""
    if groups is None:
        return math.prod(value.lengths)
    return channels // groups * math.prod(value.lengths[1:])
