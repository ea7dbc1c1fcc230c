"""An operation of a library on allocated arrays, and the check of its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collective.memory.dtypes import BY_NAME
from collective.testing.frameworks import encoded

from .libraries import BenchLibrary
from .operations import ALL, count_wrong, lengths, value_of

__all__ = ["Prepared"]

_BLOCK = 1 << 20


class Prepared:
    """Operation of a library, with its arrays.

    The arrays hold zeros, which stay zeros however often they are summed in place.

    Args:
        library: the library, connected.
        operation: one of :data:`~collective.tools.bench.operations.ALL`.
        nbytes: size of the larger array, before it is rounded up.
        memory: ``"ordinary"`` or ``"symmetric"``.
        dtype: dtype of the elements.

    Attributes:
        call: function that makes the call.
        x, y: input and output; None if there is none.
        nbytes: size of the larger array.
        what: names of the library and the operation.
    """

    def __init__(
        self,
        library: BenchLibrary,
        operation: str,
        nbytes: int,
        memory: str = "ordinary",
        dtype: str = "float32",
    ) -> None:
        about, itemsize = ALL[operation], BY_NAME[dtype].itemsize
        *counts, self._part = lengths(operation, nbytes, itemsize, library.size)
        self.x: Any
        self.y: Any
        self.x, self.y = (None if n is None else library.new(n, memory, dtype) for n in counts)
        self.call = library.call(
            operation,
            None if about.x_at_root and library.rank else self.x,
            None if about.y_at_root and library.rank else self.y,
        )
        self.nbytes = itemsize * max((n or 0 for n in counts), default=0)
        self.what = f"{library.version}: {operation}"
        self._library, self._operation, self._dtype = library, operation, dtype

    def count_wrong(self, together: Callable[[], object]) -> int:
        """Make the call on data for which every element of the result can be computed.

        Args:
            together: function that waits for all ranks.

        Returns:
            The number of wrong elements in this rank's result.
        """
        library, rank = self._library, self._library.rank
        self._fill()
        together()
        result = library.result(self.x, self.y, self.call())
        if library.framework.on_gpu:
            library.synchronize()
        together()
        if result is None or (rank and ALL[self._operation].y_at_root):
            return 0
        stored = library.framework.read(result)
        return count_wrong(self._operation, self._dtype, rank, library.size, self._part, stored)

    def _fill(self) -> None:
        library, x = self._library, self.x
        value, arrays = value_of(self._dtype, library.size), library.framework
        for low in range(0, x.shape[0], _BLOCK):
            block = x[low : low + _BLOCK]
            numbers = value(library.rank, np.arange(low, low + block.shape[0]))
            data = encoded(numbers, self._dtype)
            arrays.fill(block, arrays.make(data, self._dtype, (slice(None),)))
