"""Common parts of the frameworks' rules for functions.

A recipe makes a :class:`~.blocks.Step` of a call. It returns None if no rule describes how the call
reads its input. Recipes add padding explicitly, and only where a piece lies at an end of the axis.
The framework's function is then called without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.errors import ShapeError

from .arrays import Arrays
from .blocks import Read, Run, Step, Value
from .layered import Executor
from .serial import CHANNELS, dimension
from .windows import Rule, Taken, WindowRule, data_slices

EVERY = slice(None)


@dataclass(frozen=True)
class LayerCall:
    """One call for which a step is made.

    Attributes:
        arrays: operations on the framework's arrays.
        executor: executor that makes the call.
        function: the framework's function.
        name: name of the layer and the function.
        sources: values among the arguments.
        channels: number of channels of the first source.
        shape: shape of the result, if the framework knows it.
    """

    arrays: Arrays
    executor: Executor
    function: Any
    name: str
    sources: tuple[Value, ...]
    channels: int
    shape: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of rows of the sources along each data axis."""
        return self.sources[0].lengths[1:]

    def step(
        self, rules: Sequence[Rule | None], run: Run, channels: int | None = None, **options: Any
    ) -> Step:
        """Return the step; ``channels`` counts the result's channels (None: as in the source)."""
        channels = self.channels if channels is None else channels
        return Step(self.name, self.sources, tuple(rules), run, channels, **options)

    def by_channel(self, rules: Sequence[Rule], run: Run) -> Step:
        """Return the step of a function that treats each channel separately, in the data axes."""
        run = guarded(self.arrays, run)
        return self.step([None, *rules], run, along=lambda channels: run)

    def uses(self, parameters: Sequence[Any], in_part: bool = True) -> tuple[Any, ...]:
        """Return parameters whose gradients are summed over all pieces.

        Args:
            parameters: parameters of the layer.
            in_part: if true, append the parameters once more, for pieces that have some channels
                each and use the parameters of these channels.
        """
        ways = (False, True) if in_part else (False,)
        shared = (self.executor.shared(self.sources[0], way) for way in ways)
        return tuple(share(parameter) for share in shared for parameter in parameters)


# -- pieces that may be without a row --------------------------------------------------------


def nothing(arrays: Arrays, given: Sequence[Any], read: Read, channels: int) -> Any:
    """Return a block of zeros, which may have no rows."""
    first, *rest = [len(rows) for rows in read.out]
    return arrays.tied(arrays.full_bare(given[0], (first, channels, *rest), 0), *given)


def guarded(arrays: Arrays, run: Run, channels: int | None = None, used: slice = EVERY) -> Run:
    """Return a ``run`` that does not call a function on empty arrays, which it would refuse.

    Args:
        run: the function.
        channels: number of channels of its result; None: as many as its input has.
        used: arrays that the function takes beside its input. Ranks that have rows make collective
            calls for the gradients of these arrays only.
    """

    def run_guarded(given: Sequence[Any], read: Read) -> Any:
        if all(read.out):
            return run(given, read)
        x, *others = given
        known = x.shape[CHANNELS] if channels is None else channels
        return nothing(arrays, [x, *others[used]], read, known)

    return run_guarded


def check_windows(context: LayerCall, rules: Sequence[Rule | None]) -> None:
    """Check that an input has room for a window.

    Args:
        context: call of the layer.
        rules: rules of the batch and each data axis.

    Raises:
        ShapeError: an axis has too few rows.
    """
    for axis, (rule, n) in enumerate(zip(rules, context.sources[0].lengths)):
        if rule is not None and rule.length(n) < 1:
            raise ShapeError(
                f"Split: {context.name}: data axis {axis - 1} has {n} rows (expected enough for "
                "one window, padding included)."
            )


def padded(arrays: Arrays, x: Any, padding: Sequence[tuple[int, int]], fill: float = 0.0) -> Any:
    """Pad the batch and the data axes; a piece may consist of padding only."""
    if not any(before or after for before, after in padding):
        return x
    widths = [padding[0], (0, 0), *padding[1:]]
    if all(x.shape):
        return arrays.pad(x, widths, fill)
    shape = [n + sum(pair) for n, pair in zip(x.shape, widths)]
    return arrays.tied(arrays.full_bare(x, shape, fill), x)


# -- functions whose rows each depend on single rows -----------------------------------------


def taken(context: LayerCall, maps: Sequence[Any]) -> Step:
    """Return the step that takes, along each data axis, the rows with the numbers in ``maps``."""

    def run(inputs: Sequence[Any], read: Read) -> Any:
        (y,) = inputs
        for at, (numbers, rows, out) in enumerate(zip(maps, read.rows[1:], read.out[1:]), start=2):
            y = context.arrays.take(y, at, numbers[out.start : out.stop] - rows.start)
        return y

    return context.by_channel([Taken.of(numbers.tolist()) for numbers in maps], run)


def sliced(context: LayerCall, index: Sequence[Any]) -> Step | None:
    """Return the step of slices of the data axes; None if they cut the batch or the channels."""
    slices = data_slices(index, len(context.lengths) + 2)
    if slices is None:
        return None
    return taken(context, [np.arange(n)[cut] for n, cut in zip(context.lengths, slices)])


def resized(context: LayerCall, ats: Sequence[Any], linear: bool) -> Step:
    """Return the step that resizes the data axes.

    Args:
        ats: position, along each axis, from which each row is taken.
        linear: if true, interpolate between two rows; if false, take one row.
    """
    rules, coordinates = [], []
    for n, at in zip(context.lengths, ats):
        low = np.clip(np.floor(at), 0, n - 1).astype(int)
        high = np.minimum(low + 1, n - 1)
        columns = [low.tolist(), high.tolist()] if linear else [low.tolist()]
        rules.append(Taken.of(*columns))
        coordinates.append((low, high, at - low))

    def run(inputs: Sequence[Any], read: Read) -> Any:
        (y,), arrays = inputs, context.arrays
        for at, ((low, high, share), rows, out) in enumerate(
            zip(coordinates, read.rows[1:], read.out[1:]), start=2
        ):
            cut = slice(out.start, out.stop)
            nearest = arrays.take(y, at, low[cut] - rows.start)
            if linear:
                following = arrays.take(y, at, high[cut] - rows.start)
                weight = arrays.numbers(y, at, share[cut])
                nearest = nearest * (1 - weight) + following * weight
            y = nearest
        return y

    return context.by_channel(rules, run)


def scaled(
    context: LayerCall, y: Any, windows: Sequence[WindowRule], read: Read,
    count: Callable[[int, range], float],
) -> Any:  # fmt: skip
    """Multiply each row of a pooling's result by the factor of its window.

    Args:
        count: function ``count(axis, rows)`` that returns the factor of a window over ``rows`` of
            a data axis.
    """
    for axis, (window, out) in enumerate(zip(windows, read.out[1:])):
        factors = [count(axis, window.needs(range(i, i + 1))) for i in out]
        y = y * context.arrays.numbers(y, axis + 2, np.array(factors))
    return y


# -- functions whose rows each depend on the same rows of their inputs -----------------------


def row_for_row(
    context: LayerCall,
    leaves: Sequence[Any],
    dims: int,
    call: Callable[[list[Any]], Any],
    *,
    along: bool = True,
    fit: Callable[[Any, Read, range | None], Any] | None = None,
) -> Step:
    """Return the step of a function that works row by row.

    Args:
        context: call, with the number of the result's channels.
        leaves: arguments of the function: values, arrays that broadcast, and others.
        dims: number of dimensions of the result.
        call: function that calls the framework's function with such leaves.
        along: whether the function works on each channel separately.
        fit: function ``fit(x, read, some)`` that returns the part of an array with which a piece
            is combined; None: the rows and channels that the array broadcasts to.
    """
    arrays, values = context.arrays, context.sources
    # Arrays without a gradient are not in `uses`, the arrays passed to a recomputed block.
    used = [at for at, x in enumerate(leaves) if arrays.has_gradient(x)]
    others = [at for at, x in enumerate(leaves) if arrays.is_array(x) and at not in used]

    def run_of(some: range | None) -> Run:
        def run(inputs: Sequence[Any], read: Read) -> Any:
            pieces, rest = iter(inputs), inputs[len(values) :]
            arguments = [next(pieces) if isinstance(x, Value) else x for x in leaves]
            whole = dict(zip(used, rest if some is None else rest[len(used) :]))
            for at, x in (*whole.items(), *((at, leaves[at]) for at in others)):
                arguments[at] = (fit or broadcast)(x, read, some)
            return call(arguments)

        return run

    def broadcast(x: Any, read: Read, some: range | None) -> Any:
        for at, rows in _fitting(x.shape, read, dims, some, context.channels):
            if len(rows) != x.shape[at]:
                x = arrays.slice(x, at, rows)
        return x

    return context.step(
        (None,) * (dims - 1), run_of(None), along=run_of if along else None,
        uses=context.uses([leaves[at] for at in used]),
    )  # fmt: skip


def _fitting(
    shape: Sequence[int], read: Read, dims: int, some: range | None, channels: int
) -> Iterator[tuple[int, range]]:
    """Yield dimensions of a whole array that broadcasts, and their rows for a piece.

    Args:
        shape: shape of the array.
        read: rows of the piece.
        dims: number of dimensions of the result.
        some: channels of the piece; None: all channels.
        channels: number of channels.
    """
    missing = dims - len(shape)
    for axis, rows in enumerate(read.rows):
        at = dimension(axis) - missing
        if at >= 0 and shape[at] != 1:
            yield at, rows
    at = CHANNELS - missing
    if some is not None and at >= 0 and shape[at] == channels != 1:
        yield at, some
