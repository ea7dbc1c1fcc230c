"""Our element types and operators in MPI's terms."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from collective.algorithms import arithmetic
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import ReduceOp, as_op

__all__ = ["Deviations", "deviations", "mpi_op", "of_flags", "type_of"]

Array = np.ndarray[Any, Any]
#: Names of operators and dtypes for which MPI's operator does otherwise than NumPy's.
Deviations = frozenset[tuple[str, str]]

# Types of the same size and arithmetic. NumPy's booleans are bytes of 0 and 1, on which MPI's
# operators for unsigned integers give 0 and 1 again. The 16-bit floats only travel as this;
# they are never summed by MPI, see mpi_op().
_TYPES = {
    "bool": "UINT8_T",
    "int8": "INT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "uint8": "UINT8_T",
    "uint16": "UINT16_T",
    "uint32": "UINT32_T",
    "uint64": "UINT64_T",
    "float16": "UINT16_T",
    "bfloat16": "UINT16_T",
    "float8_e4m3fn": "UINT8_T",
    "float8_e5m2": "UINT8_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
_OPS = {
    "sum": "SUM",
    "avg": "SUM",
    "premul_sum": "SUM",
    "prod": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
    "land": "LAND",
    "lor": "LOR",
}
# The operators that are tried on integers, of all widths. Open MPI's for AVX saturate: of
# uint8 they add 200 and 200 to 255, and of 16 bits and of signed ones they do alike.
_TRIED = [
    (op, name)
    for name, dtype in BY_NAME.items()
    if dtype.kind in "iu"
    for op in ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
]
# Elements that are tried of each: they fill vectors of 64 bytes, then shorter ones, and leave
# some over, so that each of an operator's loops has its turn.
_ELEMENTS = 191


def type_of(module: Any, dtype: DType) -> Any:
    """Return the MPI datatype whose elements are ``dtype``'s, bit by bit."""
    return getattr(module, _TYPES[dtype.name])


@functools.cache
def deviations(module: Any) -> Array:
    """Try MPI's operators for integers here; return a flag each, 1 where NumPy's does otherwise.

    That takes 1.5 ms, once a process. The flags may differ between ranks, whose processors may
    have other vector units: see :func:`of_flags`.
    """
    return np.array([_deviates(module, *pair) for pair in _TRIED], np.uint8)


def _deviates(module: Any, name: str, dtype_name: str) -> bool:
    dtype, op = BY_NAME[dtype_name], as_op(name)
    kind, limits = type_of(module, dtype), np.iinfo(dtype.storage)
    random = np.random.default_rng(0)
    left, right = random.integers(
        limits.min, limits.max, (2, _ELEMENTS), dtype.storage, endpoint=True
    )
    expected = np.empty_like(right)
    arithmetic.fold(op, dtype)(left, right, out=expected)
    getattr(module, _OPS[name]).Reduce_local([left, _ELEMENTS, kind], [right, _ELEMENTS, kind])
    return not np.array_equal(right, expected)


def of_flags(flags: Array) -> Deviations:
    """Return what the flags of :func:`deviations` mean, of one rank or of several together."""
    return frozenset(pair for pair, flag in zip(_TRIED, flags, strict=True) if flag)


def mpi_op(module: Any, op: ReduceOp, dtype: DType, unlike: Deviations) -> Any:
    """Return MPI's own operator for ``op`` on ``dtype``, or None if it has none.

    None for user functions and 16-bit floats; for logical operators on floats, which MPI
    does not define (MPI 4.1, section 6.9.2); for the minimum and maximum of floats, where
    MPI leaves open what becomes of NaN and of zeros with signs, and implementations lose
    them; and for what is in ``unlike``.
    """
    if op.function is not None or (dtype.itemsize == 2 and dtype.kind == "f"):
        return None
    if dtype.kind == "f" and op.name in ("min", "max", "land", "lor"):
        return None
    if (op.name, dtype.name) in unlike:
        return None
    return getattr(module, _OPS[op.name])
