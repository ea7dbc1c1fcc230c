"""What copies and loans need to know of an array of a GPU, and of whoever allocates its memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from collective.cuda import Device, Stream

__all__ = ["DeviceElements", "Space"]

Ints = tuple[int, ...]


class DeviceElements(Protocol):
    """Elements in the memory of a GPU: a :class:`~.device_array.DeviceArray`, from below it."""

    address: int
    shape: Ints
    dtype: np.dtype[Any]
    device: Device
    stream: Stream
    writeable: bool
    space: Space

    @property
    def effective_stream(self) -> Stream: ...
    @property
    def strides(self) -> Ints: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def flags(self) -> Any: ...
    @property
    def bounds(self) -> tuple[int, int]: ...
    def __getitem__(self, key: Any) -> DeviceElements: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...

    def allocate(self, shape: int | Ints, dtype: Any = None) -> DeviceElements:
        """Return new memory of the same space, device and stream."""
        ...

    def broadcast_to(self, shape: Ints) -> DeviceElements:
        """Return a view of that shape, with strides of 0."""
        ...

    def copy(self) -> DeviceElements:
        """Return a copy in C order."""
        ...

    def reshape(self, *shape: Any) -> DeviceElements:
        """Return the elements in another shape, a view where that can be."""
        ...

    def transpose(self, order: Ints) -> DeviceElements:
        """Return a view with the axes in another order."""
        ...


class Space(Protocol):
    """Who allocates a framework's memory of GPUs, and copies what has gaps in it."""

    def empty(self, nbytes: int, device: Device, stream: Stream) -> tuple[int, Any]:
        """Return the address of new memory for use on ``stream``, and what keeps it alive."""
        ...

    def assign(self, dst: DeviceElements, src: DeviceElements) -> None:
        """Enqueue a copy of elements on ``dst.effective_stream``.

        The arrays are of one shape, dtype and device; they do not overlap; ``src`` may have
        strides of 0, ``dst`` has not.
        """
        ...
