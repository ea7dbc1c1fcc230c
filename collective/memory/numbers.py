"""Python's own numbers, as arrays of no dimensions and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.errors import DtypeError

from .arrays import Adapter
from .dtypes import BY_NAME, DType

__all__ = ["NUMBERS", "is_number"]

_DTYPES = {
    bool: BY_NAME["bool"],
    int: BY_NAME["int64"],
    float: BY_NAME["float64"],
    complex: BY_NAME["complex128"],
}


class _Numbers(Adapter):
    """Adapter of ``bool``, ``int`` of 64 bits, ``float`` and ``complex``; gathers return lists."""

    name = "number"

    def view(self, x: Any) -> tuple[Any, DType]:
        dtype = _DTYPES[type(x)]
        try:
            return np.array(x, dtype.storage), dtype
        except OverflowError:
            raise DtypeError(
                f"number: {x} takes more than 64 bits; use the *_object calls, which carry "
                "integers of any length, or a float."
            ) from None

    def wrap(self, array: Any, dtype: DType) -> Any:
        return array.tolist()


#: The adapter of Python's numbers. :func:`~collective.memory.arrays.adapter_of` does not return it:
#: in calls where a number has no obvious meaning, a number does not count as an array.
NUMBERS = _Numbers()


def is_number(x: Any) -> bool:
    """Tell whether ``x`` is one of Python's numbers, and not of a subclass such as an IntEnum."""
    return type(x) in _DTYPES
