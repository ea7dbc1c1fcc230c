"""Rows of its input that a layer needs for some rows of its output, along one axis.

A convolution or pooling reads a window of rows for each row of its output. Its adjoint, the
transposed convolution, writes a window for each row of its input. Resizing, mirrored padding and
similar functions take rows one by one. With these three rules every cut of every such layer is
exact. A piece of the output is computed from the rows that it needs. Padding is put only at
the true ends of the axis, as in the whole layer.

The arithmetic is that of V. Dumoulin and F. Visin, "A guide to convolution arithmetic for deep
learning" (2016), relationships 6 and 14, solved for a range of outputs instead of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from collective.algorithms.pieces import even, limits


class Rule(Protocol):
    """Dependence of the rows of a layer's output on the rows of its input."""

    def length(self, n: int) -> int:
        """Return the number of rows of the output for ``n`` rows of input."""

    def needs(self, out: range) -> range:
        """Return the rows of input that the rows ``out`` of the output depend on.

        Rows before 0, and rows from the input's length on, are padding. An empty ``out`` needs no
        rows.
        """


class WindowRule(NamedTuple):
    """Rule of a convolution, correlation or pooling; with kernel 1, of padding and cropping.

    Output row ``i`` reads the input rows ``i * stride - before + dilation * j`` for ``j`` below
    ``kernel``.

    Attributes:
        kernel: number of rows that an output row reads, at least 1.
        stride: distance in rows between the windows of neighbouring output rows.
        before, after: number of padding rows at the ends of the axis; negative numbers crop.
        dilation: distance in rows between two rows that a window reads.
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Number of rows from the first row that a window reads to its last, inclusive."""
        return self.dilation * (self.kernel - 1) + 1

    def ending(self, n: int, rows: int) -> WindowRule:
        """Return a copy padded behind ``n`` rows of input so that the output has ``rows`` rows."""
        return self._replace(after=(rows - 1) * self.stride + self.reach - n - self.before)

    def covering(self, n: int) -> WindowRule:
        """Return a copy whose windows read all ``n`` rows; the last may reach beyond the end."""
        beyond = n + self.before + self.after - self.reach
        return self.ending(n, max(0, -(-beyond // self.stride) + 1))

    def length(self, n: int) -> int:
        """Return the number of rows of the output for ``n`` rows of input."""
        return max(0, (n + self.before + self.after - self.reach) // self.stride + 1)

    def needs(self, out: range) -> range:
        """Return the rows that the windows of ``out`` reach over, padding included."""
        if not out:
            return range(0)
        first = out.start * self.stride - self.before
        return range(first, first + (len(out) - 1) * self.stride + self.reach)


class Transposed(NamedTuple):
    """Rule of a transposed convolution: the adjoint of a :class:`WindowRule` with the same numbers.

    Input row ``i`` writes the output rows ``i * stride - before + dilation * j`` for ``j`` below
    ``kernel``.

    Attributes:
        kernel, stride, dilation: those of the window.
        before, after: number of rows cut off the ends of the written rows.
        extra: number of rows added at the end of the output, which possibly no input row writes
            (``output_padding``).
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    extra: int = 0

    @property
    def reach(self) -> int:
        """Number of rows from the first row that an input row writes to its last, inclusive."""
        return self.dilation * (self.kernel - 1) + 1

    def length(self, n: int) -> int:
        """Return the number of rows of the output for ``n`` rows of input."""
        if n == 0:
            return 0
        written = (n - 1) * self.stride + self.reach
        return max(0, written - self.before - self.after + self.extra)

    def needs(self, out: range) -> range:
        """Return the rows that write into ``out``, including rows outside the input."""
        if not out:
            return range(0)
        # Row i writes into [start, stop) if some i * stride - before + dilation * j lies there.
        # For dilation 1 this range of i is exact at both ends. Otherwise windows may jump over a
        # short ``out``, and the range may be too wide. This costs extra rows, but the result stays
        # exact.
        first = -((self.reach - 1 - out.start - self.before) // self.stride)
        last = (out.stop - 1 + self.before) // self.stride
        return range(first, max(first, last + 1))


class Taken(NamedTuple):
    """Rule for rows made of single input rows: resizing, mirrored or circular padding, steps.

    Attributes:
        rows: function that returns the input rows of which an output row is made; the input has
            all of these rows.
        total: number of rows of the output.
    """

    rows: Callable[[int], Sequence[int]]
    total: int

    @classmethod
    def of(cls, *columns: Sequence[int]) -> Taken:
        """Return the rule that makes output row ``i`` of the ``i``-th entry of each column."""
        return cls(list(zip(*columns, strict=True)).__getitem__, len(columns[0]))

    def length(self, n: int) -> int:
        """Return the number of rows of the output, which does not depend on the input."""
        return self.total

    def needs(self, out: range) -> range:
        """Return the hull of the rows of which ``out`` is made."""
        read = [row for i in out for row in self.rows(i)]
        return range(min(read), max(read) + 1) if read else range(0)


def data_slices(index: Sequence[Any], dims: int) -> list[slice] | None:
    """Return the slices of an index along the data axes.

    Return None if the index does not consist of slices only, or does not take the whole batch and
    all channels.
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
    """Divide ``rows`` into the rows of an axis of length ``n`` and the padding around them.

    Returns:
        The rows of the axis, and the numbers of padding rows before and after them. If all of
        ``rows`` lie in the padding, the range of rows is empty, and all count as padding on the
        side where they lie.
    """
    there = range(min(max(rows.start, 0), n), min(max(rows.stop, 0), n))
    before = min(rows.stop, 0) - rows.start if rows.start < 0 else 0
    after = rows.stop - max(rows.start, n) if rows.stop > n else 0
    return there, before, after


def pieces(length: int, parts: int) -> list[range]:
    """Cut ``length`` rows into ``parts`` runs that differ by at most one row, longer runs first.

    ``numpy.array_split`` and all calls of a communicator cut in the same way. If there are more
    parts than rows, the last parts are empty.
    """
    return list(itertools.starmap(range, itertools.pairwise(limits(even(length, parts)))))


def overlap(a: range, b: range) -> range:
    """Return the rows that are in both ranges; an empty range if there are none."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def exchange(have: Sequence[range], want: Sequence[range]) -> list[list[range]]:
    """Return the rows that each owner sends to each rank, so that all have the rows they need.

    Args:
        have: rows that each rank owns, without overlap.
        want: rows that each rank needs. Rows without an owner are padding, and are not sent.

    Returns:
        Rows, indexed by ``[source][destination]``. Source and destination may be any number of
        ranks apart, and the rows may be none.
    """
    return [[overlap(mine, theirs) for theirs in want] for mine in have]
