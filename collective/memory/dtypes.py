"""Element types of messages: a name, a size, and the NumPy type of the same bits.

NumPy has no bfloat16 and no floating-point types of eight bits. Their bits are stored as unsigned
integers. :mod:`collective.algorithms.arithmetic` folds bfloat16; only GPUs fold the 8-bit types.
The names are NumPy's, or those of ml_dtypes for the types that NumPy lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.errors import DtypeError


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """Element type. Each type has a single object, so ``is`` compares types.

    Attributes:
        name: ``"float32"``, ``"bfloat16"``, …
        storage: the NumPy dtype of the arrays that store elements of this type.
        kind: ``"b"`` boolean, ``"i"`` signed, ``"u"`` unsigned, ``"f"`` floating,
            ``"c"`` complex.
        code: a small number, the same on every rank.
    """

    name: str
    storage: np.dtype[Any]
    kind: str
    code: int

    @property
    def itemsize(self) -> int:
        """Size of an element in bytes."""
        return self.storage.itemsize

    def __str__(self) -> str:
        return self.name


# Append new types at the end: the position of a type is its code on the wire.
_NATIVE = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 complex64 complex128"
).split()
BY_NAME: dict[str, DType] = {
    name: DType(name, np.dtype(name), np.dtype(name).kind, code)
    for code, name in enumerate(_NATIVE)
}
#: The types that NumPy lacks, each with the NumPy dtype that stores its bits.
FOREIGN = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
for _name, _storage in FOREIGN.items():
    BY_NAME[_name] = DType(_name, np.dtype(_storage), "f", len(BY_NAME))
#: The types by their code on the wire.
BY_CODE = list(BY_NAME.values())

BY_NUMPY: dict[np.dtype[Any], DType] = {BY_NAME[n].storage: BY_NAME[n] for n in _NATIVE}


def named(name: str) -> DType:
    """Return the type called ``name``.

    Raises:
        DtypeError: there is no such type; the text lists the types.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise DtypeError(f"dtype: {name!r} cannot travel; one of {', '.join(BY_NAME)}.") from None


def from_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the type of a NumPy dtype (ml_dtypes' included).

    Raises:
        DtypeError: strings, objects, records, dates and foreign byte orders cannot travel.
    """
    element_type = BY_NUMPY.get(dtype)
    if element_type is None:
        # ml_dtypes gives a type of foreign byte order the same name.
        if dtype.name not in FOREIGN or not dtype.isnative:
            raise DtypeError(
                f"dtype: {dtype} cannot travel; one of {', '.join(BY_NAME)}. "
                "Convert with x.astype(...), or send it as an object."
            )
        element_type = BY_NUMPY[dtype] = BY_NAME[dtype.name]
    return element_type
