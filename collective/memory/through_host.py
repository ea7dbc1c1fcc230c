"""Arrays of GPUs on their way through host memory.

For transports that reach the CPU only, and for operations that a transport lacks on the GPU:
the array is copied to page-locked memory, the call is made on that, and the result is copied
to the GPU, in memory of the caller's framework. The host waits for both copies.
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
    """Makes arrays on a GPU of results in host memory.

    Args:
        adapter: the framework's.
        device: where the results go; an attribute, too.
    """

    name = "staged"

    def __init__(self, adapter: Adapter, device: Device) -> None:
        self._adapter = adapter
        self.device = device

    def unchanged(self, x: Any) -> Any:
        return self._adapter.unchanged(x)

    def wrap(self, array: Array, dtype: DType) -> Any:
        made: Any = self._adapter.empty(array.shape, dtype, self.device)
        made.fill_from_host(array)
        return self._adapter.wrap(made, dtype)
