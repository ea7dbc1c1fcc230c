"""Ring of bytes from one rank to another, for messages in Python (:mod:`.messages`).

The native core uses the same pages with another protocol (``rings.c``). All ranks of a
communicator use the same one of the two protocols.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .control import Control
from .fence import fence

Array = np.ndarray[Any, Any]

# Words at the beginning of a ring, each in a cache line of its own: bytes that the sender has
# written, and bytes that the receiver has read. Each end writes only its own count.
_WRITTEN, _READ = 0, 64
_PREFIX_BYTES = 24


class RingPrefix(NamedTuple):
    """Beginning of a message, with one word for each attribute.

    Attributes:
        nbytes: length of the message, without prefix and padding.
        tag: tag of the message.
        address: address of the bytes in the sender's memory, or 0 if they follow in the ring.
    """

    nbytes: int
    tag: int
    address: int


class Ring:
    """Ring from one rank to another, seen from either end.

    An end first writes or reads bytes, and then adds them to its count. From that moment on the
    other end may read these bytes, or overwrite them. A long message goes through the ring in parts
    of a quarter of the ring. So one end copies a part while the other end copies the part before.

    Prefixes and messages begin at whole words. So both counts are multiples of 8, and no word of a
    prefix is split at the end of the ring.

    Attributes:
        capacity: bytes that the ring holds.
        peer: rank at the other end.
    """

    def __init__(self, control: Control, src: int, dst: int) -> None:
        start, capacity = control.layout.ring(src, dst), control.layout.ring_bytes
        first = start // 8 + 512  # behind the page that has the counts
        self._control = control
        self._counts = control.words[first - 512 : first]
        self._cells = control.words[first : first + capacity // 8]
        self._data = np.frombuffer(control.segment.map, np.uint8, capacity, 8 * first)
        self._part = capacity // 4
        self.capacity = capacity
        self.peer = dst if control.rank == src else src

    def filled(self) -> int:
        """Return how many bytes the ring holds.

        Raises:
            BackendError: the peer has written an impossible count.
        """
        filled = self._counts[_WRITTEN] - self._counts[_READ]
        if not 0 <= filled <= self.capacity or filled % 8:
            refuse(self._control, self.peer, f"{filled} bytes in a ring of {self.capacity}")
        return filled

    # -- for the sender -------------------------------------------------------------------

    def put(self, prefix: RingPrefix) -> Iterator[None]:
        """Write a prefix; yield while there is no room for all of it."""
        while self.capacity - self.filled() < _PREFIX_BYTES:
            yield
        written = self._counts[_WRITTEN]
        for index, word in enumerate(prefix, written // 8):
            self._cells[index % len(self._cells)] = word
        # The receiver reads the words as soon as the count covers them, so write the count last.
        fence()
        self._counts[_WRITTEN] = written + _PREFIX_BYTES

    def write(self, source: Array) -> Iterator[None]:
        """Write bytes; yield while there is no room."""
        while source.size:
            count = min(source.size, self.capacity - self.filled(), self._part)
            if not count:
                yield
                continue
            written = self._counts[_WRITTEN]
            at = written % self.capacity
            first = min(count, self.capacity - at)
            self._data[at : at + first] = source[:first]
            self._data[: count - first] = source[first:count]
            # The receiver reads the bytes as soon as the count covers them, so write the count
            # last.
            fence()
            self._counts[_WRITTEN] = written + count + -count % 8
            source = source[count:]

    # -- for the receiver -----------------------------------------------------------------

    def prefix(self) -> RingPrefix | None:
        """Return the next prefix and leave it in the ring; None if there is no prefix yet."""
        if self.filled() < _PREFIX_BYTES:
            return None
        # The processor must not read the words before it reads the count.
        fence()
        start = self._counts[_READ] // 8
        cells = self._cells
        return RingPrefix(*(cells[(start + index) % len(cells)] for index in range(3)))

    def drop_prefix(self) -> None:
        """Take the prefix off the ring."""
        # The sender overwrites the prefix as soon as the count covers it, so write the count last.
        fence()
        self._counts[_READ] += _PREFIX_BYTES

    def read(self, out: Array) -> Iterator[None]:
        """Take as many bytes off the ring as ``out`` has; yield while they have not arrived."""
        while out.size:
            count = min(out.size, self.filled(), self._part)  # without the padding of the last part
            if not count:
                yield
                continue
            # The processor must not read the bytes before it reads the count.
            fence()
            read = self._counts[_READ]
            at = read % self.capacity
            first = min(count, self.capacity - at)
            out[:first] = self._data[at : at + first]
            out[first:count] = self._data[: count - first]
            # The sender overwrites the bytes as soon as the count covers them, so write the count
            # last.
            fence()
            self._counts[_READ] = read + count + -count % 8
            out = out[count:]


def refuse(control: Control, peer: int, what: str) -> NoReturn:
    """Break the communicator, since the messages with rank ``peer`` are damaged.

    Raises:
        BackendError: always.
    """
    control.refuse_damaged(f"rank {peer}'s messages to rank {control.rank} are damaged: {what}")
