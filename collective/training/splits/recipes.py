"""What the rules of functions have in common in all frameworks.

A recipe makes a :class:`~.blocks.Step` of a call, or returns None where the call reads its input in
a way that no rule says. Padding is put here, explicitly and only where a piece lies at an end of
the axis; the framework's function is then called without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.errors import ShapeError

from .arrays import Arrays
from .blocks import Read, Run, Step, Value
from .executors import Executor
from .serial import CHANNELS, dimension
from .windows import Rule, Taken, Window, data_slices

__all__ = [
    "Context", "check_windows", "guarded", "nothing", "padded", "resized", "row_for_row", "scaled",
    "sliced", "taken",
]  # fmt: skip

EVERY = slice(None)


@dataclass(frozen=True)
class Context:
    """One call that is to become a step.

    Attributes:
        arrays: what the framework does with its arrays.
        executor: makes the call.
        function: as the framework has it.
        name: of the layer and the function.
        sources: the values among the arguments.
        channels: how many the first of them has.
        shape: of the result, where the framework knows it.
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
        """The sources' rows along the data axes."""
        return self.sources[0].lengths[1:]

    def step(
        self, rules: Sequence[Rule | None], run: Run, channels: int | None = None, **options: Any
    ) -> Step:
        """Make the step, of a result that has ``channels``; None: as many as the source."""
        channels = self.channels if channels is None else channels
        return Step(self.name, self.sources, tuple(rules), run, channels, **options)

    def by_channel(self, rules: Sequence[Rule], run: Run) -> Step:
        """Make the step of a function that works on each channel by itself, in the data axes."""
        run = guarded(self.arrays, run)
        return self.step([None, *rules], run, along=lambda channels: run)

    def uses(self, parameters: Sequence[Any], in_part: bool = True) -> tuple[Any, ...]:
        """Return parameters with the gradients of all pieces.

        Args:
            parameters: what they are made of.
            in_part: whether they follow once more, for pieces of which each has some channels and
                uses theirs.
        """
        ways = (False, True) if in_part else (False,)
        shared = (self.executor.shared(self.sources[0], way) for way in ways)
        return tuple(share(each) for share in shared for each in parameters)


# -- pieces that may be without a row --------------------------------------------------------


def nothing(arrays: Arrays, given: Sequence[Any], read: Read, channels: int) -> Any:
    """Return a block of zeros, which may be one without a row."""
    first, *rest = [len(rows) for rows in read.out]
    return arrays.tied(arrays.full_bare(given[0], (first, channels, *rest), 0), *given)


def guarded(arrays: Arrays, run: Run, channels: int | None = None, used: slice = EVERY) -> Run:
    """Let a function that refuses empty arrays not see them.

    Args:
        run: the function.
        channels: of its result; None: as many as its input's.
        used: which arrays it takes beside its input. Ranks that have rows call for the gradients
            of these alone.
    """

    def run_guarded(given: Sequence[Any], read: Read) -> Any:
        if all(read.out):
            return run(given, read)
        x, *others = given
        known = x.shape[CHANNELS] if channels is None else channels
        return nothing(arrays, [x, *others[used]], read, known)

    return run_guarded


def check_windows(context: Context, rules: Sequence[Rule | None]) -> None:
    """Refuse an input without room for a window.

    Args:
        context: of the layer.
        rules: of the batch and each data axis.

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
    """Pad the axes of the batch and the data; a piece may be nothing but padding."""
    if not any(before or after for before, after in padding):
        return x
    widths = [padding[0], (0, 0), *padding[1:]]
    if all(x.shape):
        return arrays.pad(x, widths, fill)
    shape = [n + sum(pair) for n, pair in zip(x.shape, widths)]
    return arrays.tied(arrays.full_bare(x, shape, fill), x)


# -- functions that make their rows of single rows -------------------------------------------


def taken(context: Context, maps: Sequence[Any]) -> Step:
    """Make the step that takes the rows whose numbers ``maps`` has, along the data axes."""

    def run(inputs: Sequence[Any], read: Read) -> Any:
        (y,) = inputs
        for at, (numbers, rows, out) in enumerate(zip(maps, read.rows[1:], read.out[1:]), start=2):
            y = context.arrays.take(y, at, numbers[out.start : out.stop] - rows.start)
        return y

    return context.by_channel([Taken.of(numbers.tolist()) for numbers in maps], run)


def sliced(context: Context, index: Sequence[Any]) -> Step | None:
    """Make the step of slices of the data axes, with the batch and the channels whole."""
    slices = data_slices(index, len(context.lengths) + 2)
    if slices is None:
        return None
    return taken(context, [np.arange(n)[each] for n, each in zip(context.lengths, slices)])


def resized(context: Context, ats: Sequence[Any], linear: bool) -> Step:
    """Make the step of resizing the data axes.

    Args:
        ats: along each axis, from where each row is taken.
        linear: whether it is between two rows, in parts, or of one.
    """
    rules, coordinates = [], []
    for n, at in zip(context.lengths, ats):
        low = np.clip(np.floor(at), 0, n - 1).astype(int)
        high = np.minimum(low + 1, n - 1)
        found = [low.tolist(), high.tolist()] if linear else [low.tolist()]
        rules.append(Taken.of(*found))
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
    context: Context, y: Any, windows: Sequence[Window], read: Read,
    count: Callable[[int, range], float],
) -> Any:  # fmt: skip
    """Multiply each row of a pooling by what its windows count for.

    Args:
        count: ``count(axis, rows)`` of a window that reaches over ``rows`` of a data axis.
    """
    for axis, (window, out) in enumerate(zip(windows, read.out[1:])):
        factors = [count(axis, window.needs(range(i, i + 1))) for i in out]
        y = y * context.arrays.numbers(y, axis + 2, np.array(factors))
    return y


# -- functions that make each row of their result of the same rows of their inputs -----------


def row_for_row(
    context: Context,
    leaves: Sequence[Any],
    dims: int,
    call: Callable[[list[Any]], Any],
    *,
    along: bool = True,
    fit: Callable[[Any, Read, range | None], Any] | None = None,
) -> Step:
    """Return the step of a function that works row for row.

    Args:
        context: with the number of the result's channels.
        leaves: what the function is given: values, arrays that broadcast, and others.
        dims: how many dimensions the result has.
        call: calls the function, of such leaves.
        along: whether it works on each channel by itself.
        fit: ``fit(x, read, some)`` is what a piece is combined with of an array; None: the rows
            and channels that it broadcasts to.
    """
    arrays, values = context.arrays, context.sources
    # An array without a gradient is not told to what computes a block again.
    used = [at for at, x in enumerate(leaves) if arrays.has_gradient(x)]
    others = [at for at, x in enumerate(leaves) if arrays.is_array(x) and at not in used]

    def run_of(some: range | None) -> Run:
        def run(inputs: Sequence[Any], read: Read) -> Any:
            pieces, rest = iter(inputs), inputs[len(values) :]
            found = [next(pieces) if isinstance(x, Value) else x for x in leaves]
            whole = dict(zip(used, rest if some is None else rest[len(used) :]))
            for at, x in (*whole.items(), *((at, leaves[at]) for at in others)):
                found[at] = (fit or broadcast)(x, read, some)
            return call(found)

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
    """Yield what a piece is combined with of a whole array that broadcasts: rows of dimensions.

    Args:
        shape: of the array.
        read: which rows the piece has.
        dims: how many dimensions the result has.
        some: the channels that the piece has; None: all.
        channels: how many there are.
    """
    missing = dims - len(shape)
    for axis, rows in enumerate(read.rows):
        at = dimension(axis) - missing
        if at >= 0 and shape[at] != 1:
            yield at, rows
    at = CHANNELS - missing
    if some is not None and at >= 0 and shape[at] == channels != 1:
        yield at, some
