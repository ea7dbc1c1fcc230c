"""``MPI.Datatype``: handles of layouts, how they are made of others, and the predefined ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from .attributes import Attributed, copy_attributes, delete_attributes
from .exceptions import CLASSES, MPIError
from .handles import Named, reader
from .layouts import Piece, TypeLayout
from .memory import Bytes, bytes_of

ORDER_C, ORDER_FORTRAN = 0, 1
(TYPECLASS_LOGICAL, TYPECLASS_INTEGER, TYPECLASS_REAL, TYPECLASS_COMPLEX) = range(1, 5)
DISTRIBUTE_NONE, DISTRIBUTE_BLOCK, DISTRIBUTE_CYCLIC = range(3)
DISTRIBUTE_DFLT_DARG = -1
_COMBINERS = (
    "NAMED DUP CONTIGUOUS VECTOR HVECTOR INDEXED HINDEXED INDEXED_BLOCK HINDEXED_BLOCK STRUCT "
    "SUBARRAY DARRAY RESIZED VALUE_INDEX F90_INTEGER F90_REAL F90_COMPLEX"
).split()
COMBINERS = {name: number for number, name in enumerate(_COMBINERS)}
_PREDEFINED = ("NAMED", "F90_INTEGER", "F90_REAL", "F90_COMPLEX")


def _numbers(values: Any, count: int | None = None) -> list[int]:
    numbers = [operator.index(value) for value in values]
    if count is not None and len(numbers) != count:
        raise ValueError(f"expecting {count} items, got {len(numbers)}")
    return numbers


def _creating(make: Callable[..., Any], combiner: str) -> Any:
    """Return the method of a combiner, whose name comes first among the arguments of ``make``."""

    def create(self: Any, *args: Any, **options: Any) -> Any:
        return make(self, combiner, *args, **options)

    create.__name__, create.__doc__ = f"Create_{combiner.lower()}", make.__doc__
    return create


class Datatype(Named, Attributed, kind=True):
    """Layout of a message's elements in memory."""

    __slots__ = ()
    null_error = CLASSES["ERR_TYPE"]

    def _make(self, combiner: str, params: dict[str, Any], blocks: Any, bounds: Any = None) -> Any:
        return type(self)._of(TypeLayout(combiner, params, blocks, bounds, self._live))

    def __reduce__(self) -> str | tuple[Any, ...]:
        layout = self._inner
        if layout is None or layout.constant is not None:
            return super().__reduce__()
        return _remade, (type(self), *self.decode())

    Get_size, size = reader(lambda layout: layout.size, "the bytes of one element that travel")

    def Get_extent(self) -> tuple[int, int]:
        """Return lower bound and extent in bytes."""
        return self._live.lb, self._live.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return lower bound and extent of the bytes that travel."""
        return self._live.true_lb, self._live.true_extent

    lb = property(lambda self: self._live.lb)
    extent = property(lambda self: self._live.extent)
    ub = property(lambda self: self._live.lb + self._live.extent)
    true_lb = property(lambda self: self._live.true_lb)
    true_extent = property(lambda self: self._live.true_extent)
    true_ub = property(lambda self: self._live.true_lb + self._live.true_extent)

    def Dup(self) -> Any:
        """Return a duplicate, with the attributes that keyvals copy."""
        layout = self._live
        copy = self._make("DUP", {}, [(0, 1, layout)], (layout.lb, layout.extent))
        copy_attributes(self, copy._inner)
        for name in ("char", "text", "code", "dtype"):
            setattr(copy._inner, name, getattr(layout, name))
        return copy

    Create_dup = Dup

    def Create_contiguous(self, count: int) -> Any:
        """Return ``count`` elements after each other."""
        return self._make("CONTIGUOUS", {"count": _counted(count)}, [(0, count, self._live)])

    def _strided(self, combiner: str, count: int, blocklength: int, stride: int) -> Any:
        """Return ``count`` blocks, whose starts are ``stride`` elements apart, or bytes."""
        params = {"count": _counted(count), "blocklength": blocklength, "stride": stride}
        places = [i * stride for i in range(count)]
        return self._placed(combiner, params, [blocklength] * count, places)

    def _indexed(self, combiner: str, blocklengths: Any, displacements: Any) -> Any:
        """Return blocks at displacements in elements, or in bytes."""
        lengths = _numbers(blocklengths)
        places = _numbers(displacements, len(lengths))
        params = {"blocklengths": lengths, "displacements": places}
        return self._placed(combiner, params, lengths, places)

    def _block(self, combiner: str, blocklength: int, displacements: Any) -> Any:
        """Return blocks of one length at displacements in elements, or in bytes."""
        places = _numbers(displacements)
        params = {"blocklength": blocklength, "displacements": places}
        return self._placed(combiner, params, [blocklength] * len(places), places)

    def _placed(self, combiner: str, params: Any, lengths: list[int], places: list[int]) -> Any:
        """Return blocks at places in elements, or in bytes for a combiner with an H."""
        unit = 1 if combiner[0] == "H" else self._live.extent
        blocks = [(place * unit, _counted(n), self._live) for n, place in zip(lengths, places)]
        return self._make(combiner, params, blocks)

    Create_vector = _creating(_strided, "VECTOR")
    Create_hvector = _creating(_strided, "HVECTOR")
    Create_indexed = _creating(_indexed, "INDEXED")
    Create_hindexed = _creating(_indexed, "HINDEXED")
    Create_indexed_block = _creating(_block, "INDEXED_BLOCK")
    Create_hindexed_block = _creating(_block, "HINDEXED_BLOCK")

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int],
        datatypes: Sequence[Datatype],
    ) -> Any:  # fmt: skip
        """Return blocks of several datatypes at displacements in bytes."""
        lengths = _numbers(blocklengths)
        places = _numbers(displacements, len(lengths))
        if len(datatypes) != len(lengths):
            raise ValueError(f"expecting {len(lengths)} items, got {len(datatypes)}")
        layouts = [datatype._live for datatype in datatypes]
        blocks = list(zip(places, lengths, layouts))
        params = {"blocklengths": lengths, "displacements": places, "datatypes": layouts}
        return cls._of(TypeLayout("STRUCT", params, blocks))

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int],
        order: int = ORDER_C,
    ) -> Any:  # fmt: skip
        """Return a part of an array of several dimensions."""
        sizes = _numbers(sizes)
        subsizes, starts = _numbers(subsizes, len(sizes)), _numbers(starts, len(sizes))
        for size, subsize, start in zip(sizes, subsizes, starts):
            if not (0 < subsize <= size and 0 <= start <= size - subsize):
                raise MPIError(CLASSES["ERR_ARG"])
        chosen = [range(start, start + n) for start, n in zip(starts, subsizes)]
        params = {"sizes": sizes, "subsizes": subsizes, "starts": starts, "order": order}
        return self._of_array("SUBARRAY", params, sizes, chosen, order)

    def Create_darray(
        self, size: int, rank: int, gsizes: Sequence[int], distribs: Sequence[int],
        dargs: Sequence[int], psizes: Sequence[int], order: int = ORDER_C,
    ) -> Any:  # fmt: skip
        """Return one process's part of an array that is distributed over a grid of processes."""
        gsizes = _numbers(gsizes)
        n = len(gsizes)
        distribs, dargs, psizes = _numbers(distribs, n), _numbers(dargs, n), _numbers(psizes, n)
        if prod(psizes) != size or not 0 <= rank < size:
            raise MPIError(CLASSES["ERR_ARG"])
        chosen, rest = [], rank
        for dimension in reversed(range(n)):  # processes are numbered in C's order
            rest, place = divmod(rest, psizes[dimension])
            extent, processes = gsizes[dimension], psizes[dimension]
            block = dargs[dimension]
            if block == DISTRIBUTE_DFLT_DARG:
                cyclic = distribs[dimension] == DISTRIBUTE_CYCLIC
                block = 1 if cyclic else -(-extent // processes)
            if distribs[dimension] == DISTRIBUTE_NONE:
                block = extent
            chosen.append([i for i in range(extent) if i // block % processes == place])
        params = {
            "size": size, "rank": rank, "gsizes": gsizes, "distribs": distribs, "dargs": dargs,
            "psizes": psizes, "order": order,
        }  # fmt: skip
        return self._of_array("DARRAY", params, gsizes, chosen[::-1], order)

    def _of_array(self, combiner: str, params: Any, sizes: Any, chosen: Any, order: int) -> Any:
        """Return the elements of an array whose index in each dimension is chosen."""
        layout = self._live
        if order != ORDER_C:
            sizes, chosen = sizes[::-1], chosen[::-1]
        places = np.zeros(1, np.int64)
        for size, indices in zip(sizes, chosen):
            numbers = np.asarray(indices, np.int64)
            places = (places[:, None] * size + numbers).reshape(-1)
        # Neighbours become one block.
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        lengths = np.diff(starts, append=len(places))
        blocks = [
            (int(places[start]) * layout.extent, int(length), layout)
            for start, length in zip(starts, lengths)
        ]
        return self._make(combiner, params, blocks, (0, prod(sizes) * layout.extent))

    def Create_resized(self, lb: int, extent: int) -> Any:
        """Return the datatype with another lower bound and extent."""
        params = {"lb": lb, "extent": extent}
        return self._make("RESIZED", params, [(0, 1, self._live)], (lb, extent))

    Resized = Create_resized

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Any:
        """Return the named pair of a value and its index; the null datatype if there is none."""
        name = value._live.name.removeprefix("MPI_")
        if name not in _PAIRED or index._live is not CONSTANTS["INT"]._inner:
            return DATATYPE_NULL
        return CONSTANTS[f"{name}_INT"]

    @classmethod
    def Create_f90_integer(cls, r: int) -> Any:
        """Return the integer type with ``r`` decimal digits."""
        size = next((n for n, most in ((1, 2), (2, 4), (4, 9), (8, 18)) if r <= most), 0)
        return cls._f90("F90_INTEGER", {"r": r}, f"INTEGER{size}")

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Any:
        """Return the real type with ``p`` digits and exponents up to ``r``."""
        return cls._f90("F90_REAL", {"p": p, "r": r}, f"REAL{_real_size(p, r)}")

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Any:
        """Return the complex type with ``p`` digits and exponents up to ``r``."""
        return cls._f90("F90_COMPLEX", {"p": p, "r": r}, f"COMPLEX{2 * _real_size(p, r)}")

    @classmethod
    def _f90(cls, combiner: str, params: dict[str, int], name: str) -> Any:
        if name not in CONSTANTS:
            raise MPIError(CLASSES["ERR_ARG"])
        named = CONSTANTS[name]._inner
        layout = TypeLayout(combiner, params, [(0, 1, named)])
        layout.char, layout.text, layout.code = named.char, named.text, named.code
        return cls._of(layout)

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Any:
        """Return the Fortran type of a class and a size in bytes."""
        kinds = ["", "LOGICAL", "INTEGER", "REAL", "COMPLEX"]
        name = f"{kinds[typeclass] if 0 < typeclass < len(kinds) else ''}{size}"
        if name not in CONSTANTS:
            raise MPIError(CLASSES["ERR_ARG"])
        return CONSTANTS[name]

    def Commit(self) -> Any:
        """Return the datatype itself: it is ready from the beginning."""
        self._live  # noqa: B018
        return self

    def Free(self) -> None:
        """Clear the handle, after the keyvals' functions."""
        if self._live.combiner in _PREDEFINED:
            raise MPIError(CLASSES["ERR_TYPE"])
        delete_attributes(self)
        self._inner = None

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return the numbers of integers, addresses, counts and datatypes, and the combiner."""
        numbers, addresses, counts, types = _contents(self._live)
        combiner = COMBINERS[self._live.combiner]
        return len(numbers), len(addresses), len(counts), len(types), combiner

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the arguments with which the datatype was made."""
        if self._live.combiner == "NAMED":
            raise MPIError(CLASSES["ERR_TYPE"])
        numbers, addresses, counts, types = _contents(self._live)
        return numbers, addresses, counts, [handle_of(layout) for layout in types]

    def decode(self) -> tuple[Any, str, dict[str, Any]]:
        """Return the old datatype, the combiner's name, and the arguments of its method."""
        layout = self._live
        params = dict(layout.params)
        if layout.combiner == "NAMED":
            return self if layout.constant is None else layout.constant, "NAMED", {}
        if "datatypes" in params:
            params["datatypes"] = [handle_of(child) for child in params["datatypes"]]
        base = DATATYPE_NULL if layout.base is None else handle_of(layout.base)
        return base, layout.combiner, params

    envelope = property(Get_envelope)
    contents = property(Get_contents)
    combiner = property(lambda self: COMBINERS[self._live.combiner])
    is_named = property(lambda self: self._live.combiner == "NAMED")
    is_predefined = property(
        lambda self: self._inner is None or self._inner.combiner in _PREDEFINED
    )

    def tocode(self) -> str:
        """Return the code, such as "i" or "i4".

        Raises:
            ValueError: the datatype has none.
        """
        if not self or not self._inner.code:
            raise ValueError(f"cannot map {self.Get_name()} to a code")
        return str(self._inner.code)

    @classmethod
    def fromcode(cls, code: str) -> Any:
        """Return the datatype of a code.

        Raises:
            ValueError: there is none.
        """
        if code not in CODES:
            raise ValueError(f"cannot map {code!r} to a datatype")
        return CODES[code]

    typechar = property(lambda self: self._live.char or "V")
    typestr = property(lambda self: self._live.text or f"V{self._live.extent}")

    # -- elements as bytes without gaps, and back ----------------------------------------------

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Copy the elements of a buffer to a place in another; return the place after them."""
        return self._pack(inbuf, outbuf, position, False)

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """Copy elements as ``Pack`` does, with the highest byte of each number first."""
        return self._pack(inbuf, outbuf, position, _is_external(datarep))

    def _pack(self, inbuf: Any, outbuf: Any, position: int, swaps: bool) -> int:
        data, target = self._elements(inbuf, False).packed(), bytes_of(outbuf, True)
        target[_place(target, position, len(data))] = self._swapped(data) if swaps else data
        return position + len(data)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Copy elements from a place in a buffer to another; return the place after them."""
        return self._unpack(inbuf, position, outbuf, False)

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """Copy elements as ``Unpack`` does, with the highest byte of each number first."""
        return self._unpack(inbuf, position, outbuf, _is_external(datarep))

    def _unpack(self, inbuf: Any, position: int, outbuf: Any, swaps: bool) -> int:
        piece, source = self._elements(outbuf, True), bytes_of(inbuf, False)
        data = source[_place(source, position, piece.nbytes)]
        piece.unpack(self._swapped(data) if swaps else data)
        return position + piece.nbytes

    def Pack_size(self, count: int, comm: Any) -> int:
        """Return the number of bytes that ``count`` elements need."""
        return int(count * self.size)

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """Return the number of bytes that ``count`` elements need."""
        return int(_is_external(datarep) * count * self.size)

    def _elements(self, buf: Any, writable: bool) -> Piece:
        layout, memory = self._live, bytes_of(buf, writable)
        count = len(memory) // layout.extent if layout.extent > 0 else 0
        return Piece(memory, 0, count, layout)

    def _swapped(self, data: Bytes) -> Bytes:
        dtype = self._live.dtype
        if dtype is None or not len(data):
            return data
        swapped: Bytes = np.ascontiguousarray(data).view(dtype).byteswap().view(np.uint8)
        return swapped


def _place(memory: Bytes, position: int, nbytes: int) -> slice:
    if position < 0 or position + nbytes > len(memory):
        raise MPIError(CLASSES["ERR_TRUNCATE"], f"{nbytes} bytes at {position} of {len(memory)}")
    return slice(position, position + nbytes)


def _is_external(datarep: str) -> bool:
    if datarep != "external32":
        raise MPIError(CLASSES["ERR_ARG"], f"datarep {datarep!r}")
    return True


def _counted(count: int) -> int:
    if count < 0:
        raise MPIError(CLASSES["ERR_COUNT"])
    return count


def _real_size(digits: int, exponent: int) -> int:
    real = ((2, 3, 4), (4, 6, 37), (8, 15, 307), (16, 33, 4931))
    return next((size for size, p, r in real[1:] if digits <= p and exponent <= r), 0)


def handle_of(layout: TypeLayout) -> Any:
    """Return a handle for a layout: the constant if it is one's."""
    return layout.constant if layout.constant is not None else Datatype._of(layout)


def blocks_of(datatype: Datatype) -> list[tuple[int, int, Any]]:
    """Return a datatype's blocks: offsets in bytes, numbers of elements, and their datatypes."""
    return [(offset, count, handle_of(child)) for offset, count, child in datatype._live.blocks]


def _contents(layout: TypeLayout) -> tuple[list[int], list[int], list[int], list[TypeLayout]]:
    """Return integers, addresses, counts and datatypes, in MPI's order for the combiner."""
    params, combiner = layout.params, layout.combiner
    if combiner == "NAMED":
        return [], [], [], []
    types = params.get("datatypes") or ([] if layout.base is None else [layout.base])
    in_bytes = ["lb", "extent"]
    if combiner[0] == "H" or combiner == "STRUCT":
        in_bytes += ["stride", "displacements"]
    numbers: list[int] = []
    addresses: list[int] = []
    if "displacements" in params:
        numbers.append(len(params["displacements"]))
    for name, value in params.items():
        if name == "datatypes":
            continue
        if name in ("sizes", "gsizes"):
            numbers.append(len(value))
        into = addresses if name in in_bytes else numbers
        into.extend(value if isinstance(value, list) else [value])
    return numbers, addresses, [], list(types)


def _remade(cls: Any, base: Any, combiner: str, params: dict[str, Any]) -> Any:
    """Return the datatype that a pickle describes."""
    method = {"VALUE_INDEX": "Get_value_index"}.get(combiner, f"Create_{combiner.lower()}")
    made = getattr(base, method)(**params)
    return made if type(made) is cls else cls(made)


# -- predefined datatypes ----------------------------------------------------------------------

DATATYPE_NULL = Datatype._constant("DATATYPE_NULL")
#: The predefined datatypes by name.
CONSTANTS: dict[str, Any] = {}
# Types of values for which there is a pair of a value and its index.
_PAIRED = ("SHORT", "INT", "LONG", "FLOAT", "DOUBLE", "LONG_DOUBLE")
# Character codes of the type strings that NumPy does not have.
_FOREIGN = {"i16": "", "c4": "E"}
_BY_CHAR = (
    "PACKED:B BYTE:B AINT:p OFFSET:l COUNT:l CHAR:c WCHAR:w SIGNED_CHAR:b SHORT:h INT:i LONG:l "
    "LONG_LONG:q UNSIGNED_CHAR:B UNSIGNED_SHORT:H UNSIGNED:I UNSIGNED_LONG:L UNSIGNED_LONG_LONG:Q "
    "FLOAT:f DOUBLE:d LONG_DOUBLE:g C_BOOL:? CXX_BOOL:? FLOAT16_T:e FLOAT32_T:f FLOAT64_T:d "
    "C_COMPLEX:F C_FLOAT_COMPLEX:F C_DOUBLE_COMPLEX:D C_LONG_DOUBLE_COMPLEX:G CXX_FLOAT_COMPLEX:F "
    "CXX_DOUBLE_COMPLEX:D CXX_LONG_DOUBLE_COMPLEX:G CHARACTER:c LOGICAL:i INTEGER:i REAL:f "
    "DOUBLE_PRECISION:d COMPLEX:F DOUBLE_COMPLEX:D"
).split()
_BY_TEXT = (
    "INT8_T:i1 INT16_T:i2 INT32_T:i4 INT64_T:i8 UINT8_T:u1 UINT16_T:u2 UINT32_T:u4 UINT64_T:u8 "
    "LOGICAL1:b1 LOGICAL2:i2 LOGICAL4:i4 LOGICAL8:i8 LOGICAL16:i16 INTEGER1:i1 INTEGER2:i2 "
    "INTEGER4:i4 INTEGER8:i8 INTEGER16:i16 REAL2:f2 REAL4:f4 REAL8:f8 REAL16:f16 COMPLEX4:c4 "
    "COMPLEX8:c8 COMPLEX16:c16 COMPLEX32:c32"
).split()
_ALIASES = (
    "UNSIGNED_INT:UNSIGNED SIGNED_SHORT:SHORT SIGNED_INT:INT SIGNED_LONG:LONG "
    "SIGNED_LONG_LONG:LONG_LONG BOOL:C_BOOL SINT8_T:INT8_T SINT16_T:INT16_T SINT32_T:INT32_T "
    "SINT64_T:INT64_T F_BOOL:LOGICAL F_INT:INTEGER F_FLOAT:REAL F_DOUBLE:DOUBLE_PRECISION "
    "F_COMPLEX:COMPLEX F_FLOAT_COMPLEX:COMPLEX F_DOUBLE_COMPLEX:DOUBLE_COMPLEX TWOINT:INT_INT"
).split()


def _define(name: str, char: str, text: str, code: str) -> None:
    layout = TypeLayout("NAMED")
    layout.size = layout.extent = layout.true_extent = int(text[1:]) * (4 if text == "U1" else 1)
    layout.align = min(layout.size // (2 if text[0] == "c" else 1), 16)
    layout.dense = True
    layout.char, layout.text, layout.code, layout.name = char, text, code, f"MPI_{name}"
    known = char in "?bhilqBHILQefdgFDGp" and char
    layout.dtype = np.dtype("l" if char == "p" else char) if known else None
    CONSTANTS[name] = Datatype._constant(name, layout)


def _define_pair(value: str) -> None:
    child, index = CONSTANTS[value]._inner, CONSTANTS["INT"]._inner
    place = child.size + -child.size % 4
    layout = TypeLayout("STRUCT", None, [(0, 1, child), (place, 1, index)])
    layout.combiner = "NAMED"
    # As the pair travels, without gaps.
    layout.dtype = np.dtype([("value", child.dtype), ("index", "i4")])
    layout.name = "MPI_2INT" if value == "INT" else f"MPI_{value}_INT"
    CONSTANTS[f"{value}_INT"] = Datatype._constant(f"{value}_INT", layout)


for _name, _char in (entry.split(":") for entry in _BY_CHAR):
    _define(_name, _char, "U1" if _char == "w" else np.dtype(_char).str[1:], _char)
for _name, _text in (entry.split(":") for entry in _BY_TEXT):
    # NumPy has booleans of one byte only; Fortran's longer ones are integers to it.
    _plain = _text if _text == "b1" else _text.replace("b", "i")
    _define(_name, _FOREIGN[_text] if _text in _FOREIGN else np.dtype(_plain).char, _text, _text)
_define("BFLOAT16_T", "", "V2", "")
CONSTANTS["BFLOAT16_T"]._inner.text = ""
for _name in _PAIRED:
    _define_pair(_name)
for _name, _other in (entry.split(":") for entry in _ALIASES):
    CONSTANTS[_name] = CONSTANTS[_other]


def _codes(entries: str) -> dict[str, Any]:
    return {code: CONSTANTS[name] for code, name in (e.split("=") for e in entries.split())}


CODES_C = _codes(
    "?=C_BOOL b=SIGNED_CHAR h=SHORT i=INT l=LONG q=LONG_LONG B=UNSIGNED_CHAR H=UNSIGNED_SHORT "
    "I=UNSIGNED L=UNSIGNED_LONG Q=UNSIGNED_LONG_LONG f=FLOAT d=DOUBLE g=LONG_DOUBLE "
    "F=C_FLOAT_COMPLEX D=C_DOUBLE_COMPLEX G=C_LONG_DOUBLE_COMPLEX b1=C_BOOL i1=INT8_T i2=INT16_T "
    "i4=INT32_T i8=INT64_T u1=UINT8_T u2=UINT16_T u4=UINT32_T u8=UINT64_T f2=FLOAT16_T f4=FLOAT "
    "c8=C_FLOAT_COMPLEX f8=DOUBLE c16=C_DOUBLE_COMPLEX f16=LONG_DOUBLE c32=C_LONG_DOUBLE_COMPLEX"
)
CODES_F = _codes(
    "l=LOGICAL i=INTEGER r=REAL s=REAL d=DOUBLE_PRECISION c=COMPLEX z=DOUBLE_COMPLEX l1=LOGICAL1 "
    "l2=LOGICAL2 l4=LOGICAL4 l8=LOGICAL8 l16=LOGICAL16 i1=INTEGER1 i2=INTEGER2 i4=INTEGER4 "
    "i8=INTEGER8 i16=INTEGER16 r2=REAL2 r4=REAL4 r8=REAL8 r16=REAL16 c4=COMPLEX4 c8=COMPLEX8 "
    "c16=COMPLEX16 c32=COMPLEX32"
)
#: Datatypes by code: formats of the buffer protocol and type strings of NumPy.
CODES = CODES_C | _codes(
    "e=FLOAT16_T Ze=COMPLEX4 Zf=C_FLOAT_COMPLEX Zd=C_DOUBLE_COMPLEX Zg=C_LONG_DOUBLE_COMPLEX "
    "E=COMPLEX4 c4=COMPLEX4 i16=INTEGER16 n=COUNT N=UNSIGNED_LONG p=AINT P=UNSIGNED_LONG c=CHAR "
    "a=CHAR S=CHAR S1=CHAR s=CHAR 1s=CHAR U=WCHAR U1=WCHAR u=UINT16_T 1u=UINT16_T w=WCHAR 1w=WCHAR "
    "M=INT64_T M8=INT64_T m=INT64_T m8=INT64_T"
)
