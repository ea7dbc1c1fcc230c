"""Protocols of GPU arrays and of their allocators, for copies and loans."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from collective.cuda import Device, Stream

__all__ = ["DeviceElements", "Space"]

Ints = tuple[int, ...]


class DeviceElements(Protocol):
    """Protocol of a :class:`~.device_array.DeviceArray`, for modules that cannot import it."""

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
        """Return a view of that shape, in which repeated elements have strides of 0."""
        ...

    def copy(self) -> DeviceElements:
        """Return a copy in C order."""
        ...

    def reshape(self, *shape: Any) -> DeviceElements:
        """Return the elements in another shape, as a view where possible."""
        ...

    def transpose(self, order: Ints) -> DeviceElements:
        """Return a view with the axes in another order."""
        ...


class Space(Protocol):
    """Allocator of a framework's GPU memory, which also copies arrays with gaps."""

    def empty(self, nbytes: int, device: Device, stream: Stream) -> tuple[int, Any]:
        """Return the address of new memory for use on ``stream``, and the memory's owner."""
        ...

    def assign(self, dst: DeviceElements, src: DeviceElements) -> None:
        """Enqueue a copy of elements on ``dst.effective_stream``.

        Both arrays have the same shape, dtype and device, and do not overlap. ``src`` may have
        strides of 0, but ``dst`` has none.
        """
        ...
