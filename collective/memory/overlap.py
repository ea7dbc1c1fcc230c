"""Detection of shared memory between elements of one strided array, or of several arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import device_layout, nested
from .arrays import adapter_of

# Maximum number of steps by which NumPy may decide whether two arrays with many unusual strides
# share an element. Plain slices take a handful of steps.
_MOST_WORK: Any = 1_000_000
_TooHardError = getattr(np, "exceptions", np).TooHardError  # NumPy 1.24 has it at the top


def writable_arrays(out: Any, what: str = "array") -> list[Any]:
    """Return writable views of the leaves of ``out``, an array or a structure.

    Args:
        what: the operation, for errors.

    Raises:
        InvalidArgumentError: a leaf is no array, or is read-only.
    """
    return [adapter_of(leaf, what, "out").output(leaf)[0] for leaf in nested.flatten(out)]


def shares_memory(array: Any, out: Any) -> bool:
    """Tell whether writing to ``out``, an array or a structure, may change ``array``."""
    return any(np.may_share_memory(array, leaf) for leaf in writable_arrays(out))


def find_overlap(arrays: Sequence[Any]) -> tuple[int, int] | None:
    """Return the indices of two arrays that share an element, or None.

    The answer is exact for slices: the even and the odd elements of one array do not overlap.

    Args:
        arrays: NumPy arrays, or arrays on one GPU.

    Returns:
        The two indices. They are equal if elements of a single array share memory.
    """
    spans = []
    for index, array in enumerate(arrays):
        if not array.size:
            continue
        described = array if isinstance(array, np.ndarray) else _described(array)
        if not array.flags.c_contiguous and _overlaps_itself(described):
            return index, index
        start = described.__array_interface__["data"][0]
        spans.append((
            *device_layout.bounds(start, array.shape, array.strides, array.itemsize),
            index, described,
        ))  # fmt: skip
    spans.sort(key=lambda span: span[:3])
    reaching: list[tuple[int, int, Any]] = []
    for low, high, index, array in spans:
        reaching = [entry for entry in reaching if entry[0] > low]
        for _, other, before in reaching:
            if _share(before, array):
                return min(other, index), max(other, index)
        reaching.append((high, index, array))
    return None


def call_in_place(call: Callable[..., list[Any]], arrays: list[Any]) -> None:
    """Make a call whose results go to ``arrays``, some of which may share memory.

    A communicator refuses an ``out`` whose arrays share memory. But a model may have a parameter
    under two names, or a buffer that is a part of another one. Then the array that is later in the
    list determines the values.

    Args:
        call: function that takes ``out=``, or returns new arrays without it.
        arrays: arrays for the results.
    """
    views = writable_arrays(arrays)
    pair = find_overlap(views)
    if pair is None or pair[0] == pair[1]:  # an expanded array: let the call raise its error
        call(out=arrays)
        return
    for view, result in zip(views, call()):
        view[...] = adapter_of(result).view(result)[0]


def _share(a: Any, b: Any) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=_MOST_WORK))
    except _TooHardError:
        return True  # undecided, and a wrong "no" would destroy a result


def _described(array: Any) -> Any:
    """Return a NumPy array with the layout of a GPU array, to compare addresses; never read it."""
    interface = {
        "version": 3,
        "data": (array.address, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": array.dtype.str,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _overlaps_itself(array: Any) -> bool:
    axes = sorted((abs(s), length) for s, length in zip(array.strides, array.shape) if length > 1)
    extent = array.itemsize
    for stride, length in axes:
        if stride < extent:
            break
        extent += stride * (length - 1)
    else:
        return False  # each axis steps over the whole extent of the axes before it
    if axes[0][0] == 0:
        return True
    # The strides interlock, which only as_strided() can make: compare the starts of all elements.
    starts = np.zeros(1, np.int64)
    for stride, length in axes:
        starts = np.add.outer(starts, stride * np.arange(length)).ravel()
    return bool(np.diff(np.sort(starts)).min() < array.itemsize)
