"""Where a plain array of a GPU is, for calls that do no more than hand it on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from .dtypes import DType

if TYPE_CHECKING:
    from collective.cuda import Device, Stream

__all__ = ["Spot", "new_spot"]


class Spot(NamedTuple):
    """Memory of a GPU that is contiguous, aligned and writeable.

    It has as much of a :class:`~.buffer.Buffer`, and of its array, as a transport uses that only
    enqueues, and is made in a fraction of their time. It keeps nothing alive: whoever has it keeps
    the array.

    Attributes:
        address: of the first element, not 0.
        count: how many there are.
        dtype: their type.
        shape: of the array.
        stream: on which the array is ready, and will be used.
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
        """This, in place of a buffer's array."""
        return self

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.count * self.dtype.itemsize


#: Makes a spot of a tuple of its attributes, without a call of Python's.
new_spot: Callable[[tuple[int, int, DType, tuple[int, ...], Stream, Device]], Spot]
new_spot = partial(tuple.__new__, Spot)
