"""Arrays of any framework as memory, on the CPU or on this rank's GPU: views, rows and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collective.deadline import Deadline
from collective.errors import DeviceError, InvalidArgumentError, ShapeError
from collective.memory import dtypes, nested
from collective.memory.arrays import (
    NUMBERS,
    Adapter,
    Distant,
    Staged,
    adapter_like,
    adapter_of,
    is_number,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType

from ..output import same_memory
from ..path import Path

Array = np.ndarray[Any, Any]
UINT8 = dtypes.BY_NAME["uint8"]
# Operations that take Python numbers: their result is then a plain Python value.
_OF_NUMBERS = {"all_reduce", "reduce", "scan", "broadcast", "gather", "all_gather"}
_new: Any = tuple.__new__


class View(NamedTuple):
    """View of an array in a form that the transport accepts.

    Attributes:
        adapter: adapter that makes results of the array's framework.
        array: memory of the array: a NumPy array or a ``DeviceArray``.
        dtype: element type of the array.
    """

    adapter: Adapter
    array: Array
    dtype: DType


def view(path: Path, what: str, x: Any, hosted: str = "") -> View:
    """Return a view of an array in a form that the transport accepts.

    Args:
        what: the operation, for errors.
        hosted: not empty if the array is one of the library's own on the CPU, which every transport
            accepts: ``"array"``, or ``"object"`` if it is an encoded object.

    Raises:
        DeviceError: the transport only takes arrays on GPUs, or the array is on another GPU than
            this rank's.
    """
    try:
        adapter = adapter_of(x, what)
    except InvalidArgumentError:
        if not is_number(x) or what not in _OF_NUMBERS:
            raise
        adapter = NUMBERS
    array, dtype = adapter.view(x)
    if type(array) is not np.ndarray and (path.on_host or not isinstance(array, Distant)):
        if not path.on_device or isinstance(array, Distant):
            return staged(path, View(adapter, array, dtype))
        if array.device is not path.gpu:
            check_device(path, what, array)
    elif not path.on_host and not hosted:
        raise DeviceError(
            f"{what}: an array on the CPU; backend {path.backend.name!r} takes arrays "
            f"on GPUs {path.who}. Copy it to the GPU, or use backend='cpu:shm,cuda:nccl', "
            "which takes both."
        )
    # This makes a View like View(…), but without calling a Python function.
    return _new(View, (adapter, array, dtype))  # type: ignore[no-any-return]


def views(path: Path, what: str, x: Any, hosted: str = "") -> list[View]:
    """Return views of the arrays of a structure; refuse a mixture of CPU and GPU arrays."""
    leaves = [view(path, what, leaf, hosted) for leaf in nested.flatten(x)]
    for leaf in leaves[1:]:
        same_memory(what, leaves[0].array, leaf.array)
    return leaves


def staged(path: Path, seen: View) -> View:
    """Return a view of an array's copy in host memory; its adapter copies results to the device."""
    array: Any = seen.array
    # The array may be the result of a call that is still running in the background.
    path.lane.drain(Deadline(path.timeout))
    if path.enqueues and not isinstance(array, Distant):
        array.stream.wait_for(path.backend.side_stream(array.device))
    return View(Staged(seen.adapter, array.device), array.to_host(), seen.dtype)


def check_device(path: Path, what: str, array: Any) -> None:
    """Refuse an array on a GPU that is not this rank's."""
    device = path.backend.device
    # An array without elements may not know its device.
    if device is not None and array.device is not device and array.size:
        raise DeviceError(
            f"{what}: an array on cuda:{array.device.ordinal}; this rank's GPU is "
            f"cuda:{device.ordinal} {path.who}. Copy the array to this rank's GPU, or choose "
            "another GPU with COLLECTIVE_DEVICE."
        )
    path.gpu = device


def where(path: Path, array: Any) -> str | None:
    """Return ``"cuda"`` if all ranks must have their arrays on GPUs, else None."""
    return "cuda" if path.enqueues and not isinstance(array, np.ndarray) else None


def adapter_for(like: Any, on_gpu: bool = False) -> Adapter:
    """Return the adapter that makes results like ``like``: a framework's name, an array, or None.

    Args:
        on_gpu: whether the result is on the GPU already. Then the adapter for NumPy or None makes
            an array that any framework can use without a copy.
    """
    if on_gpu:
        by_name = isinstance(like, str) and like == "numpy"
        anything = like is None or by_name or isinstance(like, np.ndarray)
        return adapter_like("cuda" if anything else like)
    adapter = adapter_like("numpy" if like is None else like)
    if like is None or isinstance(like, (str, np.ndarray)):
        return adapter
    array: Any = adapter.view(like)[0]
    return adapter if isinstance(array, np.ndarray) else Staged(adapter, array.device)


def room_on_gpu(path: Path, adapter: Adapter, nbytes: int, near: Any = None) -> Any:
    """Return memory of ``nbytes`` bytes on this rank's GPU.

    Args:
        near: DeviceArray on whose stream the memory will be used, if the framework has no current
            stream.
    """
    stream = None if near is None else near.stream
    return adapter.empty((nbytes,), UINT8, path.backend.device, stream)


def device_view(like: Any) -> Any:
    """Return the transport's view of an array on a GPU; None for any other value."""
    if like is None or isinstance(like, (str, np.ndarray)) or nested.is_tree(like):
        return None
    array: Any = adapter_of(like).view(like)[0]
    return None if isinstance(array, np.ndarray) else array


# -- rows ------------------------------------------------------------------------------------------


class Leaf:
    """One array of a call as rows: in C order, with the axis that is cut moved to the front.

    Args:
        what: the operation, for errors.
        seen: view of the array.
        axis: axis along which the array is split or joined.

    Attributes:
        adapter, dtype: adapter and element type of the array.
        shape: shape of the array as the caller passed it.
        array: contiguous, aligned array of the rows, in the original memory if that is possible.
        axis: number of the axis, not negative.
        length: number of rows; an array without dimensions is one row.
        inner: number of elements in a row.

    Raises:
        ShapeError: the array has no such axis.
    """

    __slots__ = ("_rest", "adapter", "array", "axis", "dtype", "inner", "length", "shape")

    def __init__(self, what: str, seen: View, axis: int) -> None:
        self.adapter, array, self.dtype = seen
        self.shape = array.shape
        if not array.shape:
            array = array.reshape(1)
        axes = len(array.shape)
        if not isinstance(axis, int) or not -axes <= axis < axes:
            raise ShapeError(f"{what}: no axis {axis!r} in an array of {axes} dimensions.")
        self.axis = axis % axes
        if self.axis:
            array = np.moveaxis(array, self.axis, 0)
        flags = array.flags
        self.array = array if flags.c_contiguous and flags.aligned else array.copy()
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


def elements_of(
    leaves: Sequence[Leaf], rows: Sequence[Sequence[int]], size: int, in_bytes: bool
) -> list[int]:
    """Return how many elements of all leaves together each of ``size`` ranks has.

    Args:
        rows: for each leaf, the number of rows of each rank.
        in_bytes: if true, count bytes.
    """
    widths = [leaf.inner * (leaf.dtype.itemsize if in_bytes else 1) for leaf in leaves]
    return [sum(cut[rank] * width for cut, width in zip(rows, widths)) for rank in range(size)]


# -- bytes -----------------------------------------------------------------------------------------


def bytes_of(arrays: Sequence[Array]) -> Array:
    """Return the bytes of the arrays, one after the other, on the device of the first array."""
    nbytes = sum(array.nbytes for array in arrays)
    packed = Buffer.empty(nbytes, UINT8, arrays[0] if arrays else None).array
    pack(arrays, packed)
    return packed


def pack(arrays: Sequence[Array], packed: Array) -> None:
    """Write the bytes of flat arrays to ``packed``, one after the other."""
    start = 0
    for array in arrays:
        packed[start : start + array.nbytes] = array.view(np.uint8)
        start += array.nbytes


def unpack(packed: Array, arrays: Sequence[Array]) -> None:
    """Read the bytes of flat arrays from ``packed``, one after the other."""
    start = 0
    for array in arrays:
        array.view(np.uint8)[:] = packed[start : start + array.nbytes]
        start += array.nbytes
