"""Heads: what goes before an array, and the array itself if it is short.

Who receives has to know what comes before it can be told where to put it. A head has one
length, so it needs no agreement; and most of what is short fits into it, so that one message
does for both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.memory import dtypes
from collective.memory.buffer import Buffer

__all__ = ["HEAD_BYTES", "Head"]

Array = np.ndarray[Any, Any]

#: Length of every head. A transport takes as long for one as for a byte.
HEAD_BYTES = 1024
_UINT8 = dtypes.BY_NAME["uint8"]


class Head:
    """Some numbers, and room for bytes after them.

    Args:
        count: how many numbers.
        received: the bytes of a head that has come; a new one by default.

    Attributes:
        buffer: all of it, as it travels.
        words: the numbers (int64).
        room: bytes that fit in after them.
    """

    __slots__ = ("_start", "buffer", "room", "words")

    def __init__(self, count: int, received: Array | None = None) -> None:
        self.buffer = Buffer(
            np.empty(HEAD_BYTES, np.uint8) if received is None else received, _UINT8
        )
        self._start = 8 * count
        self.words = self.buffer.array[: self._start].view(np.int64)
        self.room = HEAD_BYTES - self._start

    def put(self, array: Array) -> None:
        """Write a contiguous array's bytes after the numbers, if there is room."""
        if array.nbytes <= self.room:
            self.buffer.array[self._start : self._start + array.nbytes] = array.view(np.uint8)

    def inline(self, nbytes: int) -> Array | None:
        """Return the bytes after the numbers, None if they were too many for it."""
        if nbytes > self.room:
            return None
        return self.buffer.array[self._start : self._start + nbytes]
