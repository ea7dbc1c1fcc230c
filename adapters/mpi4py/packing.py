"""``Datatype.Pack`` and ``Unpack``: elements of any layout as bytes without gaps, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from .datatypes import Datatype, Layout
from .exceptions import CLASSES, MPIError
from .memory import Bytes, bytes_of
from .messages import Piece

__all__ = ["Pack", "Pack_external", "Pack_size", "Unpack", "Unpack_external"]


def _whole(datatype: Any, buf: Any, writable: bool) -> Piece:
    """Return all elements of a buffer."""
    layout = datatype._live
    memory = bytes_of(buf, writable)
    count = len(memory) // layout.extent if layout.extent > 0 else 0
    return Piece(memory, 0, count, layout)


def Pack(self: Any, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
    """Copy the elements of a buffer to a place in another; return the place after them."""
    data = _whole(self, inbuf, False).packed()
    return _put(data, outbuf, position)


def Unpack(self: Any, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
    """Copy elements from a place in a buffer to another buffer; return the place after them."""
    piece = _whole(self, outbuf, True)
    piece.unpack(_get(inbuf, position, piece.nbytes))
    return position + piece.nbytes


def Pack_size(self: Any, count: int, comm: Any) -> int:
    """Return the number of bytes that ``count`` elements need."""
    return int(count * self._live.size)


def Pack_external(self: Any, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
    """Copy elements as ``Pack`` does, with the highest byte of each number first."""
    _check(datarep)
    piece = _whole(self, inbuf, False)
    return _put(_swapped(piece.packed(), piece.layout), outbuf, position)


def Unpack_external(self: Any, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
    """Copy elements as ``Unpack`` does, with the highest byte of each number first."""
    _check(datarep)
    piece = _whole(self, outbuf, True)
    piece.unpack(_swapped(_get(inbuf, position, piece.nbytes), piece.layout))
    return position + piece.nbytes


def Pack_external_size(self: Any, datarep: str, count: int) -> int:
    """Return the number of bytes that ``count`` elements need."""
    _check(datarep)
    return int(count * self._live.size)


def _put(data: Bytes, outbuf: Any, position: int) -> int:
    target = bytes_of(outbuf, True)
    if position < 0 or position + len(data) > len(target):
        raise MPIError(CLASSES["ERR_TRUNCATE"], f"Pack: {len(data)} bytes at {position}")
    target[position : position + len(data)] = data
    return position + len(data)


def _get(inbuf: Any, position: int, nbytes: int) -> Bytes:
    source = bytes_of(inbuf, False)
    if position < 0 or position + nbytes > len(source):
        raise MPIError(CLASSES["ERR_TRUNCATE"], f"Unpack: {nbytes} bytes at {position}")
    return source[position : position + nbytes]


def _swapped(data: Bytes, layout: Layout) -> Bytes:
    if layout.dtype is None or not len(data):
        return data
    return np.ascontiguousarray(data).view(layout.dtype).byteswap().view(np.uint8)


def _check(datarep: str) -> None:
    if datarep != "external32":
        raise MPIError(CLASSES["ERR_ARG"], f"datarep {datarep!r}")


for _function in (
    Pack, Unpack, Pack_size, Pack_external, Unpack_external, Pack_external_size,
):  # fmt: skip
    setattr(Datatype, _function.__name__, _function)
