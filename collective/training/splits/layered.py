"""Cut over ranks: each rank has a block of every array, and rows travel before a layer needs them.

Four kinds of steps tie the ranks' blocks together, each the adjoint of one of the others, so that
gradients are those of one process (Y. Xu et al., "GSPMD", 2021, section 3, has the same four):

======================  =====================================  =====================================
what                    forward                                backward
======================  =====================================  =====================================
a whole array is used   every rank goes on with the whole      the ranks' gradients are summed
the ranks' parts add    the ranks' arrays are summed           every rank goes on with the whole
a whole array is cut    every rank takes its rows              the rows are gathered
blocks are joined       the rows are gathered                  every rank takes its rows
======================  =====================================  =====================================

Rows that a window reads beyond a block travel by an all-to-all, whose adjoint is one, too, and
adds where rows went to several ranks. Rows may come from any number of ranks away. What a rank has
itself does not travel: it is copied once, beside the others' rows, and its gradient once.
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
    """Refuse to cut axes that an array does not have.

    Raises:
        ShapeError: there are fewer than ``data`` cuts.
    """
    if axes < len(data) and any(parts > 1 for parts in data[axes:]):
        raise ShapeError(f"Split: data={tuple(data)} of an input with {axes} data axes.")


class BlockGrid:
    """Which block each rank of a communicator has.

    Collective: every rank of ``comm`` makes it, with the same numbers.

    Args:
        comm: the ranks; in the order of batch, channels and data axes, the last of them fastest.
        batch, channels, data: pieces along each.

    Attributes:
        parts: pieces along the batch and each data axis.
        at: this rank's piece along each.
        groups: for each axis the ranks that differ from this one in their piece along it alone;
            None where there is one piece.
        channels: pieces along the channels.
        channel: this rank's.
        channel_group: the ranks that differ from this one in their channels alone, or None.

    Raises:
        InvalidArgumentError: the pieces are not as many as the ranks.
    """

    def __init__(self, comm: Communicator, batch: int, channels: int, data: Sequence[int]) -> None:
        extents = (batch, channels, *data)
        if math.prod(extents) != comm.size:
            raise InvalidArgumentError(
                f"Split: batch={batch}, channels={channels}, data={tuple(data)} are "
                f"{math.prod(extents)} pieces; one for each of the {comm.size} ranks of comm."
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
        """Return the grid of arrays with ``axes`` data axes: the further ones are not cut.

        Raises:
            ShapeError: an axis is cut that the arrays do not have.
        """
        check_axes(self.parts[1:], axes)
        missing = axes + 1 - len(self.parts)
        found = copy.copy(self)
        found.parts = (*self.parts, *(1,) * missing)[: axes + 1]
        found.at = (*self.at, *(0,) * missing)[: axes + 1]
        found.groups = (*self.groups, *(None,) * missing)[: axes + 1]
        return found

    def block(self, lengths: Sequence[int]) -> Block:
        """Return this rank's rows of an array."""
        cuts = zip(lengths, self.parts, self.at)
        return tuple(pieces(n, parts)[at] for n, parts, at in cuts)

    def along(self, axis: int, lengths: Sequence[int]) -> list[Block]:
        """Return the blocks of the ranks that differ from this one along ``axis`` alone."""
        block = self.block(lengths)
        rows = pieces(lengths[axis], self.parts[axis])
        return [(*block[:axis], each, *block[axis + 1 :]) for each in rows]


class Layered:
    """Makes every call at once on this rank's block; see the module's docstring.

    Collective: the ranks make the same calls in the same order.
    """

    def __init__(self, arrays: Arrays, grid: BlockGrid) -> None:
        self._arrays = arrays
        self._grid = grid
        # The channels that the pieces have, where they have not all of them.
        self._channels: dict[Value, range] = {}

    def enter(self, value: Value) -> None:
        """Take this rank's rows of a value that every rank has whole."""
        piece = value.array
        for axis, (n, parts, group) in enumerate(
            zip(value.lengths, self._grid.parts, self._grid.groups)
        ):
            if group is not None:
                counts = [len(rows) for rows in pieces(n, parts)]
                piece = self._arrays.cut(piece, group, dimension(axis), counts)
        value.piece = piece

    def enter_piece(self, array: Any, lengths: Sequence[int]) -> Value:
        """Take rows that the ranks have each of an array, in their order.

        Args:
            array: this rank's rows.
            lengths: how many they are along each axis.
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
        """Make a call on this rank's block, and on its channels where a layer allows that."""
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
            # All ranks read all that is there, so that its gradient is the sum of theirs.
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
        """Return how a call is cut along the channels, and this rank's of them."""
        grid = self._grid
        mine = pieces(step.channels, grid.channels)[grid.channel]
        if step.own is not None:
            return step.own, mine
        # Channels stay in pieces as long as layers allow it, since each joining of them is a
        # message: layer by layer of the same channels (along), or up to one that mixes them, whose
        # sum joins what came of the pieces (rows).
        held = {self._channels.get(source) for source in step.sources}
        some = held.pop() if len(held) == 1 else None
        if some is not None and step.along is not None:
            if not step.groups:
                return ALONG, some
            if step.groups % grid.channels == 0:  # else a group is cut
                return ALONG, mine
        if some is not None and step.rows is not None:
            return ROWS, some
        if grid.channel_group is None or step.columns is None or grid.channels > step.channels:
            return None, mine
        return COLUMNS, mine

    def _own_channels(self, value: Value) -> Any:
        """Return this rank's rows and channels of a value that may have all channels."""
        group = self._grid.channel_group
        if value in self._channels or group is None:
            return value.piece
        counts = [len(each) for each in pieces(value.piece.shape[CHANNELS], group.size)]
        return self._arrays.cut(value.piece, group, CHANNELS, counts)

    def _join_channels(self, value: Value) -> None:
        if self._channels.pop(value, None) is None:
            return
        assert value.step is not None
        assert self._grid.channel_group is not None
        counts = [len(each) for each in pieces(value.step.channels, self._grid.channels)]
        value.piece = self._arrays.joined(value.piece, self._grid.channel_group, CHANNELS, counts)

    def _fetch(self, array: Any, source: Value, made: Value, read: Read) -> Any:
        """Return the rows of a source that this rank's block of what is made of it needs.

        Args:
            array: this rank's rows of the source, of all channels or some.
        """
        assert made.step is not None
        for axis, (n, group) in enumerate(zip(source.lengths, self._grid.groups)):
            if group is None:
                array = select_rows(self._arrays, array, axis, range(n), read.rows[axis])
            elif axis >= len(made.lengths):
                # Read whole, and what comes of it is the same on all ranks of the group.
                array = self.joined(array, axis, n)
            else:
                have = pieces(n, self._grid.parts[axis])
                theirs = self._grid.along(axis, made.lengths)
                want = [made.step.read(each).rows[axis] for each in theirs]
                array = fetch(self._arrays, array, axis, have, want, group)
        return array

    def joined(self, array: Any, axis: int, n: int) -> Any:
        """Join the ranks' rows along an axis that has ``n`` of them."""
        group = self._grid.groups[axis]
        if group is None:
            return array
        counts = [len(rows) for rows in pieces(n, self._grid.parts[axis])]
        return self._arrays.joined(array, group, dimension(axis), counts)

    def whole(self, value: Value) -> Any:
        """Return all of a value, on every rank."""
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
        """Return the sum of what the ranks along some axes computed of their rows."""
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
    """Return the rows ``want[rank]`` of an array of which each rank has ``have[rank]``.

    Collective: every rank of ``group``, with the same ``have`` and ``want``.
    """
    me = group.rank
    # Asked of all ranks' rows, which all of them know: either all exchange, or none.
    if all(overlap(own, rows) == rows or not rows for own, rows in zip(have, want)):
        return select_rows(arrays, array, axis, have[me], want[me])
    return arrays.exchanged(array, group, dimension(axis), Halo.of(have, want, me))
