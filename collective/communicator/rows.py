"""Rows and pieces of arrays: arrays are split along an axis, and joined along an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.algorithms import pieces
from collective.errors import ShapeError

__all__ = ["Rows", "check_counts", "split_sizes"]

Array = np.ndarray[Any, Any]


class Rows:
    """Array in C order with the axis that is cut moved to the front.

    Attributes:
        array: contiguous array, in the original memory if that is possible.
        axis: number of the axis, not negative.
        length: length of the axis; a 0-d array counts as one row.
        inner: number of elements in a row.
    """

    __slots__ = ("_rest", "array", "axis", "inner", "length")

    def __init__(self, what: str, array: Array, axis: int) -> None:
        if not array.shape:
            array = array.reshape(1)
        axes = len(array.shape)
        if not isinstance(axis, int) or not -axes <= axis < axes:
            raise ShapeError(f"{what}: no axis {axis!r} in an array of {axes} dimensions.")
        self.axis = axis % axes
        if self.axis:
            array = np.moveaxis(array, self.axis, 0)
        self.array = array if array.flags.c_contiguous else array.copy()
        self.length = array.shape[0]
        self._rest = array.shape[1:]
        self.inner = math.prod(self._rest)

    def shape_with(self, length: int) -> tuple[int, ...]:
        """Return the shape of the original array with another length of the axis."""
        rest = self._rest
        return (*rest[: self.axis], length, *rest[self.axis :])

    def piece(self, counts: Sequence[int], rank: int) -> Array:
        """Return the rows of one rank as a flat array, if each rank gets ``counts`` rows."""
        start = sum(counts[:rank])
        return self.array[start : start + counts[rank]].ravel()

    def target(self, flat: Array) -> Array:
        """Return memory in which rows can arrive: ``flat`` itself if no axis was moved."""
        return flat if self.axis == 0 else np.empty_like(flat)

    def restore(self, rows: Array, flat: Array, length: int) -> None:
        """Copy ``length`` flat rows into ``flat``, with the axis moved back to its place."""
        if self.axis:
            moved = np.moveaxis(rows.reshape(length, *self._rest), 0, self.axis)
            flat[:] = moved.ravel()
        elif rows is not flat:
            flat[:] = rows


def split_sizes(what: str, length: int, size: int, counts: Sequence[int] | None) -> list[int]:
    """Return the lengths of the ranks' pieces: ``counts``, or as ``numpy.array_split`` cuts.

    Raises:
        ShapeError: the counts are not ``size`` non-negative integers whose sum is ``length``.
    """
    if counts is None:
        return pieces.even(length, size)
    sizes = check_counts(what, counts, size)
    if sum(sizes) != length:
        raise ShapeError(f"{what}: counts {sizes} add up to {sum(sizes)}; the axis has {length}.")
    return sizes


def check_counts(what: str, counts: Sequence[int], size: int) -> list[int]:
    """Return ``counts`` as a list of ``size`` non-negative integers.

    Raises:
        ShapeError: ``counts`` is not a sequence of ``size`` non-negative integers.
    """
    try:
        sizes = list(map(int, counts))
    except (TypeError, ValueError):
        sizes = [-1]
    if len(sizes) != size or min(sizes) < 0 or sizes != list(counts):
        raise ShapeError(
            f"{what}: counts {counts!r}; expected one non-negative integer for each of {size} "
            "ranks."
        )
    return sizes
