"""Which rows of its input a layer needs for some rows of its output, along one axis.

A convolution or pooling reads a window of rows for each row of its output; its adjoint, the
transposed convolution, writes one for each row of its input; resizing, mirrored padding and the
like take rows one by one. With these three rules every cut of every such layer is exact: a piece
of the output is computed from the rows that it needs, and padding is put where the whole layer has
it, at the true ends of the axis, and nowhere else.

The arithmetic is that of V. Dumoulin and F. Visin, "A guide to convolution arithmetic for deep
learning" (2016), relationships 6 and 14, solved for a range of outputs instead of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from collective.algorithms.pieces import even, limits

__all__ = [
    "Rule", "Taken", "Transposed", "Window", "clip", "data_slices", "exchange", "overlap", "pieces",
]  # fmt: skip


class Rule(Protocol):
    """How the rows of a layer's output depend on those of its input."""

    def length(self, n: int) -> int:
        """Return how many rows the output has for ``n`` rows of input."""

    def needs(self, out: range) -> range:
        """Return the rows of input that the rows ``out`` of the output depend on.

        Rows before 0 and from the input's length on are padding. No rows need none.
        """


class Window(NamedTuple):
    """A convolution, correlation or pooling; padding and cropping are those of kernel 1.

    Output row ``i`` reads the input rows ``i * stride - before + dilation * j`` for ``j`` below
    ``kernel``.

    Attributes:
        kernel: rows that an output row reads, 1 or more.
        stride: rows from one output row's window to the next one's.
        before, after: rows of padding at the ends of the axis; negative ones crop.
        dilation: rows between two that a window reads.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Rows from the first that a window reads to behind the last."""
        return self.dilation * (self.kernel - 1) + 1

    def ending(self, n: int, rows: int) -> Window:
        """Return it with such padding behind ``n`` rows of input that the output has ``rows``."""
        return self._replace(after=(rows - 1) * self.stride + self.reach - n - self.before)

    def covering(self, n: int) -> Window:
        """Return it so that the windows read each of ``n`` rows; the last may hang over the end."""
        beyond = n + self.before + self.after - self.reach
        return self.ending(n, max(0, -(-beyond // self.stride) + 1))

    def length(self, n: int) -> int:
        """Return how many rows the output has for ``n`` rows of input."""
        return max(0, (n + self.before + self.after - self.reach) // self.stride + 1)

    def needs(self, out: range) -> range:
        """Return the rows that the windows of ``out`` reach over, padding included."""
        if not out:
            return range(0)
        first = out.start * self.stride - self.before
        return range(first, first + (len(out) - 1) * self.stride + self.reach)


class Transposed(NamedTuple):
    """A transposed convolution: the adjoint of a :class:`Window` of the same numbers.

    Input row ``i`` writes the output rows ``i * stride - before + dilation * j`` for ``j`` below
    ``kernel``.

    Attributes:
        kernel, stride, dilation: as those of the window.
        before, after: rows cut off the ends of what is written.
        extra: rows added at the end of the output, that no input may write (``output_padding``).
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    extra: int = 0

    @property
    def reach(self) -> int:
        """Rows from the first that an input row writes to behind the last."""
        return self.dilation * (self.kernel - 1) + 1

    def length(self, n: int) -> int:
        """Return how many rows the output has for ``n`` rows of input."""
        if n == 0:
            return 0
        written = (n - 1) * self.stride + self.reach
        return max(0, written - self.before - self.after + self.extra)

    def needs(self, out: range) -> range:
        """Return the rows that write into ``out``, those outside the input included."""
        if not out:
            return range(0)
        # i writes into [start, stop) if some i * stride - before + dilation * j lies there: a
        # range of i that is exact at both ends for dilation 1, and may be too wide by windows
        # that jump over a short ``out``, which costs rows and no exactness.
        first = -((self.reach - 1 - out.start - self.before) // self.stride)
        last = (out.stop - 1 + self.before) // self.stride
        return range(first, max(first, last + 1))


class Taken(NamedTuple):
    """Rows made of single rows of the input: resizing, mirrored or circular padding, steps.

    Attributes:
        rows: for an output row, the input rows that it is made of; all of them are rows that
            the input has.
        total: how many rows the output has.
    """

    rows: Callable[[int], Sequence[int]]
    total: int

    @classmethod
    def of(cls, *columns: Sequence[int]) -> Taken:
        """Return the rule by which output row ``i`` is made of number ``i`` of each column."""
        return cls(list(zip(*columns, strict=True)).__getitem__, len(columns[0]))

    def length(self, n: int) -> int:
        """Return how many rows the output has, whatever the input has."""
        return self.total

    def needs(self, out: range) -> range:
        """Return the hull of the rows that ``out`` is made of."""
        read = [row for i in out for row in self.rows(i)]
        return range(min(read), max(read) + 1) if read else range(0)


def data_slices(index: Sequence[Any], dims: int) -> list[slice] | None:
    """Return what an index into an array takes of the data axes.

    None if it is not made of slices alone, or takes less than all of the batch or the channels.
    """
    places = list(index)
    if Ellipsis in places:
        at = places.index(Ellipsis)
        places[at : at + 1] = [slice(None)] * (dims - len(places) + 1)
    places += [slice(None)] * (dims - len(places))
    if not all(isinstance(each, slice) for each in places):
        return None
    return None if any(each != slice(None) for each in places[:2]) else places[2:]


def clip(rows: range, n: int) -> tuple[range, int, int]:
    """Part ``rows`` into those that an axis of ``n`` rows has and the padding around them.

    Returns:
        The rows that are there, and how many rows of padding come before and after them. Rows
        that lie wholly in the padding have no row of the axis, and all count as padding on the
        side where they lie.
    """
    there = range(min(max(rows.start, 0), n), min(max(rows.stop, 0), n))
    before = min(rows.stop, 0) - rows.start if rows.start < 0 else 0
    after = rows.stop - max(rows.start, n) if rows.stop > n else 0
    return there, before, after


def pieces(length: int, parts: int) -> list[range]:
    """Cut ``length`` rows into ``parts`` runs that differ by a row at most, longer ones first.

    As ``numpy.array_split`` and all calls of a communicator cut. Where there are more parts than
    rows the last ones are empty.
    """
    return list(itertools.starmap(range, itertools.pairwise(limits(even(length, parts)))))


def overlap(a: range, b: range) -> range:
    """Return the rows that both ranges have; an empty range where there are none."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def exchange(have: Sequence[range], want: Sequence[range]) -> list[list[range]]:
    """Return which rows each owner sends to each rank so that all have what they need.

    Args:
        have: the rows that each rank owns, without overlap.
        want: the rows that each rank needs; what nobody owns is padding, and not sent.

    Returns:
        ``[source][destination]``, rows that may be many ranks away, and may be none.
    """
    return [[overlap(mine, theirs) for theirs in want] for mine in have]
