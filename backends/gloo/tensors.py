"""A buffer's memory as a tensor, and which folds Gloo does as we do."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer
    from collective.memory.dtypes import DType

__all__ = ["GlooFold", "as_bytes", "gloo_fold"]

# Its members are not in torch's type stubs.
_REDUCE: Any = dist.ReduceOp.RedOpType
_ADDING = {"sum": _REDUCE.SUM}
# These are sums with a scaling before or after, which is done here.
_AVERAGING = {**_ADDING, "avg": _REDUCE.SUM, "premul_sum": _REDUCE.SUM}
_BITWISE = {"band": _REDUCE.BAND, "bor": _REDUCE.BOR, "bxor": _REDUCE.BXOR}
_MULTIPLYING = {"prod": _REDUCE.PRODUCT}
# Not of floats: Gloo's drop NaN, depending on the order of the ranks.
_COMPARING = {"min": _REDUCE.MIN, "max": _REDUCE.MAX}

_MODULAR = {**_ADDING, **_MULTIPLYING, **_BITWISE}
_INTEGER = {**_MODULAR, **_COMPARING}
_REAL = {**_AVERAGING, **_MULTIPLYING}

# How Gloo sees each type that it can fold, and with which operators. Modulo 2**n it does
# not matter whether an integer has a sign; the sum of complex numbers is that of its parts.
_KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "int8": (torch.int8, _INTEGER),
    "int32": (torch.int32, _INTEGER),
    "int64": (torch.int64, _INTEGER),
    "uint8": (torch.uint8, _INTEGER),
    "uint32": (torch.int32, _MODULAR),
    "uint64": (torch.int64, _MODULAR),
    "float16": (torch.float16, _REAL),
    "bfloat16": (torch.bfloat16, _REAL),
    "float32": (torch.float32, _REAL),
    "float64": (torch.float64, _REAL),
    "complex64": (torch.float32, _AVERAGING),
    "complex128": (torch.float64, _AVERAGING),
}


class GlooFold(NamedTuple):
    """A fold that Gloo does: on tensors of ``dtype``, with its operator ``op``."""

    dtype: torch.dtype
    op: Any


@cache
def gloo_fold(op: str, dtype: DType) -> GlooFold | None:
    """Return how Gloo does what ``op`` means for ``dtype``, or None if it does not."""
    seen = _KINDS.get(dtype.name)
    if seen is None or op not in seen[1]:
        return None
    return GlooFold(seen[0], seen[1][op])


class _Writable:
    """A read-only array that says it is not: torch warns of those, even to be sent.

    What only has to be sent comes this way, and Gloo does not write to it.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # kept alive by the array made of this
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def as_bytes(buffer: Buffer) -> torch.Tensor:
    """Return the memory of ``buffer`` as uint8."""
    array = buffer.array.view(np.uint8)
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)
