"""Calls on GPU arrays through host memory.

This is for transports that only reach the CPU, and for operations that a transport lacks on the
GPU. The array is copied to page-locked memory, and the call works on the copy. Then the result is
copied to the GPU, into memory of the caller's framework. The host waits for both copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Adapter
from .dtypes import DType

if TYPE_CHECKING:
    from collective.cuda import Device

__all__ = ["Staged"]

Array = np.ndarray[Any, Any]


class Staged(Adapter):
    """Adapter that turns results in host memory into arrays on a GPU.

    Args:
        adapter: adapter of the caller's framework.
        device: the GPU for the results; also an attribute.
    """

    name = "staged"

    def __init__(self, adapter: Adapter, device: Device) -> None:
        self._adapter = adapter
        self.device = device

    def unchanged(self, x: Any) -> Any:
        return self._adapter.unchanged(x)

    def wrap(self, array: Array, dtype: DType) -> Any:
        result: Any = self._adapter.empty(array.shape, dtype, self.device)
        result.fill_from_host(array)
        return self._adapter.wrap(result, dtype)
