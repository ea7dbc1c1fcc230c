"""Encoding of Python objects as bytes: plain data and arrays, without the dangers of pickle.

Reading a pickle runs any code that its writer chose, so a process that strangers may reach
must not read a pickle unless the program asks for it. This format can only make None, booleans,
numbers, strings, bytes, lists, tuples, dicts, sets and arrays. The structure is JSON (from the
standard library), and the bytes of the arrays follow it. msgpack would do as well, but NumPy is
to stay the only dependency.

Reading any bytes, even malicious ones, takes time and memory in proportion to their number.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import struct
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from collective.errors import CollectiveError, InvalidArgumentError
from collective.memory import dtypes
from collective.memory.arrays import adapter_like, adapter_of, is_array

_SAFE, _PICKLE = b"\x01", b"\x02"
_HEAD = struct.Struct("<cQ")
_ALIGN = 16
# Reading an integer from decimal digits takes quadratic time, so Python refuses long ones unless a
# program switches that limit off. Integers of more bits than this are written in hexadecimal.
_DECIMAL_BITS = 1024
_DECIMAL_DIGITS = 4300
# Maximum nesting. A program may raise Python's recursion limit; then only the size of the stack
# limits the parser in C.
_DEEPEST = 10_000
# Types of which JSON has every value. It has no long integers, see above.
_UNCHANGED = frozenset({type(None), bool, float, str})
_CONTAINERS: dict[str, Any] = {cls.__name__: cls for cls in (list, tuple, set, frozenset)}
# Adapters whose arrays arrive as NumPy arrays: GPU-only frameworks, and unknown frameworks.
_AS_NUMPY = ("cuda", "cupy", "dlpack")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# Maximum number of dimensions of an array in NumPy 2.
_DIMENSIONS = 64
# Limits against hash collisions. Sets and dicts compare all elements that have the same hash, which
# takes quadratic time in their number, and a higher power of it if sets are nested. Anybody can
# compute the hashes of numbers. Collisions by chance stay far below the limit. Floats that are
# powers of two take 34 comparisons each. The 78,125 points of a grid of 7 dimensions around 0,
# where hash(-1) == hash(-2), take 76 comparisons each, in 40 bytes.
_COMPARISONS, _COMPARISONS_A_BYTE = 1 << 20, 16


def encode(value: Any, use_pickle: bool = False, what: str = "object") -> np.ndarray[Any, Any]:
    """Return ``value`` as bytes (uint8).

    Args:
        value, use_pickle: the object, and whether to pickle it.
        what: the operation, for errors.

    Raises:
        InvalidArgumentError: ``value`` contains itself, or an object that is neither plain data nor
            an array; or it cannot be pickled.
    """
    if use_pickle:
        return np.frombuffer(_HEAD.pack(_PICKLE, 0) + _pickled(value, what), np.uint8)
    blobs: list[np.ndarray[Any, Any]] = []
    try:
        text = _WRITER.encode(_plain(value, blobs, what)).encode()
    except RecursionError as error:
        raise InvalidArgumentError(
            f"{what}: the object contains itself, or is nested too deeply: {_limit()}. Remove the "
            "reference to itself, or send the nested parts one by one."
        ) from error
    pieces = [_HEAD.pack(_SAFE, len(text)), text]
    length = _HEAD.size + len(text)
    for blob in blobs:
        pad = -length % _ALIGN
        pieces += [b"\0" * pad, blob.tobytes()]
        length += pad + blob.nbytes
    return np.frombuffer(b"".join(pieces), np.uint8)


def _pickled(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value, 5)
    except Exception as error:  # the object's own methods may raise any error
        raise InvalidArgumentError(
            f"{what}: the {type(value).__name__} cannot be pickled ({type(error).__name__}: "
            f"{error}). Nothing was sent. Send an object of classes that pickle can import."
        ) from error


def _unpickled(data: bytes, what: str) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:  # as in _pickled
        raise CollectiveError(
            f"{what}: the object cannot be unpickled ({type(error).__name__}: {error}). Define its "
            "class on this rank, too; an exception whose __init__ takes other arguments than its "
            "args needs a method __reduce__."
        ) from error


def decode(raw: np.ndarray[Any, Any], use_pickle: bool = False, what: str = "object") -> Any:
    """Return the object whose encoding by :func:`encode` is ``raw``.

    Args:
        raw, use_pickle: the bytes, and whether they may be a pickle.
        what: the operation and the sender, for errors.

    Raises:
        InvalidArgumentError: the bytes are a pickle, and ``use_pickle`` is False.
        CollectiveError: the bytes cannot come from :func:`encode`, or cannot be unpickled.
    """
    if raw.size < _HEAD.size:
        raise CollectiveError(f"{what}: {raw.size} bytes are too few for an object.")
    kind, length = _HEAD.unpack_from(raw.data)
    if kind == _PICKLE:
        if not use_pickle:
            raise InvalidArgumentError(
                f"{what}: the sender used pickle=True, and reading a pickle can run any code; "
                "it was not read. Pass pickle=True here too if you trust every rank."
            )
        return _unpickled(raw[_HEAD.size :].tobytes(), what)
    if kind != _SAFE:
        raise CollectiveError(
            f"{what}: the bytes begin with {kind!r}; no version of this package writes that."
        )
    if length > raw.size - _HEAD.size:
        raise CollectiveError(
            f"{what}: the message has {raw.size} bytes; its header announces {length} more."
        )
    try:
        node = _parsed(raw[_HEAD.size : _HEAD.size + length].tobytes().decode("ascii"))
        return _Reader(raw, _HEAD.size + length, what).object(node)
    except CollectiveError:
        raise
    except RecursionError as error:
        raise CollectiveError(f"{what}: the object is nested too deeply: {_limit()}.") from error
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise CollectiveError(f"{what}: the bytes are damaged: {error}") from error


def arrives_alike(value: Any) -> bool:
    """Return whether :func:`decode` gives an object of the same kind as ``value``.

    :func:`encode` must have accepted ``value``, without pickle.
    """
    if type(value) is dict:
        return all(map(arrives_alike, value.values()))  # keys are hashable, so they hold no arrays
    if type(value) in _CONTAINERS.values():
        return all(map(arrives_alike, value))
    if value is None or type(value) in (bool, int, float, complex, str, bytes, bytearray):
        return True
    adapter = adapter_of(value)
    return adapter.name not in _AS_NUMPY and adapter.unchanged(value) is value


def _integer(digits: str) -> int:
    if len(digits) > _DECIMAL_DIGITS:
        raise ValueError(f"an integer of {len(digits)} decimal digits")
    return int(digits)


def _refuse_object(_: Any) -> Any:
    raise ValueError("a JSON object, which no version of this package writes")


_WRITER = json.JSONEncoder()
_PARSER = json.JSONDecoder(object_pairs_hook=_refuse_object)
_WARY_PARSER = json.JSONDecoder(object_pairs_hook=_refuse_object, parse_int=_integer)


def _parsed(text: str) -> Any:
    if sys.getrecursionlimit() > _DEEPEST and _depth(text) > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} times")
    # Calling a Python function for each integer is slow, so it is done only if Python itself does
    # not refuse long integers.
    is_safe = 0 < sys.get_int_max_str_digits() <= _DECIMAL_DIGITS
    parsed, end = (_PARSER if is_safe else _WARY_PARSER).raw_decode(text)
    if end == len(text):
        return parsed
    raise ValueError(f"{len(text) - end} characters follow the object")


def _depth(text: str) -> int:
    """Return how deeply lists are nested in JSON; 0 if the nesting cannot exceed the limit."""
    if text.count("[") <= _DEEPEST:
        return 0
    characters = np.frombuffer(_STRING.sub("", text).encode(), np.uint8)
    steps = (characters == ord("[")).astype(np.int64) - (characters == ord("]"))
    return int(np.max(np.cumsum(steps), initial=0))


def _limit() -> str:
    return f"Python allows {sys.getrecursionlimit()} nested calls (sys.setrecursionlimit)"


class _Reader:
    """Reader of objects from the structure and the arrays' bytes, in the order of writing."""

    def __init__(self, raw: np.ndarray[Any, Any], position: int, what: str) -> None:
        self._raw = raw
        self._what = what
        self._position = position
        self._comparisons = _COMPARISONS + _COMPARISONS_A_BYTE * position
        # Costs of values by the values' ids. The dict keeps the values, so their ids stay unique.
        self._costs: dict[int, tuple[Any, int]] = {}

    def object(self, node: Any) -> Any:
        """Return the object that a node of the structure represents."""
        if type(node) is not list:
            return node
        tag, *rest = node
        if tag in _CONTAINERS:
            elements = self._all(rest)
            if tag in ("set", "frozenset"):
                self._tell_apart(elements)
            return _CONTAINERS[tag](elements)
        if tag == "dict":
            keys, values = [], []
            for key, value in rest:
                keys.append(key if type(key) is not list else self.object(key))
                values.append(value if type(value) is not list else self.object(value))
            self._tell_apart(keys)
            return dict(zip(keys, values, strict=True))
        if tag == "array":
            return self._array(*rest)
        if tag in ("bytes", "bytearray"):
            (length,) = rest
            taken = self._take(length)
            return taken.tobytes() if tag == "bytes" else bytearray(taken)
        if tag == "complex":
            real, imaginary = rest
            return complex(float(real), float(imaginary))
        if tag == "int":
            (digits,) = rest
            return int(digits, 16)
        raise ValueError(f"{str(tag)[:200]!r} is no kind of object")

    def _all(self, nodes: list[Any]) -> list[Any]:
        return [node if type(node) is not list else self.object(node) for node in nodes]

    def _tell_apart(self, values: list[Any]) -> None:
        """Refuse elements of a set, or keys of a dict, that need too many comparisons."""
        hashes = list(map(hash, values))
        if len(set(hashes)) < len(hashes):
            self._comparisons -= self._more(values, hashes)
            if self._comparisons < 0:
                raise CollectiveError(
                    f"{self._what}: a set or dict has so many elements or keys with the same hash "
                    "that comparing them takes quadratic time; this may be an attack. Send them in "
                    "a list, or pass pickle=True on every rank if you trust all of them."
                )

    def _more(self, values: Iterable[Any], hashes: list[int]) -> int:
        """Return the number of comparisons that find each value among those with its hash."""
        counts = Counter(hashes)
        return sum((counts[h] - 1) * self._cost(v) for v, h in zip(values, hashes, strict=True))

    def _cost(self, value: Any) -> int:
        """Return the approximate cost of comparing a value, in comparisons of short values."""
        kind = type(value)
        if kind is str or kind is bytes:
            return 1 + (len(value) >> 6)
        if kind is int:
            bits: int = value.bit_length()
            return 1 + (bits >> 9)
        if kind is not tuple and kind is not frozenset:
            return 1
        if id(value) in self._costs:
            return self._costs[id(value)][1]
        cost = 1 + sum(self._cost(element) for element in value)
        if kind is frozenset:  # comparing two sets looks up each element in the other set
            cost += self._more(value, list(map(hash, value)))
        self._costs[id(value)] = value, cost
        return cost

    def _array(self, framework: Any, name: Any, *shape: Any) -> Any:
        if type(framework) is not str or type(name) is not str:
            raise ValueError(f"an array of {framework!r}, {name!r}")
        dtype = dtypes.named(name)
        if len(shape) > _DIMENSIONS or any(
            type(length) is not int or not 0 <= length <= sys.maxsize for length in shape
        ):
            raise ValueError(f"an array of shape {str(shape)[:200]}")
        count = math.prod(shape)
        array = self._take(count * dtype.itemsize).view(dtype.storage).reshape(shape)
        if framework == "scalar":
            return adapter_like("numpy").wrap(array, dtype)[()]
        kind = "numpy" if framework in _AS_NUMPY else framework
        return adapter_like(kind).wrap(array, dtype)

    def _take(self, nbytes: Any) -> np.ndarray[Any, Any]:
        """Return a copy of the next ``nbytes`` bytes, from an aligned position."""
        start = self._position + -self._position % _ALIGN
        if type(nbytes) is not int or not 0 <= nbytes <= self._raw.size - start:
            raise ValueError(f"{nbytes!r} bytes at {start} of {self._raw.size}")
        self._position = start + nbytes
        return self._raw[start : self._position].copy()


def _plain(value: Any, blobs: list[np.ndarray[Any, Any]], what: str) -> Any:
    """Return ``value`` as JSON: scalars as they are, everything else as [tag, …]."""
    kind = type(value)
    if kind is int:
        return value if value.bit_length() <= _DECIMAL_BITS else ["int", hex(value)]
    if kind in _UNCHANGED:
        return value
    # Most elements are scalars, which need no call.
    if kind in (list, tuple, set, frozenset):
        items = [x if type(x) in _UNCHANGED else _plain(x, blobs, what) for x in value]
        return [kind.__name__, *items]
    if kind is dict:
        # A reader takes the bytes of a key before those of its value.
        pairs = (
            [x if type(x) in _UNCHANGED else _plain(x, blobs, what) for x in pair]
            for pair in value.items()
        )
        return ["dict", *pairs]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (bytes, bytearray):
        blobs.append(np.frombuffer(value, np.uint8))
        return [kind.__name__, len(value)]
    if is_array(value):
        adapter = adapter_of(value)
        array, dtype = adapter.view(value)
        if not isinstance(array, np.ndarray):
            array = array.to_host()  # receivers get a CPU array, even if they have a GPU
        blobs.append(np.ascontiguousarray(array))
        scalar = isinstance(value, np.generic)
        return ["array", "scalar" if scalar else adapter.name, dtype.name, *array.shape]
    raise InvalidArgumentError(
        f"{what}: {kind.__name__} is neither plain data nor an array (None, bool, int, float, "
        "complex, str, bytes, list, tuple, dict, set, arrays). Convert it, or pass pickle=True "
        "on every rank if you trust all of them."
    )
