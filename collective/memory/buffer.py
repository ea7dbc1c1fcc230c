"""Buffers that transports get: contiguous memory with a count, a dtype and a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .dtypes import BY_NAME, DType

if TYPE_CHECKING:
    from collective.cuda import Device, Stream

_UINT8 = BY_NAME["uint8"]
# Alignment that XLA requires of memory that it uses without a copy, in bytes: a cache line.
_ALIGNMENT = 64


def aligned(shape: tuple[int, ...], storage: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an uninitialised NumPy array that begins on a cache line."""
    nbytes = math.prod(shape) * storage.itemsize
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -room.__array_interface__["data"][0] % _ALIGNMENT
    return np.ndarray(shape, storage, room.data, start)


class Buffer:
    """Contiguous, aligned elements of one dtype on one device.

    This is not a dataclass, for speed: each call of a few microseconds makes two buffers.

    Attributes:
        array: the elements, one-dimensional, of ``dtype.storage``: a NumPy array, or a
            ``DeviceArray`` for elements in GPU memory. A NumPy array without elements has an
            address that no other array has.
        dtype: the element type.
        count: number of elements.
    """

    __slots__ = ("array", "count", "dtype")

    def __init__(self, array: np.ndarray[Any, Any], dtype: DType) -> None:
        self.array = array
        self.dtype = dtype
        self.count = count = array.size
        if not count and type(array) is np.ndarray:
            # An empty view has the address of the array from which it was cut. To MPI, an input and
            # an output with the same address are aliases: MPICH refuses them, Open MPI hangs.
            self.array = np.empty(0, array.dtype)

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return int(self.array.nbytes)

    @property
    def device(self) -> str:
        """Device that holds the memory: ``"cpu"``, or for example ``"cuda:0"``."""
        array: Any = self.array
        return "cpu" if isinstance(array, np.ndarray) else f"cuda:{array.device.ordinal}"

    @property
    def stream(self) -> Stream:
        """Stream on which to enqueue work on the elements; only for GPU memory."""
        array: Any = self.array
        stream: Stream = array.effective_stream
        return stream

    @property
    def address(self) -> int:
        """Address of the first element, in this process's memory or in the GPU's."""
        array: Any = self.array
        if isinstance(array, np.ndarray):
            return int(array.__array_interface__["data"][0])
        return int(array.address)

    @classmethod
    def empty(cls, count: int, dtype: DType, near: Any = None) -> Buffer:
        """Return ``count`` uninitialised elements, in memory of the same kind as array ``near``."""
        if near is None or isinstance(near, np.ndarray):
            return cls(np.empty(count, dtype.storage), dtype)
        return cls(near.allocate(count, dtype.storage), dtype)

    def part(self, start: int, stop: int) -> Buffer:
        """Return elements ``start`` to ``stop`` as a view."""
        return Buffer(self.array[start:stop], self.dtype)

    def bytes(self) -> Buffer:
        """Return the same memory as uint8."""
        return Buffer(self.array.view(np.uint8), _UINT8)

    def __repr__(self) -> str:
        return f"Buffer({self.count} × {self.dtype} on {self.device})"


class Spot(NamedTuple):
    """Place of contiguous, aligned and writeable GPU memory.

    A spot has those attributes of a :class:`Buffer` and its array that a transport needs to enqueue
    an operation. Making a spot takes a fraction of the time. A spot does not keep the memory alive:
    the owner of the spot must keep the array.

    Attributes:
        address: address of the first element, not 0.
        count: number of elements.
        dtype: the element type.
        shape: shape of the array.
        stream: stream on which the array is ready, and on which it will be used.
        device: the GPU.
    """

    address: int
    count: int  # type: ignore[assignment]  # as a Buffer has it
    dtype: DType
    shape: tuple[int, ...]
    stream: Stream
    device: Device

    @property
    def array(self) -> Spot:
        """The spot itself, in place of a buffer's array."""
        return self

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.count * self.dtype.itemsize


#: Function that makes a spot from a tuple of its attributes, without calling Python code.
new_spot: Callable[[tuple[int, int, DType, tuple[int, ...], Stream, Device]], Spot]
new_spot = partial(tuple.__new__, Spot)
