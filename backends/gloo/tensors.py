"""Tensors over a buffer's memory, and the folds for which Gloo gives the same results as we do."""

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

# The members of RedOpType are missing from torch's type stubs.
_REDUCE: Any = dist.ReduceOp.RedOpType
_ADDING = {"sum": _REDUCE.SUM}
# "avg" and "premul_sum" are sums with a scaling before or after, which this transport does itself.
_AVERAGING = {**_ADDING, "avg": _REDUCE.SUM, "premul_sum": _REDUCE.SUM}
_BITWISE = {"band": _REDUCE.BAND, "bor": _REDUCE.BOR, "bxor": _REDUCE.BXOR}
_MULTIPLYING = {"prod": _REDUCE.PRODUCT}
# Not for floats: Gloo's min and max drop NaN, depending on the order of the ranks.
_COMPARING = {"min": _REDUCE.MIN, "max": _REDUCE.MAX}

_MODULAR = {**_ADDING, **_MULTIPLYING, **_BITWISE}
_INTEGER = {**_MODULAR, **_COMPARING}
_REAL = {**_AVERAGING, **_MULTIPLYING}

# For each dtype that Gloo can fold: the dtype under which Gloo folds it, and the operators.
# Modulo 2**n, signed and unsigned integers fold alike. The sum of complex numbers is the sum of
# their real and imaginary parts.
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
    """Fold that Gloo does on tensors of ``dtype``, with Gloo's operator ``op``."""

    dtype: torch.dtype
    op: Any


@cache
def gloo_fold(op: str, dtype: DType) -> GlooFold | None:
    """Return Gloo's fold for our operator ``op`` on ``dtype``, or None if Gloo has none."""
    kind = _KINDS.get(dtype.name)
    if kind is None or op not in kind[1]:
        return None
    return GlooFold(kind[0], kind[1][op])


class _Writable:
    """Wrapper that presents a read-only array as writable.

    torch warns about read-only arrays, even if they are only sent. A read-only array gets here
    only to be sent, and Gloo does not write to it.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array  # an array made from this wrapper keeps the wrapped array alive
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def as_bytes(buffer: Buffer) -> torch.Tensor:
    """Return a uint8 tensor over the memory of ``buffer``."""
    array = buffer.array.view(np.uint8)
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return torch.from_numpy(array)
