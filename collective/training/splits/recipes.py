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
from .filters import ALONG, COLUMNS, ROWS
from .serial import CHANNELS, dimension, select_rows
from .windows import Rule, Taken, Transposed, Window, data_slices

__all__ = [
    "Context", "biased", "check_windows", "guarded", "layer", "nothing", "padded", "padded_apart",
    "resized", "row_for_row", "scaled", "sliced", "taken", "written",
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


def padded(arrays: Arrays, x: Any, padding: Sequence[tuple[int, int]], fill: float = 0.0) -> Any:
    """Pad the axes of the batch and the data; a piece may be nothing but padding."""
    if not any(before or after for before, after in padding):
        return x
    widths = [padding[0], (0, 0), *padding[1:]]
    if all(x.shape):
        return arrays.pad(x, widths, fill)
    shape = [n + sum(pair) for n, pair in zip(x.shape, widths)]
    return arrays.tied(arrays.full_bare(x, shape, fill), x)


def padded_apart(
    arrays: Arrays, x: Any, padding: Sequence[tuple[int, int]]
) -> tuple[Any, tuple[int, ...]]:
    """Pad the data axes where a function cannot: by another number of rows at each end.

    A function that pads by itself makes no copy that is kept for the backward pass.

    Returns:
        The array, and for each data axis how many rows the function has to put at either end.
    """
    ends = tuple(before if before == after else 0 for before, after in padding[1:])
    if not all(x.shape):  # which functions refuse, with padding or without
        ends = (0,) * len(ends)
    rest = [(before - n, after - n) for (before, after), n in zip(padding[1:], ends)]
    return padded(arrays, x, [padding[0], *rest]), ends


def written(arrays: Arrays, y: Any, rules: Sequence[Transposed], read: Read) -> Any:
    """Cut the block out of what a piece writes, with zeros where it writes nothing."""
    widths = [(0, 0)]
    for axis, rule in enumerate(rules, start=1):
        # y begins where the first row of the piece writes its first row.
        first = read.rows[axis].start * rule.stride - rule.before
        have, want = range(first, first + y.shape[dimension(axis)]), read.out[axis]
        rows = range(max(have.start, want.start), min(have.stop, want.stop))
        y = select_rows(arrays, y, axis, have, rows)
        ends = (rows.start - want.start, want.stop - rows.stop) if rows else (0, len(want))
        widths.append(ends)
    return padded(arrays, y, widths)


# -- layers with weights ---------------------------------------------------------------------


def layer(
    context: Context,
    rules: Sequence[Rule | None],
    function: Callable[..., Any],
    weight: Any,
    bias: Any,
    groups: int,
    outputs: int,
) -> Step:
    """Make the step of a layer with weights, and what it is for some of its channels.

    Where this rank has its own filters alone the step can be computed for these and no others.

    Args:
        function: ``f(x, read, groups, weight)``, or ``f(x, read, groups, weight, bias)``.
        groups: as in a convolution; 1 group reads all channels.
        outputs: the weights' dimension of output channels; the other one is that of inputs.

    Raises:
        ShapeError: the input does not fit the weights.
    """
    arrays, executor = context.arrays, context.executor
    shape = executor.shape(weight)
    _check_input(context, shape, shape[0] if outputs else shape[1] * groups)
    check_windows(context, rules)
    channels = shape[1] * groups if outputs else shape[0]
    own = executor.layout(weight, bias)
    given = [each for each in (weight, bias) if each is not None]
    if own is None:
        given = [executor.parameter(each) for each in given]
    uses = context.uses(given, in_part=own is None)
    whole, part = slice(len(given)), slice(len(given), None)
    part_weight = slice(len(given), len(given) + 1)

    def run_of(groups: int, made: int, used: slice, *cuts: tuple[int, range]) -> Run:
        """Return what computes ``made`` channels, of ``used`` and of those the rows ``cuts``."""

        def run(inputs: Sequence[Any], read: Read) -> Any:
            x, *rest = inputs
            chosen = rest[used]
            for at, (along, rows) in enumerate(cuts[: len(chosen)]):
                chosen[at] = arrays.slice(chosen[at], along, rows)
            return function(x, read, groups, *chosen)

        return guarded(arrays, run, made, used)

    def columns(wanted: range) -> Run:
        return run_of(1, len(wanted), part, (outputs, wanted), (0, wanted))

    def rows(wanted: range) -> Run:
        return run_of(1, channels, part_weight, (1 - outputs, wanted))

    def along(wanted: range) -> Run:
        return run_of(len(wanted), len(wanted), part, (0, wanted), (0, wanted))

    options: dict[str, Any] = {}
    if bias is not None:
        options["after"] = lambda total, uses: biased(total, uses[1])
    if own is not None:
        # Rows are without the bias, which is added once.
        mine = {
            COLUMNS: lambda: run_of(1, weight.shape[outputs], whole),
            ROWS: lambda: run_of(1, channels, slice(1)),
            ALONG: lambda: run_of(weight.shape[0], weight.shape[0], whole),
        }[own]()
        options |= {"own": own, own: lambda wanted: mine}
    elif groups == 1:
        options |= {"columns": columns, "rows": rows}
    elif groups == context.channels == channels:
        options["along"] = along
    return context.step(rules, run_of(groups, channels, whole), channels, uses=uses, **options)


def _check_input(context: Context, weight: Sequence[int], channels: int) -> None:
    """Refuse an input with other channels, or another number of data axes, than weights are for.

    Raises:
        ShapeError: it has.
    """
    axes = len(weight) - 2
    if len(context.lengths) != axes:
        raise ShapeError(
            f"Split: {context.name}: the input has {len(context.lengths)} data axes (expected "
            f"{axes}, as the weights of shape {tuple(weight)} have). Pass (batch, channels, ...)."
        )
    if context.channels != channels:
        raise ShapeError(
            f"Split: {context.name}: the input has {context.channels} channels (expected "
            f"{channels}, as the weights of shape {tuple(weight)} read)."
        )


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


def biased(y: Any, *bias: Any) -> Any:
    """Add a number to each channel, if there is one."""
    return y + bias[0].reshape(1, -1, *(1,) * (y.ndim - 2)) if bias else y


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
