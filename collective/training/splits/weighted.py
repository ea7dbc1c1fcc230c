"""Steps of layers with weights: convolutions, transposed convolutions and dense layers.

A step can compute some channels only, in turn or because a rank has only the filters of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collective.errors import ShapeError

from .arrays import Arrays
from .blocks import Read, Run, Step
from .filters import ALONG, COLUMNS, ROWS
from .recipes import LayerCall, check_windows, guarded, padded
from .serial import dimension, select_rows
from .windows import Rule, Transposed, WindowRule


def layer(
    context: LayerCall,
    rules: Sequence[Rule | None],
    function: Callable[..., Any],
    weight: Any,
    bias: Any,
    groups: int,
    outputs: int,
) -> Step:
    """Return the step of a layer with weights, with its variants for some channels.

    If this rank has only its own filters, the step can be computed for their channels only.

    Args:
        function: function ``f(x, read, groups, weight)``, or ``f(x, read, groups, weight, bias)``.
        groups: number of groups, as in a convolution; a single group reads all channels.
        outputs: dimension of the output channels in the weights, 0 or 1; the other one is the
            dimension of the input channels.

    Raises:
        ShapeError: the input does not fit the weights.
    """
    arrays, executor = context.arrays, context.executor
    shape = executor.shape(weight)
    _check_input(context, shape, shape[0] if outputs else shape[1] * groups)
    check_windows(context, rules)
    channels = shape[1] * groups if outputs else shape[0]
    own = executor.layout(weight, bias)
    parameters = [array for array in (weight, bias) if array is not None]
    if own is None:
        parameters = [executor.parameter(array) for array in parameters]
    uses = context.uses(parameters, in_part=own is None)
    whole, part = slice(len(parameters)), slice(len(parameters), None)
    part_weight = slice(len(parameters), len(parameters) + 1)

    def run_of(groups: int, made: int, used: slice, *cuts: tuple[int, range]) -> Run:
        """Return a ``run`` for ``made`` channels.

        The function takes the arrays ``used``, reduced to the rows ``cuts``.
        """

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
        # In a transposed convolution, the weights' first dimension counts the input channels.
        known = range(wanted.start * shape[0] // channels, wanted.stop * shape[0] // channels)
        some = len(wanted) * groups // channels
        return run_of(some, len(wanted), part, (0, known), (0, wanted))

    options: dict[str, Any] = {}
    if bias is not None:
        options["after"] = lambda total, uses: biased(total, uses[1])
    if own is not None:
        # A `run` for rows omits the bias, which is added once to the sum.
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


def _check_input(context: LayerCall, weight: Sequence[int], channels: int) -> None:
    """Check that an input has the channels and the number of data axes that the weights need.

    Raises:
        ShapeError: the input has others.
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
    """Add the bias to each channel, if there is a bias."""
    return y + bias[0].reshape(1, -1, *(1,) * (y.ndim - 2)) if bias else y


def convolved(
    arrays: Arrays, x: Any, windows: Sequence[WindowRule], read: Read,
    function: Callable[[Any, tuple[int, ...]], Any],
) -> Any:  # fmt: skip
    """Return a block of a convolution whose function pads both ends of an axis equally.

    A padded array is a copy that would be kept for the backward pass, so the convolution pads where
    possible. If a block lies at one end of an axis only, the convolution pads the other end, too.
    The resulting extra rows are cut off.

    Args:
        arrays: operations on the framework's arrays.
        x: rows that the block reads.
        windows: windows of the data axes.
        read: block to compute, and the rows that it reads.
        function: function ``function(x, ends)`` that pads each data axis by the given number of
            rows at either end.
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
    """Cut the block out of the rows that a piece writes, with zeros where it writes none."""
    widths = [(0, 0)]
    for axis, rule in enumerate(rules, start=1):
        # Row 0 of y is the first row that the first row of the piece writes.
        first = read.rows[axis].start * rule.stride - rule.before
        have, want = range(first, first + y.shape[dimension(axis)]), read.out[axis]
        rows = range(max(have.start, want.start), min(have.stop, want.stop))
        y = select_rows(arrays, y, axis, have, rows)
        ends = (rows.start - want.start, want.stop - rows.stop) if rows else (0, len(want))
        widths.append(ends)
    return padded(arrays, y, widths)
