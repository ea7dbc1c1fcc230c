"""What the arguments of a call describe: memory, a number of elements, and their datatype.

A description is a buffer, or a list such as ``[x, MPI.DOUBLE]``, ``[x, count, "d"]``,
``[x, (count, displacement), type]`` or, for calls with a part for each rank,
``[x, counts, displacements, type]``. Each becomes one or several :class:`Piece`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .datatypes import CODES, CONSTANTS, Datatype, Layout
from .handles import BOTTOM
from .memory import Bytes, address_of, bytes_of, described, has_memory, raw

__all__ = ["NOTHING", "Piece", "simple", "vector", "vector_of_types"]

_BYTE: Layout = CONSTANTS["BYTE"]._inner


class Piece:
    """Elements of one datatype in memory.

    Args:
        memory: the bytes of the object; None for ``BOTTOM``.
        offset: offset of the first element in ``memory`` in bytes; an address for ``BOTTOM``.
        count: number of elements.
        layout: their datatype.

    Attributes:
        nbytes: number of bytes that travel.
    """

    __slots__ = ("count", "layout", "memory", "nbytes", "offset")

    def __init__(self, memory: Bytes | None, offset: int, count: int, layout: Layout) -> None:
        self.memory = memory
        self.offset = offset
        self.count = count
        self.layout = layout
        self.nbytes = count * layout.size

    def _whole(self) -> tuple[Bytes, int]:
        """Return the memory that the elements span, and the offset of the first in it."""
        low, high = self.layout.span(self.count)
        start = self.offset if self.memory is None else address_of(self.memory) + self.offset
        # Elements may lie outside of the object, as with one column of a matrix that begins at
        # an element of its own.
        array = raw(start + low, high - low, self.memory)
        return array, low

    @property
    def direct(self) -> Bytes | None:
        """The bytes themselves, if they follow each other; None if there are gaps."""
        layout, nbytes = self.layout, self.nbytes
        if not nbytes:
            return np.empty(0, np.uint8)
        if not layout.dense:
            return None
        if self.memory is None:
            return raw(self.offset, nbytes)
        if self.offset + nbytes > len(self.memory):
            raise ValueError(
                f"message: {self.count} elements of {layout.name or 'the datatype'} are "
                f"{nbytes} bytes, but the buffer has {len(self.memory) - self.offset} bytes"
            )
        return self.memory[self.offset : self.offset + nbytes]

    def packed(self) -> Bytes:
        """Return the bytes that travel: the memory itself, or a copy without gaps."""
        direct = self.direct
        if direct is not None:
            return direct
        array, low = self._whole()
        places: Bytes = array[self.layout.places(self.count) - low]
        return places

    def unpack(self, data: Any) -> None:
        """Write received bytes to their places; fewer than expected fill the first elements."""
        received = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        direct = self.direct
        if direct is not None:
            direct[: len(received)] = received
            return
        array, low = self._whole()
        array[(self.layout.places(self.count) - low)[: len(received)]] = received


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


def _is_type(spec: Any) -> bool:
    return isinstance(spec, (Datatype, str))


def _taken_apart(spec: Any, pair: tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """Return memory, count, displacement and datatype of a description, as far as given."""
    if isinstance(spec, (list, tuple)):
        memory: Any = None
        count: Any = None
        displacement: Any = None
        datatype: Any = None
        if len(spec) == 2:
            memory, count = spec
            if _is_type(count):
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
    if spec is None or not has_memory(spec):
        raise TypeError(f"message: expecting buffer or list/tuple, not {type(spec).__name__}")
    return spec, None, None, None


def _memory(memory: Any, datatype: Any, writable: bool) -> tuple[Bytes, Any]:
    """Return memory as bytes, and the handle of its elements' datatype."""
    if datatype is not None:
        return bytes_of(memory, writable), datatype_of(datatype)
    if memory is None or memory is BOTTOM:
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


def simple(spec: Any, writable: bool, blocks: int = 0) -> Piece:
    """Return the piece of a description with one count.

    Args:
        spec: the description.
        writable: whether the memory receives.
        blocks: number of equal parts in the memory; the piece is one of them if no count is given.
    """
    memory, count, displacement, datatype = _taken_apart(spec, (list, tuple))
    array, handle = _memory(memory, datatype, writable)
    offset = 0
    if displacement is not None:
        displacement = operator.index(displacement)
        if displacement < 0:
            raise ValueError(f"message: negative displacement {displacement}")
        if displacement:
            extent = _extent(handle, "handle displacement")
            offset = displacement * extent
            if offset > len(array):
                raise ValueError(
                    f"message: displacement {displacement} out of bounds, number of datatype "
                    f"entries {len(array) // extent}"
                )
    length = len(array) - offset
    if count is not None:
        count = operator.index(count)
        if count < 0:
            raise ValueError(f"message: negative count {count}")
        if count and memory is None:
            raise ValueError(f"message: buffer is None but count is {count}")
    elif length > 0:
        count = _inferred(length, handle)
        if blocks > 1:
            if count % blocks:
                raise ValueError(
                    f"message: cannot infer count, number of entries {count} is not a multiple "
                    f"of required number of blocks {blocks}"
                )
            count //= blocks
    bottom = memory is BOTTOM
    return Piece(None if bottom else array, offset, count or 0, handle._live)


def _inferred(length: int, handle: Any) -> int:
    extent = _extent(handle, "infer count")
    if length % extent:
        layout = handle._inner
        raise ValueError(
            f"message: cannot infer count, buffer length {length} is not a multiple of datatype "
            f"extent {extent} (lb:{layout.lb}, ub:{layout.lb + extent})"
        )
    return length // extent


def blocks_of(piece: Piece, blocks: int) -> list[Piece]:
    """Return the parts of memory of which ``piece`` is the first, one for each rank."""
    step = piece.count * piece.layout.extent
    return [
        Piece(piece.memory, piece.offset + i * step, piece.count, piece.layout)
        for i in range(blocks)
    ]


def _integers(values: Any, blocks: int) -> list[int]:
    numbers = [operator.index(value) for value in _iterated(values)]
    if len(numbers) != blocks:
        raise ValueError(f"message: expecting {blocks} items, got {len(numbers)}")
    return numbers


def _iterated(values: Any) -> Sequence[Any]:
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def vector(spec: Any, writable: bool, blocks: int) -> list[Piece]:
    """Return the pieces of a description with a count and a displacement for each rank."""
    memory, counts, displacements, datatype = _taken_apart(spec, (tuple,))
    array, handle = _memory(memory, datatype, writable)
    if counts is None:
        whole = _inferred(len(array), handle) if len(array) else 0
        counts = [whole // blocks + (whole % blocks > i) for i in range(blocks)]
    elif _is_integer(counts):
        counts = [operator.index(counts)] * blocks
    else:
        counts = _integers(counts, blocks)
    if displacements is None:
        ends = np.cumsum([0, *counts]).tolist()
        displacements = ends[:blocks]
    elif _is_integer(displacements):
        displacements = [operator.index(displacements) * i for i in range(blocks)]
    else:
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
        raise ValueError(
            f"message: BOTTOM requires {'counts' if counts is None else 'displs'}"
        )  # fmt: skip
    array = bytes_of(memory, writable)
    counts = [1] * blocks if counts is None else _integers(counts, blocks)
    displacements = [0] * blocks if displacements is None else _integers(displacements, blocks)
    if len(types) != blocks:
        raise ValueError(f"message: expecting {blocks} items, got {len(types)}")
    base = None if memory is BOTTOM else array
    return [
        Piece(base, place, count, datatype_of(handle)._live)
        for count, place, handle in zip(counts, displacements, types)
    ]
