"""What a transport sees: contiguous memory with a count, a dtype and a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.dtypes import BY_NAME, DType

__all__ = ["Buffer"]

_UINT8 = BY_NAME["uint8"]


class Buffer:
    """Contiguous, aligned elements of one dtype on one device.

    Not a dataclass: two are made in every call of a few microseconds.

    Attributes:
        array: the elements as a one-dimensional NumPy array of ``dtype.storage``, on
            the CPU.
        dtype: the element type.
        count: the number of elements.
        device: ``"cpu"``.
        memo: where the buffer will be used again, a dict in which a transport keeps what it
            found out about the memory; else None.
    """

    __slots__ = ("array", "count", "device", "dtype", "memo")

    def __init__(self, array: np.ndarray[Any, Any], dtype: DType, device: str = "cpu") -> None:
        self.array = array
        self.dtype = dtype
        self.count = array.size
        self.device = device
        self.memo: dict[Any, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return int(self.array.nbytes)

    @property
    def address(self) -> int:
        """Where the first element is, in this process's memory."""
        return int(self.array.__array_interface__["data"][0])

    @classmethod
    def empty(cls, count: int, dtype: DType) -> Buffer:
        """Return ``count`` uninitialised elements on the CPU."""
        return cls(np.empty(count, dtype.storage), dtype)

    def part(self, start: int, stop: int) -> Buffer:
        """Return elements ``start`` to ``stop`` as a view."""
        return Buffer(self.array[start:stop], self.dtype, self.device)

    def bytes(self) -> Buffer:
        """Return the same memory as uint8."""
        return Buffer(self.array.view(np.uint8), _UINT8, self.device)

    def __repr__(self) -> str:
        return f"Buffer({self.count} × {self.dtype} on {self.device})"
