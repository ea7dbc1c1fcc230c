"""What a message between two ranks consists of, and what it becomes where it arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.errors import CollectiveError, InvalidArgumentError, ShapeError
from collective.memory import dtypes, nested
from collective.memory.arrays import Adapter, adapter_of
from collective.memory.buffer import Buffer
from collective.memory.overlap import writable_arrays

from . import objects
from .calls import Calls
from .heads import Head
from .output import Output, refuse_overlap

__all__ = ["WORDS", "MessageContents", "arriving"]

_UINT8 = dtypes.BY_NAME["uint8"]
#: Every message begins with a head of so many words: kind, dtype code, bytes, dimensions, shape.
#: What does not fit in after that follows in a message of its own, as does what the transport takes
#: from a GPU.
WORDS = 16
_MAX_DIMENSIONS = WORDS - 4
_ARRAY, _OBJECT, _FOLLOWING = 0, 1, 2


class MessageContents(Calls):
    """The part of a communicator that writes messages and reads them."""

    def _message(self, what: str, x: Any) -> tuple[Head, Buffer | None, tuple[Any, ...]]:
        """Return the head of the message that ``x`` is, and what has to follow it.

        And, where that is on a GPU, the array and its adapter.
        """
        head = Head(WORDS)
        head.words[:] = 0
        if nested.is_tree(x):
            nested.flatten(x)  # refuses keys that cannot be sorted
            payload = Buffer(objects.encode(x), _UINT8)
            head.words[:3] = _OBJECT, 0, payload.count
        else:
            adapter, array, dtype = self._view(what, x)
            if array.ndim > _MAX_DIMENSIONS:
                raise ShapeError(
                    f"{what}: {array.ndim} dimensions; at most {_MAX_DIMENSIONS}. Reshape it."
                )
            on_gpu = not isinstance(array, np.ndarray)
            kind = _FOLLOWING if on_gpu else _ARRAY
            head.words[:4] = kind, dtype.code, array.nbytes, array.ndim
            head.words[4 : 4 + array.ndim] = array.shape
            payload = Buffer(array.ravel(), dtype).bytes()
            if on_gpu:
                return head, payload if payload.count else None, (array, adapter)
        head.put(payload.array)
        return head, payload if payload.count > head.room else None, ()

    def _payload_room(
        self, head: Head, words: Sequence[int], out: Any, like: Any
    ) -> tuple[Buffer, bool, bool]:
        """Return the payload or room for it, whether it has yet to come, and if that is ``out``."""
        nbytes = words[2]
        self._tell_arrival(nbytes)
        inline = None if words[0] == _FOLLOWING else head.inline(nbytes)
        direct = self._direct(words, out, inline is None)
        if inline is None:
            if direct is not None:
                payload = direct
            elif words[0] == _FOLLOWING and self._enqueues:
                near = self._seen(like)
                room = self._allocate(self._room, self._gpu_adapter(like), nbytes, near)
                payload = Buffer(room, _UINT8)
            else:
                payload = self._allocate(Buffer.empty, nbytes, _UINT8)
            return payload, nbytes > 0, direct is not None
        if direct is None:
            return Buffer(inline, _UINT8), False, False
        direct.array[:] = inline
        return direct, False, True

    def _gpu_adapter(self, like: Any) -> Adapter:
        """Return what allocates on the GPU for a result like ``like``, which may be anything."""
        return self._adapter(None if nested.is_tree(like) else like, on_gpu=True)

    def _check_out(self, what: str, out: Any) -> tuple[Any, ...]:
        """Refuse what cannot be written to; return an array on the GPU, and its adapter."""
        if out is None:
            return ()
        if nested.is_tree(out):
            refuse_overlap(what, writable_arrays(out))
            return ()
        adapter = adapter_of(out)
        array, _ = adapter.output(out)
        if not array.flags.c_contiguous:
            refuse_overlap(what, [array])
        if isinstance(array, np.ndarray):
            if not self._on_host:
                self._view(what, out)
            return ()
        if not self._enqueues:
            return ()
        self._check_device(what, array)
        return array, adapter

    def _direct(self, words: Sequence[int], out: Any, follows: bool) -> Buffer | None:
        """Return ``out`` as bytes, if the message can be received right into it."""
        if out is None or nested.is_tree(out) or words[0] == _OBJECT:
            return None
        array, dtype = adapter_of(out).output(out)
        on_gpu = not isinstance(array, np.ndarray)
        if self._enqueues:
            fits = on_gpu == (words[0] == _FOLLOWING)
        else:
            fits = not on_gpu or (self._on_device and follows)
        if not fits or not array.flags.carray:
            return None
        if _shape(words) != array.shape or dtype.code != words[1]:
            return None
        return Buffer(array.ravel(), dtype).bytes()

    def _arrived(self, words: Sequence[int], payload: Buffer, out: Any, like: Any) -> Any:
        if words[0] == _OBJECT:
            value = objects.decode(payload.array)
            if out is None and like is not None and nested.is_tree(value):
                adapter = self._adapter(like)
                leaves = [_converted(leaf, adapter) for leaf in nested.flatten(value)]
                return nested.rebuild(value, iter(leaves))
            return value if out is None else _fill(out, value)
        if out is not None and nested.is_tree(out):
            raise InvalidArgumentError(
                f"recv: a single array came; out is a structure {self._who}."
            )
        dtype, shape = dtypes.BY_CODE[words[1]], _shape(words)
        array: Any = payload.array
        on_gpu = not isinstance(array, np.ndarray)
        if on_gpu and out is not None and self._seen(out) is None:
            array, on_gpu = array.to_host(), False
        adapter = adapter_of(out) if out is not None else self._adapter(like, on_gpu)
        output = Output("recv", out, adapter, shape, dtype, array)
        output.flat[:] = array.view(dtype.storage)
        return output.finish()


def arriving(what: str, head: Head) -> list[int]:
    """Return the numbers of a head that a peer sent.

    Raises:
        CollectiveError: they are not what :meth:`MessageContents._message` writes.
    """
    words: list[int] = head.words.tolist()
    kind, code, nbytes, ndim = words[:4]
    if kind == _OBJECT:
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


def _converted(leaf: Any, adapter: Adapter) -> Any:
    """Return the array ``leaf`` in the framework of ``adapter``."""
    theirs = adapter_of(leaf)
    if theirs is adapter:
        return leaf
    array, dtype = theirs.view(leaf)
    output = Output("recv", None, adapter, array.shape, dtype, array)
    output.flat[:] = array.ravel()
    return output.finish()


def _fill(out: Any, value: Any) -> Any:
    """Copy the arrays of ``value`` to those of ``out``, if they fit."""
    if nested.skeleton(out) != nested.skeleton(value):
        raise InvalidArgumentError("recv: out is nested differently from what came.")
    outputs = []
    for target, leaf in zip(nested.flatten(out), nested.flatten(value)):
        array, dtype = adapter_of(leaf).view(leaf)
        output = Output("recv", target, adapter_of(target), array.shape, dtype, array)
        outputs.append((output, array))
    for output, array in outputs:
        output.flat[:] = array.ravel()
        output.finish()
    return out
