"""Heads: first messages of fixed length that say what follows, and contain it if it is short.

A receiver must know the shape and dtype of an array before it can provide memory for it. All heads
have the same length, so a head can be received without any agreement. Most short arrays fit into
the head, so that one message is enough for the description and the array.

The second half has the contents of a message between two ranks, which begins with a head: how it is
built, and how it is turned into a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from collective.errors import CollectiveError, InvalidArgumentError, ShapeError
from collective.memory import dtypes, nested
from collective.memory.arrays import Adapter, adapter_of
from collective.memory.buffer import Buffer
from collective.memory.overlap import writable_arrays

from .. import objects
from ..output import Output, refuse_overlap
from ..path import Path
from ..streams import Near
from .views import UINT8, Array, adapter_for, check_device, device_view, room_on_gpu, view

#: Length of every head in bytes. A transport takes as long for a head as for one byte.
HEAD_BYTES = 1024


class Head:
    """Message of some numbers, with room for bytes after them.

    Args:
        count: number of numbers.
        received: bytes of a received head; by default a new head is made.

    Attributes:
        buffer: the complete head, as it is sent.
        words: the numbers (int64).
        room: number of bytes that fit in after the numbers.
    """

    __slots__ = ("_start", "buffer", "room", "words")

    def __init__(self, count: int, received: Array | None = None) -> None:
        self.buffer = Buffer(
            np.empty(HEAD_BYTES, np.uint8) if received is None else received, UINT8
        )
        self._start = 8 * count
        self.words = self.buffer.array[: self._start].view(np.int64)
        self.room = HEAD_BYTES - self._start

    def put(self, array: Array) -> None:
        """Write a contiguous array's bytes after the numbers, if there is room."""
        if array.nbytes <= self.room:
            self.buffer.array[self._start : self._start + array.nbytes] = array.view(np.uint8)

    def inline(self, nbytes: int) -> Array | None:
        """Return the ``nbytes`` bytes after the numbers; None if they did not fit into the head."""
        if nbytes > self.room:
            return None
        return self.buffer.array[self._start : self._start + nbytes]


# -- messages between two ranks -------------------------------------------------------------------

#: Number of words of the head that begins every message: kind, dtype code, number of bytes, number
#: of dimensions, shape. The payload comes after the words if it fits into the head. A longer
#: payload, and one that the transport takes from a GPU, follows in a separate message.
WORDS = 16
_MAX_DIMENSIONS = WORDS - 4
# Kinds: an array, a structure, an array whose payload follows from a GPU, an object.
_ARRAY, _STRUCTURE, _FOLLOWING, OBJECT = range(4)


def message_of(
    path: Path, what: str, x: Any, hosted: str = ""
) -> tuple[Head, Buffer | None, Near | None]:
    """Return the head of the message for ``x``, the payload that must follow it, and a GPU array.

    The payload is None if nothing follows the head. The array is ``x`` if ``x`` is on a GPU, else
    None.

    Args:
        what: the operation, for errors.
        hosted: as in :func:`.views.view`.
    """
    head = Head(WORDS)
    head.words[:] = 0
    if nested.is_tree(x):
        for leaf in nested.flatten(x):
            adapter_of(leaf, what)  # refuses all but arrays, as the other calls do
        payload = Buffer(objects.encode(_bare(x), what=what), UINT8)
        head.words[:3] = _STRUCTURE, 0, payload.count
    elif hosted == "object":
        payload = Buffer(x, UINT8)
        head.words[:3] = OBJECT, 0, payload.count
    else:
        adapter, array, dtype = view(path, what, x, hosted)
        if array.ndim > _MAX_DIMENSIONS:
            raise ShapeError(
                f"{what}: the array has {array.ndim} dimensions; a message allows at most "
                f"{_MAX_DIMENSIONS}. Reshape the array."
            )
        on_gpu = not isinstance(array, np.ndarray)
        kind = _FOLLOWING if on_gpu else _ARRAY
        head.words[:4] = kind, dtype.code, array.nbytes, array.ndim
        head.words[4 : 4 + array.ndim] = array.shape
        payload = Buffer(array.ravel(), dtype).bytes()
        if on_gpu:
            return head, payload if payload.count else None, Near(array, adapter)
    head.put(payload.array)
    return head, payload if payload.count > head.room else None, None


def room_for(
    path: Path, head: Head, words: Sequence[int], out: Any, like: Any
) -> tuple[Buffer, bool, bool]:
    """Return a buffer of the payload, whether the payload follows, and whether it is ``out``.

    The buffer holds the payload if the head contained it, else it is room to receive the payload.

    Args:
        head, words: head of the message, and its words.
        out: array or structure that receives the result, or None.
        like: model of the result.
    """
    nbytes = words[2]
    path.listeners.message_arrives(nbytes, path.tell_failure)
    inline = None if words[0] == _FOLLOWING else head.inline(nbytes)
    direct = _direct(path, words, out, inline is None)
    if inline is None:
        if direct is not None:
            payload = direct
        elif words[0] == _FOLLOWING and path.enqueues:
            # `like` may be a structure, which does not determine one framework.
            adapter = adapter_for(None if nested.is_tree(like) else like, on_gpu=True)
            room = path.allocate(room_on_gpu, path, adapter, nbytes, device_view(like))
            payload = Buffer(room, UINT8)
        else:
            payload = path.allocate(Buffer.empty, nbytes, UINT8)
        return payload, nbytes > 0, direct is not None
    if direct is None:
        return Buffer(inline, UINT8), False, False
    direct.array[:] = inline
    return direct, False, True


def check_out(path: Path, what: str, out: Any) -> Near | None:
    """Refuse an ``out`` that cannot be written; return it if calls on it are enqueued."""
    if out is None:
        return None
    if nested.is_tree(out):
        refuse_overlap(what, writable_arrays(out, what))
        return None
    adapter = adapter_of(out, what, "out")
    array: Any = adapter.output(out)[0]
    if not array.flags.c_contiguous:
        refuse_overlap(what, [array])
    if isinstance(array, np.ndarray):
        if not path.on_host:
            view(path, what, out)
        return None
    if not path.enqueues:
        return None
    check_device(path, what, array)
    return Near(array, adapter)


def _direct(path: Path, words: Sequence[int], out: Any, follows: bool) -> Buffer | None:
    """Return ``out`` as a buffer of bytes, if the message can be received directly into it."""
    if out is None or nested.is_tree(out) or words[0] in (_STRUCTURE, OBJECT):
        return None
    array, dtype = adapter_of(out).output(out)
    on_gpu = not isinstance(array, np.ndarray)
    if path.enqueues:
        fits = on_gpu == (words[0] == _FOLLOWING)
    else:
        fits = not on_gpu or (path.on_device and follows)
    if not fits or not array.flags.carray:
        return None
    if _shape(words) != array.shape or dtype.code != words[1]:
        return None
    return Buffer(array.ravel(), dtype).bytes()


def build_result(
    path: Path, what: str, source: int, words: Sequence[int], payload: Buffer, out: Any, like: Any,
    hosted: str = "",
) -> Any:  # fmt: skip
    """Return the result of a receive: ``out``, or a new array or structure.

    Args:
        what: the operation, for errors.
        source: rank that sent the message, for errors.
        words, payload: words of the message's head, and the buffer with its payload.
        out, like: as in :func:`room_for`.
        hosted: ``"object"`` if the result is to be an encoded object; see :func:`.views.view`.

    Raises:
        InvalidArgumentError: the message is an object, and the receiver expects an array; or the
            other way round.
    """
    if (words[0] == OBJECT) != (hosted == "object"):
        _refuse_other_kind(path, what, source, words)
    if words[0] == OBJECT:
        return payload.array
    what = f"{what} from rank {source} to rank {path.rank}"
    if words[0] == _STRUCTURE:
        value = objects.decode(payload.array, what=what)
        if out is None and like is not None and nested.is_tree(value):
            adapter = adapter_for(like)
            leaves = [_converted(what, leaf, adapter) for leaf in nested.flatten(value)]
            return nested.rebuild(value, iter(leaves))
        return value if out is None else _fill(what, out, value)
    if out is not None and nested.is_tree(out):
        raise InvalidArgumentError(f"{what}: the message is a single array; out is a structure.")
    dtype, shape = dtypes.BY_CODE[words[1]], _shape(words)
    array: Any = payload.array
    on_gpu = not isinstance(array, np.ndarray)
    if on_gpu and out is not None and device_view(out) is None:
        array, on_gpu = array.to_host(), False
    adapter = adapter_of(out) if out is not None else adapter_for(like, on_gpu)
    output = Output(what, out, adapter, shape, dtype, array)
    output.flat[:] = array.view(dtype.storage)
    return output.finish()


def _refuse_other_kind(path: Path, what: str, source: int, words: Sequence[int]) -> NoReturn:
    if words[0] == OBJECT:
        sent, send, receive = "an object", "send_object", "recv_object"
    else:
        sent, send, receive = "a structure", "send", "recv"
        if words[0] != _STRUCTURE:
            sent = f"an array ({dtypes.BY_CODE[words[1]]} of shape {_shape(words)})"
        what = "recv_object"
    raise InvalidArgumentError(
        f"{what}: rank {source} sent {sent}, by {send} {path.who}. Receive it by {receive}, or "
        f"send it by {'send' if receive == 'recv_object' else 'send_object'}."
    )


def _bare(tree: Any) -> Any:
    """Return a structure of the same nesting in lists, tuples and dicts alone."""
    if isinstance(tree, dict):
        return {key: _bare(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(map(_bare, tree))
    return tree


def read_words(what: str, head: Head) -> list[int]:
    """Return the words of a head that a peer sent.

    Raises:
        CollectiveError: :func:`message_of` cannot have written these words.
    """
    words: list[int] = head.words.tolist()
    kind, code, nbytes, ndim = words[:4]
    if kind in (_STRUCTURE, OBJECT):
        sound = nbytes >= 0
    else:
        sound = (
            kind in (_ARRAY, _FOLLOWING)
            and 0 <= code < len(dtypes.BY_CODE)
            and 0 <= ndim <= _MAX_DIMENSIONS
            and min(shape := _shape(words), default=0) >= 0
            and math.prod(shape) * dtypes.BY_CODE[code].itemsize == nbytes
        )
    if not sound:
        raise CollectiveError(
            f"{what}: a message begins with {', '.join(map(str, words))}; its kind, dtype, bytes "
            "and shape do not fit together. The sender has another version of this package, or "
            "its memory is damaged."
        )
    return words


def _shape(words: Sequence[int]) -> tuple[int, ...]:
    return tuple(words[4 : 4 + words[3]])


def _converted(what: str, leaf: Any, adapter: Adapter) -> Any:
    """Return the array ``leaf`` in the framework of ``adapter``."""
    own_adapter = adapter_of(leaf)
    if own_adapter is adapter:
        return leaf
    array, dtype = own_adapter.view(leaf)
    output = Output(what, None, adapter, array.shape, dtype, array)
    output.flat[:] = array.ravel()
    return output.finish()


def _fill(what: str, out: Any, value: Any) -> Any:
    """Copy the arrays of ``value`` to the arrays of ``out``; raise if they do not fit."""
    if nested.skeleton(out) != nested.skeleton(value):
        raise InvalidArgumentError(
            f"{what}: out is nested differently from the received structure."
        )
    outputs = []
    for target, leaf in zip(nested.flatten(out), nested.flatten(value)):
        array, dtype = adapter_of(leaf).view(leaf)
        output = Output(what, target, adapter_of(target), array.shape, dtype, array)
        outputs.append((output, array))
    for output, array in outputs:
        output.flat[:] = array.ravel()
        output.finish()
    return out
