"""Calls on arrays of a GPU or another device through host memory.

This is for transports that only reach the CPU, and for operations that a transport lacks on the
GPU. The array is copied to page-locked memory, and the call works on the copy. Then the result is
copied to the GPU, into memory of the caller's framework. The host waits for both copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import Adapter
from .dtypes import DType

__all__ = ["Distant", "Staged"]

Array = np.ndarray[Any, Any]


class Distant:
    """Array on a device whose memory no transport reaches; calls work on its copy on the host.

    Attributes:
        shape, dtype: shape, and NumPy's dtype that stores the elements.
        device: the device, as its framework names it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device

    def to_host(self) -> Array:
        """Return the elements in host memory."""
        raise NotImplementedError

    def fill_from_host(self, values: Array) -> None:
        """Copy the elements to the device. Later changes of ``values`` are not allowed."""
        raise NotImplementedError


class Staged(Adapter):
    """Adapter that turns results in host memory into arrays on a GPU or another device.

    Args:
        adapter: adapter of the caller's framework.
        device: the device for the results; also an attribute.
    """

    name = "staged"

    def __init__(self, adapter: Adapter, device: Any) -> None:
        self._adapter = adapter
        self.device = device

    def unchanged(self, x: Any) -> Any:
        return self._adapter.unchanged(x)

    def wrap(self, array: Array, dtype: DType) -> Any:
        result: Any = self._adapter.empty(array.shape, dtype, self.device)
        result.fill_from_host(array)
        return self._adapter.wrap(result, dtype)
