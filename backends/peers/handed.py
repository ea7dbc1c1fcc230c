"""A store for ranks that a transport already connects, and of which one has a value to publish."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collective.contract.store import Store
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

__all__ = ["HandedStore"]

_UINT8 = BY_NAME["uint8"]
# Size of a note. It says where a segment or a hub is: a path, or an address and a key.
_NOTE_BYTES = 4096


class HandedStore(Store):
    """A store of one value, which one rank publishes and a transport hands to the other ranks.

    Args:
        hand: function that moves the note from the publishing rank to the other ranks. Its
            arguments are the note, and whether this rank publishes it.
        check: function that raises if the ranks can no longer meet.
    """

    def __init__(self, hand: Callable[[Buffer, bool], None], check: Callable[[], None]) -> None:
        self._hand = hand
        self._check = check
        self._received: bytes | None = None

    def __str__(self) -> str:
        return "the transport"

    def set(self, key: str, value: bytes) -> None:
        note = Buffer(np.zeros(_NOTE_BYTES, np.uint8), _UINT8)
        note.array[: len(value)] = np.frombuffer(value, np.uint8)
        self._hand(note, True)

    def get(self, key: str, deadline: Deadline) -> bytes:
        if self._received is None:
            note = Buffer.empty(_NOTE_BYTES, _UINT8)
            self._hand(note, False)
            self._received = note.array.tobytes().rstrip(b"\0")
        return self._received

    def try_get(self, key: str) -> bytes | None:
        return self._received

    def delete(self, key: str) -> None:
        """Do nothing: the other ranks have the value already."""

    def check(self) -> None:
        self._check()
