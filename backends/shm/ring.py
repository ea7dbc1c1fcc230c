"""Point to point: a ring of bytes for each ordered pair of ranks.

A message is a header and, up to half a ring, its bytes. A longer one is the address of
the sender's buffer: the receiver fetches it in one copy and acknowledges. Where memory
of peers cannot be read, long messages stream through the ring as well.

A message whose tag nobody asks for yet is taken off the ring, so that it does not block
those behind it: its bytes go to the heap, an address stays an address.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from .control import Control, fence

__all__ = ["MessageRing", "Receiving", "Sending", "refuse"]

Array = np.ndarray[Any, Any]
#: ``fetch(rank, (address, segment, offset), out)`` copies from a peer's memory.
Fetch = Callable[[int, tuple[int, int, int], Array], None]

# Words at the head of a ring. Head and tail on lines of their own: one is written by
# the sender only, the other by the receiver only.
_HEAD, _TAIL, _ACKS = 0, 64, 128
_ACK_SLOTS = 64
# A message begins with: length, tag, address or 0, segment or 0, offset, acknowledgement.
# Everything in the ring is a multiple of a word long, so that headers can be read as words.
_HEADER = 6
# No message is as long: what says so is damaged.
_NO_LENGTH = 1 << 47


class MessageRing:
    """One direction between two ranks, seen from either."""

    def __init__(self, control: Control, src: int, dst: int, fetch: Fetch) -> None:
        layout = control.layout
        start = layout.ring(src, dst)
        self._control = control
        self.capacity = layout.ring_bytes
        self.words = control.words[start // 8 : (start + 4096) // 8]
        self.data = np.frombuffer(control.segment.map, np.uint8, self.capacity, start + 4096)
        self.cells = control.words[(start + 4096) // 8 : (start + 4096 + self.capacity) // 8]
        self.fetch = fetch
        self.src = src
        self._peer = dst if control.rank == src else src
        # Sender's side.
        self.sending = threading.Lock()
        self.free_acks = deque(range(_ACK_SLOTS))
        # Receiver's side.
        self.receiving = threading.Lock()
        self.unexpected: dict[int, deque[_Arrived]] = {}
        self._draining: tuple[int, _Arrived] | None = None

    def announce(self, header: Sequence[int]) -> bool:
        """Write a header if there is room."""
        words, cells = self.words, self.cells
        if self.capacity - self._filled() < 8 * _HEADER:
            return False
        head = words[_HEAD]
        at, length = head // 8, len(cells)
        for index, value in enumerate(header):
            cells[(at + index) % length] = value
        # The header before the head that shows it.
        fence()
        words[_HEAD] = head + 8 * _HEADER
        return True

    def announced(self) -> list[int] | None:
        """Take a header off the ring if there is one."""
        words, cells = self.words, self.cells
        if self._filled() < 8 * _HEADER:
            return None
        tail = words[_TAIL]
        fence()
        at, length = tail // 8, len(cells)
        header = [cells[(at + index) % length] for index in range(_HEADER)]
        # Read before its room is given back: the sender may write there at once.
        fence()
        words[_TAIL] = tail + 8 * _HEADER
        return header

    def write(self, source: Array) -> int:
        """Copy as much of ``source`` (bytes) to the ring as there is room for; return that."""
        words = self.words
        count = min(source.size, self.capacity - self._filled())  # a multiple of a word
        head = words[_HEAD]
        if count:
            at = head % self.capacity
            first = min(count, self.capacity - at)
            self.data[at : at + first] = source[:first]
            if count > first:
                self.data[: count - first] = source[first:count]
            fence()
            words[_HEAD] = head + count + -count % 8
        return count

    def read(self, out: Array) -> int:
        """Copy as much from the ring to ``out`` (bytes) as there is; return that."""
        words = self.words
        count = min(out.size, self._filled())  # a last piece may have padding after it
        tail = words[_TAIL]
        if count:
            fence()
            at = tail % self.capacity
            first = min(count, self.capacity - at)
            out[:first] = self.data[at : at + first]
            if count > first:
                out[first:count] = self.data[: count - first]
            fence()
            words[_TAIL] = tail + count + -count % 8
        return count

    def match(self, tag: int) -> _Arrived | None:
        """Return the next message with ``tag`` if there is one; never waits.

        If its bytes still come, the ring is the caller's until it has them.
        """
        words = self.words
        if words[_HEAD] == words[_TAIL] and not self.unexpected.get(tag):
            return None
        # Another thread takes a message off this ring, and may be at it for long: the caller has
        # other rings to look at, and asks again.
        if not self.receiving.acquire(blocking=False):
            return None
        kept = False
        try:
            while True:
                # First to its end: what is on the ring behind its header are its bytes, and no
                # header.
                if self._draining is not None:
                    other, message = self._draining
                    if not message.advance():
                        return None
                    self._draining = None
                    self.unexpected.setdefault(other, deque()).append(message)
                waiting = self.unexpected.get(tag)
                if waiting:
                    return waiting.popleft()
                header = self.announced()
                if header is None:
                    return None
                nbytes, found, address, segment, offset, slot = header
                if not (0 <= nbytes < _NO_LENGTH and 0 <= slot < _ACK_SLOTS):
                    self.refuse(f"the header {', '.join(map(str, header))}")
                message = _Arrived(self, nbytes, (address, segment, offset), slot)
                if found == tag:
                    kept = not message.complete
                    return message
                message.into(np.empty(0 if message.complete else nbytes, np.uint8))
                self._draining = (found, message)
        finally:
            if not kept:
                self.receiving.release()

    def _filled(self) -> int:
        """Return how many bytes the ring holds.

        Raises:
            BackendError: the peer has announced what is in no ring.
        """
        filled = self.words[_HEAD] - self.words[_TAIL]
        if not 0 <= filled <= self.capacity or filled % 8:
            self.refuse(f"{filled} bytes in a ring of {self.capacity}")
        return filled

    def refuse(self, what: str) -> NoReturn:
        """Break the communicator: of a ring that is damaged nothing more can be read.

        Raises:
            BackendError: always.
        """
        refuse(self._control, self._peer, what)


def refuse(control: Control, peer: int, what: str) -> NoReturn:
    """Break the communicator, as nothing more can be read of the messages with rank ``peer``.

    Raises:
        BackendError: always.
    """
    control.refuse_damaged(f"rank {peer}'s messages to rank {control.rank} are damaged: {what}")


class Sending:
    """A message on its way out; :meth:`advance` until it is ``over``.

    Args:
        ring: to the receiver.
        source: the bytes.
        tag: the message's.
        location: address, symmetric segment and offset of a long message that the receiver
            shall fetch; None for one that goes through the ring.
    """

    def __init__(
        self, ring: MessageRing, source: Array, tag: int, location: tuple[int, int, int] | None
    ) -> None:
        self._ring = ring
        self._source = source
        self._header = [source.size, tag, *(location or (0, 0, 0)), 0]
        self._remote = location is not None
        self._slot = -1
        self._started = self._announced = self.over = False

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether the source may be changed."""
        if self.over:
            return True
        ring, remote = self._ring, self._remote
        if not self._started:
            if not ring.sending.acquire(blocking=False):
                return False
            if remote and not ring.free_acks:
                ring.sending.release()
                return False
            self._started = True
            if remote:
                self._header[5] = self._slot = ring.free_acks.popleft()
                # Before the header is there: the acknowledgement of the message that had the slot
                # last stands in it still.
                ring.words[_ACKS + self._slot] = 0
        if not self._announced:
            if not ring.announce(self._header):
                return False
            self._announced = True
            if remote:
                # The receiver fetches its bytes, so that nothing more of it goes through the ring.
                # A message that streams keeps the lock: another's header would be read as its
                # bytes.
                ring.sending.release()
        if remote:
            if not ring.words[_ACKS + self._slot]:
                return False
            ring.free_acks.append(self._slot)
        else:
            while self._source.size:
                count = ring.write(self._source)
                if not count:
                    return False
                self._source = self._source[count:]
            ring.sending.release()
        self.over = True
        return True


class _Arrived:
    """A message whose header has been read."""

    def __init__(
        self, ring: MessageRing, nbytes: int, location: tuple[int, int, int], slot: int
    ) -> None:
        self.ring = ring
        self.nbytes = nbytes
        self.location = location
        self.slot = slot
        #: Whether nothing more of it comes through the ring.
        self.complete = bool(location[0]) or nbytes == 0
        self._heap: Array | None = None
        self._rest: Array | None = None

    def into(self, out: Array) -> None:
        """Name where the bytes go."""
        self._heap = self._rest = out

    def advance(self) -> bool:
        """Take what has come; return whether all of it has."""
        while not self.complete:
            assert self._rest is not None
            count = self.ring.read(self._rest)
            if not count:
                return False
            self._rest = self._rest[count:]
            self.complete = not self._rest.size
        return True

    def deliver(self, out: Array) -> None:
        """Hand a complete message over."""
        if self.location[0]:
            self.ring.fetch(self.ring.src, self.location, out)
            # The copy before the word at which its sender gets the memory back.
            fence()
            self.ring.words[_ACKS + self.slot] = 1
        elif self._heap is not None:
            out[:] = self._heap


class Receiving:
    """A message asked for, from one of ``rings``; :meth:`advance` until it is ``over``."""

    def __init__(self, rings: list[MessageRing], out: Array, tag: int) -> None:
        self._rings = rings
        self._out = out
        self._tag = tag
        self._message: _Arrived | None = None
        self._streaming = self.over = False
        self.source = -1
        #: Whether it was read from the sender's memory.
        self.fetched = False

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether the message is complete."""
        if self.over:
            return True
        if self._message is None:
            for ring in self._rings:
                message = ring.match(self._tag)
                if message is not None:
                    if message.nbytes != self._out.size:
                        ring.refuse(f"{message.nbytes} bytes in place of {self._out.size}")
                    self._message, self.source = message, ring.src
                    self._streaming = not message.complete
                    if self._streaming:
                        message.into(self._out)
                    break
            else:
                return False
        message = self._message
        assert message is not None
        if not message.advance():
            return False
        if self._streaming:
            message.ring.receiving.release()
        else:
            self.fetched = bool(message.location[0])
            message.deliver(self._out)
        self.over = True
        return True
