"""The steps of layers with weights: convolutions, their transposes and dense layers.

A step can compute some channels alone, in turn or where a rank has those of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collective.errors import ShapeError

from .arrays import Arrays
from .blocks import Read, Run, Step
from .filters import ALONG, COLUMNS, ROWS
from .recipes import Context, check_windows, guarded, padded
from .serial import dimension, select_rows
from .windows import Rule, Transposed, Window

__all__ = ["biased", "convolved", "layer", "written"]


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
        # Of a transposed convolution the weights' first dimension is that of the inputs.
        known = range(wanted.start * shape[0] // channels, wanted.stop * shape[0] // channels)
        some = len(wanted) * groups // channels
        return run_of(some, len(wanted), part, (0, known), (0, wanted))

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
    else:
        options |= {"along": along, "groups": groups}
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


def biased(y: Any, *bias: Any) -> Any:
    """Add a number to each channel, if there is one."""
    return y + bias[0].reshape(1, -1, *(1,) * (y.ndim - 2)) if bias else y


def convolved(
    arrays: Arrays, x: Any, windows: Sequence[Window], read: Read,
    function: Callable[[Any, tuple[int, ...]], Any],
) -> Any:  # fmt: skip
    """Return a block of a convolution, which pads both ends of an axis alike by itself.

    A padded array is a copy, which is kept for the backward pass. Where a block lies at one end of
    an axis alone, the convolution pads the other end, too, and the rows that come of that are cut
    off.

    Args:
        arrays: the framework.
        x: the rows that the block reads.
        windows: of each data axis.
        read: the block.
        function: ``function(x, ends)`` puts so many rows at either end of each data axis.
    """
    ends, widths, firsts = [], [(0, 0)], []
    for window, (before, after) in zip(windows, read.padding[1:]):
        most = max(before, after)
        if not all(x.shape) or (most - before) % window.stride:
            ends.append(0)
            widths.append((before, after))
            firsts.append(0)
        else:
            ends.append(most)
            widths.append((0, 0))
            firsts.append((most - before) // window.stride)
    y = function(padded(arrays, x, widths), tuple(ends))
    for axis, (first, out) in enumerate(zip(firsts, read.out[1:]), start=1):
        have = range(out.start - first, out.start - first + y.shape[dimension(axis)])
        y = select_rows(arrays, y, axis, have, out)
    return y


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
