"""Python objects as bytes: plain data and arrays, without the power of pickle.

Reading a pickle runs whatever code its writer chose, so a process that may be reached
by others must not read one unasked. This format can only make None, booleans, numbers,
strings, bytes, lists, tuples, dicts, sets and arrays. It is JSON (from the standard
library) for the structure, with the bytes of the arrays after it; msgpack would do as
well, but NumPy is to stay the only dependency.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from typing import Any

import numpy as np

from collective import dtypes
from collective.arrays import adapter_like, adapter_of, is_array
from collective.errors import CollectiveError, InvalidArgumentError

__all__ = ["decode", "encode"]

_SAFE, _PICKLE = b"\x01", b"\x02"
_HEAD = struct.Struct("<cQ")
_ALIGN = 16
# Python refuses to read longer integers from decimal digits: that takes quadratic time.
_DECIMAL_BITS = 1024


def encode(value: Any, use_pickle: bool = False) -> np.ndarray[Any, Any]:
    """Return ``value`` as bytes (uint8).

    Raises:
        InvalidArgumentError: it holds something else than plain data and arrays.
    """
    if use_pickle:
        return np.frombuffer(_HEAD.pack(_PICKLE, 0) + pickle.dumps(value, 5), np.uint8)
    blobs: list[np.ndarray[Any, Any]] = []
    text = json.dumps(_plain(value, blobs)).encode()
    pieces = [_HEAD.pack(_SAFE, len(text)), text]
    length = _HEAD.size + len(text)
    for blob in blobs:
        pad = -length % _ALIGN
        pieces += [b"\0" * pad, blob.tobytes()]
        length += pad + blob.nbytes
    return np.frombuffer(b"".join(pieces), np.uint8)


def decode(raw: np.ndarray[Any, Any], use_pickle: bool = False) -> Any:
    """Return the object that :func:`encode` made bytes of.

    Raises:
        InvalidArgumentError: it is a pickle and ``use_pickle`` is False.
        CollectiveError: the bytes are not what :func:`encode` makes.
    """
    if raw.size < _HEAD.size:
        raise CollectiveError(f"object: {raw.size} bytes are too few to be one.")
    kind, length = _HEAD.unpack(raw[: _HEAD.size].tobytes())
    if kind == _PICKLE:
        if not use_pickle:
            raise InvalidArgumentError(
                "object: the sender used pickle=True, and reading a pickle can run any code; "
                "it was not read. Pass pickle=True here too if you trust every rank."
            )
        return pickle.loads(raw[_HEAD.size :].tobytes())
    if kind != _SAFE:
        raise CollectiveError(f"object: the bytes begin with {kind!r}, which no version writes.")
    text = raw[_HEAD.size : _HEAD.size + length].tobytes()
    try:
        return _object(json.loads(text), _Reader(raw, _HEAD.size + length))
    except CollectiveError:
        raise
    except (IndexError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise CollectiveError(f"object: the bytes are damaged: {error}") from error


class _Reader:
    """Hands out the arrays' bytes in the order they were written."""

    def __init__(self, raw: np.ndarray[Any, Any], position: int) -> None:
        self._raw = raw
        self._position = position

    def take(self, nbytes: int) -> np.ndarray[Any, Any]:
        start = self._position + -self._position % _ALIGN
        self._position = start + nbytes
        if nbytes < 0 or self._position > self._raw.size:
            raise ValueError(f"{nbytes} bytes at {start} of {self._raw.size}")
        return self._raw[start : start + nbytes].copy()


def _plain(value: Any, blobs: list[np.ndarray[Any, Any]]) -> Any:
    """Return ``value`` as JSON: scalars as they are, everything else as [tag, …]."""
    kind = type(value)
    if kind is int and value.bit_length() > _DECIMAL_BITS:
        return ["int", hex(value)]
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list or kind is tuple:
        return ["list" if kind is list else "tuple", *(_plain(item, blobs) for item in value)]
    if kind is dict:
        return ["dict", *([_plain(k, blobs), _plain(v, blobs)] for k, v in value.items())]
    if kind is set or kind is frozenset:
        return [kind.__name__, *(_plain(item, blobs) for item in value)]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (bytes, bytearray):
        blobs.append(np.frombuffer(value, np.uint8))
        return ["bytes", len(value)]
    if is_array(value):
        adapter = adapter_of(value)
        array, dtype = adapter.view(value)
        if not isinstance(array, np.ndarray):
            array = array.to_host()  # it comes as an array on the CPU, wherever there is a GPU
        blobs.append(np.ascontiguousarray(array))
        scalar = isinstance(value, np.generic)
        return ["array", "scalar" if scalar else adapter.name, dtype.name, *array.shape]
    raise InvalidArgumentError(
        f"object: {kind.__name__} is neither plain data nor an array (None, bool, int, float, "
        "complex, str, bytes, list, tuple, dict, set, arrays). Convert it, or pass pickle=True "
        "on every rank if you trust all of them."
    )


def _object(node: Any, reader: _Reader) -> Any:
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag == "list":
        return [_object(item, reader) for item in rest]
    if tag == "tuple":
        return tuple(_object(item, reader) for item in rest)
    if tag == "dict":
        return {_object(key, reader): _object(value, reader) for key, value in rest}
    if tag == "set":
        return {_object(item, reader) for item in rest}
    if tag == "frozenset":
        return frozenset(_object(item, reader) for item in rest)
    if tag == "complex":
        return complex(*rest)
    if tag == "int":
        return int(rest[0], 16)
    if tag == "bytes":
        return reader.take(rest[0]).tobytes()
    if tag != "array":
        raise ValueError(f"{tag!r} is no kind of object")
    framework, name, *shape = rest
    dtype = dtypes.named(name)
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"an array of shape {shape}")
    count = math.prod(shape)
    array = reader.take(count * dtype.itemsize).view(dtype.storage).reshape(shape)
    if framework == "scalar":
        return adapter_like("numpy").wrap(array, dtype)[()]
    # What is on GPUs alone, or of a kind that is unknown by name (DLPack), comes as NumPy.
    adapter = adapter_like("numpy" if framework in ("cuda", "cupy", "dlpack") else framework)
    return adapter.wrap(array, dtype)
