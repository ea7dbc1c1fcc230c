"""NumPy's rules for shapes and strides, for arrays that NumPy cannot hold.

Strides are in bytes. ``shape`` and ``strides`` have equal length.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from collective.errors import ShapeError

Ints = tuple[int, ...]


def c_strides(shape: Ints, itemsize: int) -> Ints:
    """Return the strides of elements that lie in C order without gaps."""
    if len(shape) == 1:
        return (itemsize,)
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= max(length, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Ints, strides: Ints, itemsize: int) -> bool:
    """Tell whether elements lie in C order without gaps; an axis of length 1 has no gaps."""
    if 0 in shape:
        return True
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length != 1:
            if stride != itemsize:
                return False
            itemsize *= length
    return True


def bounds(address: int, shape: Ints, strides: Ints, itemsize: int) -> tuple[int, int]:
    """Return the address of the first byte, and the end of the last one; gaps are included."""
    if 0 in shape:
        return address, address
    low = high = address
    for length, stride in zip(shape, strides):
        if stride < 0:
            low += stride * (length - 1)
        else:
            high += stride * (length - 1)
    return low, high + itemsize


def resolved(shape: Sequence[int], size: int) -> Ints:
    """Return a shape of ``size`` elements; compute the length that is -1, if there is one.

    Raises:
        ShapeError: there is no such shape.
    """
    lengths = [operator.index(length) for length in shape]
    if lengths.count(-1) == 1:
        known = -math.prod(lengths)
        if known and size % known == 0:
            lengths[lengths.index(-1)] = size // known
    if min(lengths, default=0) < 0 or math.prod(lengths) != size:
        raise ShapeError(f"reshape: {size} elements do not make the shape {tuple(shape)}.")
    return tuple(lengths)


def reshaped(shape: Ints, strides: Ints, new: Ints) -> Ints | None:
    """Return the strides with which the same elements have the shape ``new``.

    Returns:
        The strides, or None if only a copy can have that shape.
    """
    if 0 in shape:
        return c_strides(new, 1)
    # Runs of axes over which the elements are evenly spaced: [length, stride of the last axis].
    runs: list[list[int]] = []
    for length, stride in zip(shape, strides):
        if length == 1:
            continue
        if runs and runs[-1][1] == stride * length:
            runs[-1] = [runs[-1][0] * length, stride]
        else:
            runs.append([length, stride])
    new_strides: list[int] = []
    step = 1  # elements of the current run that earlier axes of the new shape have taken
    for length in reversed(new):
        if runs and step == runs[-1][0] and length != 1:
            runs.pop()
            step = 1
        if length != 1 and (not runs or runs[-1][0] % (step * length)):
            return None
        new_strides.append(step * runs[-1][1] if runs else 0)
        step *= length
    return tuple(reversed(new_strides))


def broadcast(shape: Ints, strides: Ints, new: Ints) -> Ints:
    """Return the strides with which the elements repeat to fill the shape ``new``.

    Raises:
        ShapeError: the elements cannot be broadcast to that shape.
    """
    # Ignore surplus leading axes of length 1, as NumPy does in an assignment.
    extra = max(len(shape) - len(new), 0)
    lead = max(len(new) - len(shape), 0)
    pairs = list(zip(shape[extra:], new[lead:]))
    if any(length != 1 for length in shape[:extra]) or any(a not in (1, b) for a, b in pairs):
        raise ShapeError(f"array: the shape {shape} does not fit into {new}.")
    return (0,) * lead + tuple(
        stride if a == b else 0 for (a, b), stride in zip(pairs, strides[extra:])
    )


def indexed(key: Any, shape: Ints, strides: Ints) -> tuple[int, Ints, Ints]:
    """Return the offset, shape and strides of ``array[key]``.

    Args:
        key: an integer, a slice, an Ellipsis, or a tuple of them.

    Raises:
        IndexError: an index is out of range, or of another kind.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [n for n, index in enumerate(keys) if index is Ellipsis]
    missing = len(shape) - len(keys) + len(dots[:1])
    if missing < 0 or len(dots) > 1:
        raise IndexError(f"array: too many indices for {len(shape)} dimensions: {key!r}.")
    at = dots[0] if dots else len(keys)
    keys[at : at + len(dots)] = [slice(None)] * missing
    offset = 0
    new_shape, new_strides = [], []
    for axis, (index, length, stride) in enumerate(zip(keys, shape, strides)):
        if isinstance(index, slice):
            start, stop, step = index.indices(length)
            count = len(range(start, stop, step))
            offset += start * stride if count else 0
            new_shape.append(count)
            new_strides.append(stride * step)
        else:
            offset += stride * _position(index, axis, length)
    return offset, tuple(new_shape), tuple(new_strides)


def _position(index: Any, axis: int, length: int) -> int:
    try:
        if isinstance(index, bool):
            raise TypeError
        position = operator.index(index)
    except TypeError:
        raise IndexError(
            f"array: index {index!r}; a GPU array takes only integers, slices and an Ellipsis."
        ) from None
    if not -length <= position < length:
        raise IndexError(f"array: index {position} is outside axis {axis} of length {length}.")
    return position % length
