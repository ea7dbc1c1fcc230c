"""The rule for pieces: what is split is split along an axis, what is collected is joined."""

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
    """An array with the axis that is cut brought to the front, in C order.

    Attributes:
        array: contiguous; the array's own memory where that is possible.
        axis: the axis, not negative.
        length: its length; a 0-d array counts as one row.
        inner: elements a row.
    """

    __slots__ = ("_rest", "array", "axis", "inner", "length")

    def __init__(self, what: str, array: Array, axis: int) -> None:
        if not array.shape:
            array = array.reshape(1)
        axes = len(array.shape)
        if not isinstance(axis, int) or not -axes <= axis < axes:
            raise ShapeError(f"{what}: axis {axis!r} of an array of {axes} dimensions.")
        self.axis = axis % axes
        if self.axis:
            array = np.moveaxis(array, self.axis, 0)
        self.array = array if array.flags.c_contiguous else array.copy()
        self.length = array.shape[0]
        self._rest = array.shape[1:]
        self.inner = math.prod(self._rest)

    def shape_with(self, length: int) -> tuple[int, ...]:
        """Return the shape that the array has with another length of its axis."""
        rest = self._rest
        return (*rest[: self.axis], length, *rest[self.axis :])

    def piece(self, sizes: Sequence[int], rank: int) -> Array:
        """Return rank's rows, flat, when the rows are cut into ``sizes``."""
        start = sum(sizes[:rank])
        return self.array[start : start + sizes[rank]].ravel()

    def target(self, flat: Array) -> Array:
        """Return where rows may arrive: ``flat`` itself if no axis was moved."""
        return flat if self.axis == 0 else np.empty_like(flat)

    def restore(self, rows: Array, flat: Array, length: int) -> None:
        """Put ``length`` rows, flat, into ``flat`` with the axis back in its place."""
        if self.axis:
            moved = np.moveaxis(rows.reshape(length, *self._rest), 0, self.axis)
            flat[:] = moved.ravel()
        elif rows is not flat:
            flat[:] = rows


def split_sizes(what: str, length: int, size: int, counts: Sequence[int] | None) -> list[int]:
    """Return the ranks' lengths: ``counts``, or as ``numpy.array_split`` cuts.

    Raises:
        ShapeError: the counts are not ``size`` non-negative integers that add up.
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
        ShapeError: they are not.
    """
    try:
        sizes = list(map(int, counts))
    except (TypeError, ValueError):
        sizes = [-1]
    if len(sizes) != size or min(sizes) < 0 or sizes != list(counts):
        raise ShapeError(
            f"{what}: counts {counts!r}; one non-negative integer for each of {size} ranks."
        )
    return sizes
