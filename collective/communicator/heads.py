"""Heads: first messages of fixed length that say what follows, and contain it if it is short.

A receiver must know the shape and dtype of an array before it can provide memory for it. All heads
have the same length, so a head can be received without any agreement. Most short arrays fit into
the head, so that one message is enough for the description and the array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.memory import dtypes
from collective.memory.buffer import Buffer

__all__ = ["HEAD_BYTES", "Head"]

Array = np.ndarray[Any, Any]

#: Length of every head in bytes. A transport takes as long for a head as for one byte.
HEAD_BYTES = 1024
_UINT8 = dtypes.BY_NAME["uint8"]


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
        """Return the ``nbytes`` bytes after the numbers; None if they did not fit into the head."""
        if nbytes > self.room:
            return None
        return self.buffer.array[self._start : self._start + nbytes]
