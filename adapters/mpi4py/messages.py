"""What the arguments of a call describe: memory, a number of elements, and their datatype.

A description is a buffer, or a list such as ``[x, MPI.DOUBLE]``, ``[x, count, "d"]``,
``[x, (count, displacement), type]`` or, for calls with a part for each rank,
``[x, counts, displacements, type]``. Each becomes one or several :class:`Piece`.
"""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

import numpy as np

from .datatypes import CODES, CONSTANTS, Datatype
from .handles import BOTTOM
from .layouts import Piece, TypeLayout
from .memory import Bytes, bytes_of, described

_BYTE: TypeLayout = CONSTANTS["BYTE"]._inner
#: Types of arrays that travel as they are; those of foreign byte order are none of them.
PLAIN = frozenset(map(np.dtype, "?bhilqBHILQefdgFDG"))
#: No message, of a rank that takes no part or whose peer is ``PROC_NULL``.
NOTHING = Piece(np.empty(0, np.uint8), 0, 0, _BYTE)


def datatype_of(spec: Any) -> Any:
    """Return a datatype, given itself or by its code."""
    if isinstance(spec, Datatype):
        return spec
    if spec not in CODES:
        raise KeyError(f"cannot map {spec!r} to MPI datatype")
    return CODES[spec]


def _of_format(text: str) -> Any:
    if text[:1] == ">":
        raise BufferError(f"format string {text!r} with non-native byte order")
    return datatype_of(text[1:] if text[:1] in "@<=" and len(text) > 1 else text)


def _taken_apart(spec: Any, pair: tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """Return memory, count, displacement and datatype of a description, as far as given."""
    if isinstance(spec, (list, tuple)):
        count: Any = None
        displacement: Any = None
        datatype: Any = None
        if len(spec) == 2:
            memory, count = spec
            if isinstance(count, (Datatype, str)):
                count, datatype = None, count
        elif len(spec) == 3:
            memory, count, datatype = spec
        elif len(spec) == 4:
            memory, count, displacement, datatype = spec
        else:
            raise ValueError(f"message: expecting 2 to 4 items, got {len(spec)}")
        if len(spec) < 4 and isinstance(count, pair):
            count, displacement = tuple(spec[1])
        return memory, count, displacement, datatype
    if spec is None:
        raise TypeError("message: expecting buffer or list/tuple, not NoneType")
    return spec, None, None, None


def _memory(memory: Any, datatype: Any, writable: bool) -> tuple[Bytes, Any]:
    """Return memory as bytes, and the handle of its elements' datatype."""
    if datatype is not None or memory is None or memory is BOTTOM:
        return bytes_of(memory, writable), datatype_of(datatype)
    array, text = described(memory, writable)
    return array, CONSTANTS["BYTE"] if text == "B" else _of_format(text)


def _extent(handle: Any, purpose: str) -> int:
    if not handle:
        raise ValueError(f"message: cannot {purpose}, datatype is null")
    layout = handle._inner
    if layout.extent <= 0:
        raise ValueError(
            f"message: cannot {purpose}, datatype extent {layout.extent} "
            f"(lb:{layout.lb}, ub:{layout.lb + layout.extent})"
        )
    return int(layout.extent)


def _natural(value: Any, what: str) -> int:
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"message: negative {what} {number}")
    return number


def simple(spec: Any, writable: bool, blocks: int = 1) -> Piece:
    """Return the piece of a description with one count.

    Args:
        spec: the description.
        writable: whether the memory receives.
        blocks: number of equal parts in the memory; the piece is one of them if no count is given.
    """
    memory, count, displacement, datatype = _taken_apart(spec, (list, tuple))
    array, handle = _memory(memory, datatype, writable)
    offset = 0
    if displacement is not None and (displacement := _natural(displacement, "displacement")):
        extent = _extent(handle, "handle displacement")
        offset = displacement * extent
        if offset > len(array):
            raise ValueError(
                f"message: displacement {displacement} out of bounds, number of datatype "
                f"entries {len(array) // extent}"
            )
    if count is None:
        count = _inferred(len(array) - offset, handle)
        if count % (blocks or 1):
            raise ValueError(
                f"message: cannot infer count, number of entries {count} is not a multiple "
                f"of required number of blocks {blocks}"
            )
        count //= blocks or 1
    elif (count := _natural(count, "count")) and memory is None:
        raise ValueError(f"message: buffer is None but count is {count}")
    return Piece(None if memory is BOTTOM else array, offset, count, handle._live)


def _inferred(length: int, handle: Any) -> int:
    """Return the number of elements in so many bytes."""
    if length <= 0:
        return 0
    extent = _extent(handle, "infer count")
    if length % extent:
        layout = handle._inner
        raise ValueError(
            f"message: cannot infer count, buffer length {length} is not a multiple of datatype "
            f"extent {extent} (lb:{layout.lb}, ub:{layout.lb + extent})"
        )
    return length // extent


def equal(spec: Any, writable: bool, blocks: int) -> list[Piece]:
    """Return the pieces of a description with the same count for each rank."""
    first = simple(spec, writable, blocks)
    step = first.count * first.layout.extent
    return [
        Piece(first.memory, first.offset + i * step, first.count, first.layout)
        for i in range(blocks)
    ]


def vector(spec: Any, writable: bool, blocks: int) -> list[Piece]:
    """Return the pieces of a description with a count and a displacement for each rank."""
    memory, counts, displacements, datatype = _taken_apart(spec, (tuple,))
    array, handle = _memory(memory, datatype, writable)
    if counts is None:
        whole = _inferred(len(array), handle)
        counts = [whole // blocks + (whole % blocks > i) for i in range(blocks)]
    elif _is_integer(counts):
        counts = [counts] * blocks
    counts = _integers(counts, blocks)
    if displacements is None:
        displacements = [*accumulate(counts, initial=0)][:blocks]
    elif _is_integer(displacements):
        displacements = [displacements * i for i in range(blocks)]
    displacements = _integers(displacements, blocks)
    layout = handle._live
    base = None if memory is BOTTOM else array
    return [
        Piece(base, place * layout.extent, count, layout)
        for count, place in zip(counts, displacements)
    ]


def vector_of_types(spec: Any, writable: bool, blocks: int) -> list[Piece]:
    """Return the pieces of a description with a datatype for each rank, places in bytes."""
    counts = displacements = None
    if len(spec) == 2:
        memory, types = spec
    elif len(spec) == 3:
        memory, (counts, displacements), types = spec
    elif len(spec) == 4:
        memory, counts, displacements, types = spec
    else:
        raise ValueError(f"message: expecting 2 to 4 items, got {len(spec)}")
    if memory is BOTTOM and (counts is None or displacements is None):
        raise ValueError(f"message: BOTTOM requires {'counts' if counts is None else 'displs'}")
    array = bytes_of(memory, writable)
    counts = _integers([1] * blocks if counts is None else counts, blocks)
    displacements = _integers([0] * blocks if displacements is None else displacements, blocks)
    if len(types) != blocks:
        raise ValueError(f"message: expecting {blocks} items, got {len(types)}")
    base = None if memory is BOTTOM else array
    return [
        Piece(base, place, count, datatype_of(handle)._live)
        for count, place, handle in zip(counts, displacements, types)
    ]


def _integers(values: Any, blocks: int) -> list[int]:
    values = values.tolist() if isinstance(values, np.ndarray) else values
    numbers = [operator.index(value) for value in values]
    if len(numbers) != blocks:
        raise ValueError(f"message: expecting {blocks} items, got {len(numbers)}")
    return numbers


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
