"""Element types as they travel: a name, a size, and the NumPy type of the same bits.

NumPy has no bfloat16 and no types of eight bits: their bits are held as unsigned integers.
bfloat16 is folded by :mod:`collective.algorithms.arithmetic`, the 8-bit types by GPUs alone. Names
are NumPy's, and ml_dtypes' for those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.errors import DtypeError

__all__ = ["BY_CODE", "BY_NAME", "FOREIGN", "DType", "from_numpy", "named"]


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. There is one object a type, so ``is`` compares them.

    Attributes:
        name: ``"float32"``, ``"bfloat16"``, …
        storage: the NumPy dtype whose bits an array of this type is held in.
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
        """Bytes an element."""
        return self.storage.itemsize

    def __str__(self) -> str:
        return self.name


# New types go to the end: the position is the code on the wire.
_NATIVE = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 complex64 complex128"
).split()
BY_NAME: dict[str, DType] = {
    name: DType(name, np.dtype(name), np.dtype(name).kind, code)
    for code, name in enumerate(_NATIVE)
}
#: The types that NumPy lacks, and what their bits are held in.
FOREIGN = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
for _name, _storage in FOREIGN.items():
    BY_NAME[_name] = DType(_name, np.dtype(_storage), "f", len(BY_NAME))
#: The types by their code on the wire.
BY_CODE = list(BY_NAME.values())

BY_NUMPY: dict[np.dtype[Any], DType] = {BY_NAME[n].storage: BY_NAME[n] for n in _NATIVE}


def named(name: str) -> DType:
    """Return the type called ``name``.

    Raises:
        DtypeError: there is none; the text lists them.
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
    found = BY_NUMPY.get(dtype)
    if found is None:
        if dtype.name not in FOREIGN:
            raise DtypeError(
                f"dtype: {dtype} cannot travel; one of {', '.join(BY_NAME)}. "
                "Convert with x.astype(...), or send it as an object."
            )
        found = BY_NUMPY[dtype] = BY_NAME[dtype.name]
    return found
