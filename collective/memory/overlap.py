"""Whether elements of arrays share memory: of one array with strides, or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import device_layout, nested
from .arrays import adapter_of

__all__ = ["call_in_place", "find_overlap", "shares_memory", "writable_arrays"]

# Steps that NumPy may take to decide whether two arrays of many odd strides share an element. Plain
# slices take a handful.
_MOST_WORK: Any = 1_000_000
_TooHardError = getattr(np, "exceptions", np).TooHardError  # NumPy 1.24 has it at the top


def writable_arrays(out: Any) -> list[Any]:
    """Return views of the leaves of ``out``, an array or a structure, for writing to.

    Raises:
        InvalidArgumentError: a leaf is no array, or is read-only.
    """
    return [adapter_of(leaf).output(leaf)[0] for leaf in nested.flatten(out)]


def shares_memory(array: Any, out: Any) -> bool:
    """Return whether writing to ``out``, an array or a structure, may change ``array``."""
    return any(np.may_share_memory(array, leaf) for leaf in writable_arrays(out))


def find_overlap(arrays: Sequence[Any]) -> tuple[int, int] | None:
    """Return the indices of two arrays that share an element, or None.

    The answer is exact for slices: the even and the odd elements of one array do not overlap.

    Args:
        arrays: arrays of NumPy, or of one GPU.

    Returns:
        Twice the same index where elements of one array share memory.
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
        reaching = [each for each in reaching if each[0] > low]
        for _, other, before in reaching:
            if _share(before, array):
                return min(other, index), max(other, index)
        reaching.append((high, index, array))
    return None


def call_in_place(call: Callable[..., list[Any]], arrays: list[Any]) -> None:
    """Make a call whose results go to ``arrays``, some of which may share memory.

    A communicator refuses such an ``out``. A model may well have a parameter under two names, or a
    buffer that is a part of another one; the later one in the list wins.

    Args:
        call: takes ``out=``, or returns new arrays.
        arrays: where the results go.
    """
    views = writable_arrays(arrays)
    pair = find_overlap(views)
    if pair is None or pair[0] == pair[1]:  # of an expanded array the call says what is wrong
        call(out=arrays)
        return
    for view, result in zip(views, call()):
        view[...] = adapter_of(result).view(result)[0]


def _share(a: Any, b: Any) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=_MOST_WORK))
    except _TooHardError:
        return True  # nobody knows, and a wrong "no" would cost a result


def _described(array: Any) -> Any:
    """Return NumPy's view of an array of a GPU: to compare addresses, never to be read."""
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
        return False  # every axis steps over all that the axes before it span
    if axes[0][0] == 0:
        return True
    # Strides that interlock, of as_strided() alone: compare where the elements begin.
    starts = np.zeros(1, np.int64)
    for stride, length in axes:
        starts = np.add.outer(starts, stride * np.arange(length)).ravel()
    return bool(np.diff(np.sort(starts)).min() < array.itemsize)
