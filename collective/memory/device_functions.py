"""Implementations, for arrays on GPUs, of the NumPy functions that the calls use (NEP 18)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collective.errors import DeviceError, DtypeError, ShapeError

from . import device_layout
from .device_space import DeviceElements

__all__ = ["FUNCTIONS"]

#: Function of NumPy -> implementation in this module.
FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def _for(function: Any) -> Callable[[Any], Any]:
    def register(implementation: Any) -> Any:
        FUNCTIONS[function] = implementation
        return implementation

    return register


@_for(np.concatenate)
def _concatenate(arrays: Sequence[Any], axis: int | None = 0, out: Any = None) -> DeviceElements:
    arrays = list(arrays)
    for array in arrays:
        _check_device("concatenate", array)
    if axis is None:
        arrays, axis = [array.ravel() for array in arrays], 0
    first = arrays[0]
    if not -first.ndim <= axis < first.ndim:
        raise ShapeError(f"concatenate: axis {axis} of arrays of {first.ndim} dimensions.")
    axis %= first.ndim
    for array in arrays:
        if array.ndim != first.ndim or _without(array.shape, axis) != _without(first.shape, axis):
            raise ShapeError(
                f"concatenate: shapes {first.shape} and {array.shape} differ beside axis {axis}."
            )
        if array.dtype != first.dtype:
            raise DtypeError(f"concatenate: dtypes {first.dtype} and {array.dtype}.")
    total = sum(array.shape[axis] for array in arrays)
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    if out is None:
        out = first.allocate(shape)
    else:
        _check_device("concatenate: out", out)
        if out.shape != shape:
            raise ShapeError(f"concatenate: out has shape {out.shape}; the result has {shape}.")
    start = 0
    for array in arrays:
        stop = start + array.shape[axis]
        out[(slice(None),) * axis + (slice(start, stop),)] = array
        start = stop
    return out  # type: ignore[no-any-return]


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _is_on_device(array: Any) -> bool:
    # An object with this attribute is a DeviceArray. This module cannot import that class, whose
    # module imports this one. Look at the type: on the array, the property would be computed.
    return hasattr(type(array), "effective_stream")


def _check_device(what: str, array: Any) -> None:
    if not _is_on_device(array):
        raise DeviceError(
            f"{what}: {type(array).__name__} together with arrays of a GPU; elements are never "
            "copied between a GPU and the host silently. Use to_host() or fill_from_host()."
        )


@_for(np.may_share_memory)
@_for(np.shares_memory)
def _may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """Tell whether address ranges overlap; GPUs and the host share one address space."""
    (low, high), (start, stop) = _bounds(a), _bounds(b)
    return low < stop and start < high


def _bounds(array: Any) -> tuple[int, int]:
    if _is_on_device(array):
        return array.bounds  # type: ignore[no-any-return]
    host = np.asarray(array)
    address = host.__array_interface__["data"][0]
    return device_layout.bounds(address, host.shape, host.strides, host.itemsize)


@_for(np.copyto)
def _copyto(dst: Any, src: Any) -> None:
    _check_device("copyto", dst)
    dst[...] = src


@_for(np.moveaxis)
def _moveaxis(a: DeviceElements, source: Any, destination: Any) -> DeviceElements:
    return a.transpose(device_layout.axes_moved(a.ndim, source, destination))


@_for(np.atleast_1d)
def _atleast_1d(a: DeviceElements) -> DeviceElements:
    return a if a.ndim else a.reshape(1)


@_for(np.empty_like)
def _empty_like(
    prototype: DeviceElements,
    dtype: Any = None,
    order: str = "K",
    subok: bool = True,
    shape: Any = None,
) -> DeviceElements:
    wanted = prototype.shape if shape is None else shape
    return prototype.allocate(tuple(wanted) if not isinstance(wanted, int) else wanted, dtype)


@_for(np.split)
def _split(ary: DeviceElements, indices_or_sections: Any, axis: int = 0) -> list[DeviceElements]:
    if not -ary.ndim <= axis < ary.ndim:
        raise ShapeError(f"split: axis {axis} of an array of {ary.ndim} dimensions.")
    axis %= ary.ndim
    length = ary.shape[axis]
    if np.ndim(indices_or_sections) == 0:
        sections = operator.index(indices_or_sections)
        if sections <= 0 or length % sections:
            raise ShapeError(f"split: {length} rows do not make {sections} equal parts.")
        cuts = [length // sections * k for k in range(1, sections)]
    else:
        cuts = [operator.index(cut) for cut in indices_or_sections]
    before = (slice(None),) * axis
    return [
        ary[(*before, slice(start, stop))] for start, stop in itertools.pairwise([0, *cuts, length])
    ]
