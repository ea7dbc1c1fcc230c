"""Our element types and operators in MPI's terms."""

from __future__ import annotations

from typing import Any

from collective.dtypes import DType
from collective.ops import ReduceOp

__all__ = ["native_op", "type_of"]

# Types of the same size and arithmetic. NumPy's booleans are bytes of 0 and 1, on which MPI's
# operators for unsigned integers give 0 and 1 again. The 16-bit floats only travel as this;
# they are never summed by MPI, see native_op().
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


def type_of(module: Any, dtype: DType) -> Any:
    """Return the MPI datatype whose elements are ``dtype``'s, bit by bit."""
    return getattr(module, _TYPES[dtype.name])


def native_op(module: Any, op: ReduceOp, dtype: DType) -> Any:
    """Return MPI's own operator for ``op`` on ``dtype``, or None if it has none.

    None for user functions and 16-bit floats; for logical operators on floats, which MPI
    does not define (MPI 4.1, section 6.9.2); and for the minimum and maximum of floats, where
    MPI leaves open what becomes of NaN and implementations lose it.
    """
    if op.function is not None or (dtype.itemsize == 2 and dtype.kind == "f"):
        return None
    if dtype.kind == "f" and op.name in ("min", "max", "land", "lor"):
        return None
    return getattr(module, _OPS[op.name])
