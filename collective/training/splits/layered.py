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
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import InvalidArgumentError, ShapeError

from .arrays import Arrays, Halo
from .blocks import Block, Read, Step, Value
from .filters import ALONG, COLUMNS, ROWS
from .serial import CHANNELS, dimension, select_rows
from .windows import overlap, pieces

__all__ = ["BlockGrid", "Layered", "check_axes", "fetch"]


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


class Layered:
    """Executor that computes every call immediately on this rank's block.

    The module's docstring describes the exchange between ranks.

    Collective: the ranks make the same calls in the same order.
    """

    def __init__(self, arrays: Arrays, grid: BlockGrid) -> None:
        self._arrays = arrays
        self._grid = grid
        # For each value whose pieces have only some channels: the range of these channels.
        self._channels: dict[Value, range] = {}

    def enter(self, value: Value) -> None:
        """Set ``value.piece`` to this rank's rows of a value that every rank has whole."""
        piece = value.array
        for axis, (n, parts, group) in enumerate(
            zip(value.lengths, self._grid.parts, self._grid.groups)
        ):
            if group is not None:
                counts = [len(rows) for rows in pieces(n, parts)]
                piece = self._arrays.cut(piece, group, dimension(axis), counts)
        value.piece = piece

    def enter_piece(self, array: Any, lengths: Sequence[int]) -> Value:
        """Return a value made of the rows that the ranks hold, joined in the ranks' order.

        Args:
            array: this rank's rows.
            lengths: number of these rows along each axis.
        """
        whole = list(lengths)
        for axis, (n, group) in enumerate(zip(lengths, self._grid.groups)):
            if group is None:
                continue
            ends = np.cumsum([0, *group.all_gather(np.array([n]))]).tolist()
            have = [range(a, b) for a, b in itertools.pairwise(ends)]
            whole[axis] = have[len(have) - 1].stop
            want = pieces(whole[axis], self._grid.parts[axis])
            array = fetch(self._arrays, array, axis, have, want, group)
        value = Value(whole)
        value.piece = array
        return value

    def add(self, step: Step) -> Value:
        """Compute a call on this rank's block, and on its channels where the layer allows that."""
        arrays, group, value = self._arrays, self._grid.channel_group, Value(step.lengths, step)
        way, channels = self._way(step)
        read = step.read(self._grid.block(value.lengths))
        inputs = []
        for source in step.sources:
            if way in (ROWS, ALONG):
                piece = self._own_channels(source)
            else:
                self._join_channels(source)
                piece = source.piece
            inputs.append(self._fetch(piece, source, value, read))
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

    def _join_channels(self, value: Value) -> None:
        if self._channels.pop(value, None) is None:
            return
        assert value.step is not None
        assert self._grid.channel_group is not None
        counts = [len(rows) for rows in pieces(value.step.channels, self._grid.channels)]
        value.piece = self._arrays.joined(value.piece, self._grid.channel_group, CHANNELS, counts)

    def _fetch(self, array: Any, source: Value, made: Value, read: Read) -> Any:
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
                array = self.joined(array, axis, n)
            else:
                have = pieces(n, self._grid.parts[axis])
                theirs = self._grid.along(axis, made.lengths)
                want = [made.step.read(block).rows[axis] for block in theirs]
                array = fetch(self._arrays, array, axis, have, want, group)
        return array

    def joined(self, array: Any, axis: int, n: int) -> Any:
        """Join the ranks' rows along an axis of length ``n``."""
        group = self._grid.groups[axis]
        if group is None:
            return array
        counts = [len(rows) for rows in pieces(n, self._grid.parts[axis])]
        return self._arrays.joined(array, group, dimension(axis), counts)

    def whole(self, value: Value) -> Any:
        """Return the whole array of a value, on every rank."""
        if value.array is None:
            self._join_channels(value)
            array = value.piece
            for axis, n in enumerate(value.lengths):
                array = self.joined(array, axis, n)
            value.array = array
        return value.array

    def piece(self, value: Value) -> Any:
        """Return this rank's rows of a value, with all channels."""
        self._join_channels(value)
        return value.piece

    def added(self, array: Any, axes: Sequence[int]) -> Any:
        """Return the sum of partial results over the ranks along some axes."""
        for axis in axes:
            group = self._grid.groups[axis]
            if group is not None:
                array = self._arrays.added(array, group)
        return array


def fetch(
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
