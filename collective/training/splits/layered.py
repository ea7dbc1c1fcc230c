"""Cuts over ranks: each rank has a block of every array, and fetches rows before layers read them.

Four kinds of operations connect the ranks' blocks. Each is the adjoint of another, so that the
gradients are those of one process (Y. Xu et al., "GSPMD", 2021, section 3, has the same four):

======================  =====================================  =====================================
operation               forward                                backward
======================  =====================================  =====================================
use a whole array       every rank continues with the array    the ranks' gradients are summed
add the ranks' parts    the ranks' arrays are summed           every rank takes the whole gradient
cut a whole array       every rank takes its rows              the rows are gathered
join blocks             the rows are gathered                  every rank takes its rows
======================  =====================================  =====================================

An all-to-all sends the rows that a window reads beyond a block. Its adjoint is an all-to-all, too,
which adds the gradients of rows that went to several ranks. Rows may come from ranks at any
distance. A rank does not send rows to itself: it copies its own rows once, beside the received
rows, and their gradient once.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, ShapeError

from .arrays import Arrays, Halo
from .blocks import Block, Read, Step, Value, lengths_of
from .filters import ALONG, COLUMNS, ROWS, Filters
from .serial import CHANNELS, InTurn, dimension, select_rows, values_behind
from .windows import overlap, pieces


def check_axes(data: Sequence[int], axes: int) -> None:
    """Check that an array has the axes that are to be cut.

    Raises:
        ShapeError: the array has fewer axes than ``data`` cuts.
    """
    if axes < len(data) and any(parts > 1 for parts in data[axes:]):
        raise ShapeError(
            f"Split: data={tuple(data)}, but the input has {axes} data axes. Name no more cuts "
            "than the input has data axes."
        )


class BlockGrid:
    """Blocks of the ranks of a communicator.

    Collective: every rank of ``comm`` makes it, with the same numbers.

    Args:
        comm: ranks that share the blocks, in the order of batch, channels and data axes; the last
            axis varies fastest.
        batch, channels, data: number of pieces along each axis.

    Attributes:
        parts: number of pieces along the batch and each data axis.
        at: index of this rank's piece along each of these axes.
        groups: for each axis, the ranks whose pieces differ from this rank's along this axis
            only; None if the axis has one piece.
        channels: number of pieces along the channels.
        channel: index of this rank's piece along the channels.
        channel_group: ranks whose pieces differ from this rank's along the channels only, or None.

    Raises:
        InvalidArgumentError: the number of pieces is not the number of ranks.
    """

    def __init__(self, comm: Communicator, batch: int, channels: int, data: Sequence[int]) -> None:
        extents = (batch, channels, *data)
        if math.prod(extents) != comm.size:
            raise InvalidArgumentError(
                f"Split: batch={batch}, channels={channels}, data={tuple(data)} are "
                f"{math.prod(extents)} pieces (expected one piece for each of the {comm.size} "
                "ranks of comm). Change the numbers so that their product is the number of ranks."
            )
        grid = comm.grid(extents)
        mine = grid.coords
        groups: list[Communicator | None] = []
        for axis, extent in enumerate(extents):
            group = None
            if extent > 1:
                group = comm if extent == comm.size else grid.along(axis)
            groups.append(group)
        self.comm = comm
        self.parts = (batch, *data)
        self.at = (mine[0], *mine[2:])
        self.groups = (groups[0], *groups[2:])
        self.channels, self.channel, self.channel_group = channels, mine[1], groups[1]

    def reaching(self, axes: int) -> BlockGrid:
        """Return the grid for arrays with ``axes`` data axes; added axes are not cut.

        Raises:
            ShapeError: an axis is cut that the arrays do not have.
        """
        check_axes(self.parts[1:], axes)
        missing = axes + 1 - len(self.parts)
        grid = copy.copy(self)
        grid.parts = (*self.parts, *(1,) * missing)[: axes + 1]
        grid.at = (*self.at, *(0,) * missing)[: axes + 1]
        grid.groups = (*self.groups, *(None,) * missing)[: axes + 1]
        return grid

    def block(self, lengths: Sequence[int]) -> Block:
        """Return this rank's rows of an array."""
        cuts = zip(lengths, self.parts, self.at)
        return tuple(pieces(n, parts)[at] for n, parts, at in cuts)

    def along(self, axis: int, lengths: Sequence[int]) -> list[Block]:
        """Return the blocks of the ranks that differ from this rank along ``axis`` only."""
        block = self.block(lengths)
        rows = pieces(lengths[axis], self.parts[axis])
        return [(*block[:axis], piece, *block[axis + 1 :]) for piece in rows]


class OverRanks:
    """Executor that computes every call immediately on this rank's block.

    The module's docstring describes the exchange between ranks.

    Collective: the ranks make the same calls in the same order.

    Args:
        grid: blocks of all ranks.
        arrays: operations on the framework's arrays.
        parameters: parameters of the model; their gradients are summed together.
        from_pieces: whether the input is this rank's rows.
        to_pieces: whether the results are this rank's rows.
        filters: record of the parameters of which this rank has a piece.
    """

    def __init__(
        self,
        grid: BlockGrid,
        arrays: Arrays,
        parameters: Sequence[Any],
        *,
        from_pieces: bool,
        to_pieces: bool,
        filters: Filters | None,
    ) -> None:
        self._grid, self._arrays = grid, arrays
        self._filters = filters
        self._parameters = list(parameters)
        self._from_pieces, self._to_pieces = from_pieces, to_pieces
        # For each value whose pieces have only some channels: the range of these channels.
        self._channels: dict[Value, range] = {}
        self._versions: dict[tuple[int, bool], dict[int, Any]] = {}
        self._generator: Any = None

    # -- inputs and results ----------------------------------------------------------------

    def enter(self, x: Any) -> Value:
        """Take in the input: this rank's piece or the whole array, as the settings say."""
        return self._enter_piece(x) if self._from_pieces else self.enter_whole(x)

    def enter_whole(self, x: Any) -> Value:
        """Take in an array that every rank has whole."""
        value = Value(lengths_of(x.shape), array=self._arrays.entering(x))
        value.piece = value.array
        for axis, (n, parts, group) in enumerate(
            zip(value.lengths, self._grid.parts, self._grid.groups)
        ):
            if group is not None:
                counts = [len(rows) for rows in pieces(n, parts)]
                value.piece = self._arrays.cut(value.piece, group, dimension(axis), counts)
        return value

    def _enter_piece(self, x: Any) -> Value:
        """Take in the rows that the ranks hold, joined in the ranks' order."""
        array, whole = self._arrays.entering(x), list(lengths_of(x.shape))
        for axis, group in enumerate(self._grid.groups):
            if group is None:
                continue
            ends = np.cumsum([0, *group.all_gather(np.array([whole[axis]]))]).tolist()
            have = [range(a, b) for a, b in itertools.pairwise(ends)]
            whole[axis] = have[len(have) - 1].stop
            want = pieces(whole[axis], self._grid.parts[axis])
            array = _fetch(self._arrays, array, axis, have, want, group)
        value = Value(whole)
        value.piece = array
        return value

    def whole(self, values: Sequence[Value]) -> list[Any]:
        """Return the whole arrays of the values, on every rank."""
        for value in values:
            if value.array is None:
                array = self._piece(value)
                for axis, n in enumerate(value.lengths):
                    array = self._joined(array, axis, n)
                value.array = array
        return [value.array for value in values]

    def results(self, values: Sequence[Value]) -> list[Any]:
        """Return the results of the forward pass: pieces or whole arrays."""
        return [self._piece(v) for v in values] if self._to_pieces else self.whole(values)

    # -- calls -----------------------------------------------------------------------------

    def add(self, step: Step) -> Value:
        """Compute a call on this rank's block, and on its channels where the layer allows that."""
        arrays, group, value = self._arrays, self._grid.channel_group, Value(step.lengths, step)
        way, channels = self._way(step)
        read = step.read(self._grid.block(value.lengths))
        inputs = []
        for source in step.sources:
            piece = self._own_channels(source) if way in (ROWS, ALONG) else self._piece(source)
            inputs.append(self._read(piece, source, value, read))
        if way is None:
            value.piece = step.run([*inputs, *step.uses], read)
            return value
        assert group is not None
        if way == COLUMNS:
            # All ranks read the whole inputs, so the gradient of an input is the sum of the
            # ranks' gradients.
            inputs = [arrays.used(array, group) for array in inputs]
        make = {COLUMNS: step.columns, ROWS: step.rows, ALONG: step.along}[way]
        assert make is not None
        value.piece = make(channels)([*inputs, *step.uses], read)
        if way != ROWS:
            self._channels[value] = channels
            return value
        value.piece = arrays.added(value.piece, group)
        if step.after is not None:
            value.piece = step.after(value.piece, step.uses)
        return value

    def _way(self, step: Step) -> tuple[str | None, range]:
        """Return how a call is cut along the channels, and which channels this rank computes."""
        grid = self._grid
        mine = pieces(step.channels, grid.channels)[grid.channel]
        if step.own is not None:
            return step.own, mine
        # Channels stay in pieces for as long as layers allow it, because each joining is a message.
        # Layers that work on each channel separately keep the pieces (along). A layer that mixes
        # channels can take the pieces, too: the sum of the ranks' results joins them (rows).
        held = {self._channels.get(source) for source in step.sources}
        some = held.pop() if len(held) == 1 else None
        if some is not None and step.along is not None:
            if not step.groups:
                return ALONG, some
            if step.groups % grid.channels == 0:  # otherwise a group would be cut
                return ALONG, mine
        if some is not None and step.rows is not None:
            return ROWS, some
        if grid.channel_group is None or step.columns is None or grid.channels > step.channels:
            return None, mine
        return COLUMNS, mine

    def _own_channels(self, value: Value) -> Any:
        """Return this rank's rows and channels of a value, whose piece may have all channels."""
        group = self._grid.channel_group
        if value in self._channels or group is None:
            return value.piece
        counts = [len(rows) for rows in pieces(value.piece.shape[CHANNELS], group.size)]
        return self._arrays.cut(value.piece, group, CHANNELS, counts)

    def _piece(self, value: Value) -> Any:
        """Return this rank's rows of a value, with all channels."""
        if self._channels.pop(value, None) is not None:
            assert value.step is not None
            assert self._grid.channel_group is not None
            counts = [len(rows) for rows in pieces(value.step.channels, self._grid.channels)]
            group = self._grid.channel_group
            value.piece = self._arrays.joined(value.piece, group, CHANNELS, counts)
        return value.piece

    def _read(self, array: Any, source: Value, made: Value, read: Read) -> Any:
        """Return the rows of a source that this rank needs for its block of ``made``.

        Args:
            array: this rank's rows of the source, with all channels or some.
        """
        assert made.step is not None
        for axis, (n, group) in enumerate(zip(source.lengths, self._grid.groups)):
            if group is None:
                array = select_rows(self._arrays, array, axis, range(n), read.rows[axis])
            elif axis >= len(made.lengths):
                # The step reads this axis whole, so the result is the same on all ranks of the
                # group.
                array = self._joined(array, axis, n)
            else:
                have = pieces(n, self._grid.parts[axis])
                theirs = self._grid.along(axis, made.lengths)
                want = [made.step.read(block).rows[axis] for block in theirs]
                array = _fetch(self._arrays, array, axis, have, want, group)
        return array

    def _joined(self, array: Any, axis: int, n: int) -> Any:
        """Join the ranks' rows along an axis of length ``n``."""
        group = self._grid.groups[axis]
        if group is None:
            return array
        counts = [len(rows) for rows in pieces(n, self._grid.parts[axis])]
        return self._arrays.joined(array, group, dimension(axis), counts)

    def _added(self, array: Any, axes: Sequence[int]) -> Any:
        """Return the sum of partial results over the ranks along some axes."""
        for axis in axes:
            group = self._grid.groups[axis]
            if group is not None:
                array = self._arrays.added(array, group)
        return array

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
        x = self._piece(value)
        count = values_behind(value, x.shape[1], groups)
        cut = range(0 if groups is None else 1, len(value.lengths))
        mine = self._grid.block(value.lengths)[0]

        def average(sums: Any) -> Any:
            local = self._added(sums, cut) / count
            # With groups, a rank has the means of its own samples only, and the ranks join them.
            return local if groups is None else self._joined(local, 0, value.lengths[0])

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


def _fetch(
    arrays: Arrays,
    array: Any,
    axis: int,
    have: Sequence[range],
    want: Sequence[range],
    group: Communicator,
) -> Any:
    """Return the rows ``want[rank]`` of an array; each rank has the rows ``have[rank]`` of it.

    Collective: every rank of ``group`` calls it, with the same ``have`` and ``want``.
    """
    me = group.rank
    # The condition covers all ranks' rows, and all ranks know these. So either all ranks exchange
    # rows, or none does.
    if all(overlap(own, rows) == rows or not rows for own, rows in zip(have, want)):
        return select_rows(arrays, array, axis, have[me], want[me])
    return arrays.exchanged(array, group, dimension(axis), Halo.of(have, want, me))
