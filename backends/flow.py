"""Flow control of messages over streams, in Python; ``collective/native/flow.c`` says how it works.

What a rank keeps of a peer's messages, because nobody has asked for them yet, has a bound in bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from collective.contract.backend import COLLECTIVE_TAG

if TYPE_CHECKING:
    from collective.backends.inbox import Prefix, StreamLock, Transfer

# The same numbers as in messages.h and flow.c.
#: Tag of control frames, below every valid tag.
CONTROL_TAG = -(1 << 63)
#: Bytes of a peer's messages that a rank keeps, besides those of the running collective call.
WINDOW_BYTES = 4 << 20
_OVERHEAD = 64
_CREDIT, _GRANT = 1, 2


class _FlowCarrier(Protocol):
    """The part of a carrier that flow control needs."""

    sending: StreamLock

    @property
    def is_due(self) -> bool:
        """Whether control frames have not left."""

    def write_due(self, flow: Flow) -> Iterator[None]:
        """Send the control frames that are due; yield while the socket takes no more."""


def has_window(tag: int) -> bool:
    """Return whether messages of this tag need room in the window."""
    return tag != COLLECTIVE_TAG


class Flow:
    """Flow control between this rank and one peer.

    Attributes:
        due: control frames that have not left, as triples of numbers.
        asked: posted receives whose announced messages are on their way, with their prefixes, by
            number.
    """

    def __init__(self, stream: _FlowCarrier) -> None:
        self.due: list[tuple[int, int, int]] = []
        self.asked: dict[int, tuple[Transfer, Any]] = {}
        self._stream = stream
        self._lock = threading.Lock()
        self._sent = self._freed = self._last = 0
        self._announced: set[int] = set()
        self._granted: set[int] = set()

    # -- messages to the peer -------------------------------------------------------------

    def is_full(self, nbytes: int) -> bool:
        """Return whether a message of ``nbytes`` would exceed the window."""
        return self._sent + nbytes + _OVERHEAD > WINDOW_BYTES

    def begin(self, nbytes: int) -> int:
        """Take room for a message; return 0, or the number under which it must be announced."""
        with self._lock:
            if not self.is_full(nbytes):
                self._sent += nbytes + _OVERHEAD
                return 0
            self._last += 1
            self._announced.add(self._last)
            return self._last

    def granted(self, number: int) -> bool:
        """Take the grant of an announced message; return whether there was one."""
        if number not in self._granted:
            return False
        with self._lock:
            self._granted.discard(number)
            self._announced.discard(number)
        return True

    def has_granted(self, number: int) -> bool:
        """Return whether the peer has granted an announced message that still waits."""
        return number in self._granted

    # -- messages from the peer -----------------------------------------------------------

    def note(self, prefix: Any) -> str | None:
        """Note a credit or a grant; return what is wrong with it, or None."""
        with self._lock:
            if prefix.mark == _CREDIT and prefix.nbytes <= self._sent:
                self._sent -= prefix.nbytes
            elif prefix.mark == _GRANT and prefix.nbytes in self._announced - self._granted:
                self._granted.add(prefix.nbytes)
            else:
                return f"the control frame {tuple(prefix)} is not valid"
        return None

    def free(self, prefix: Prefix) -> None:
        """Note that a receive has taken a message; return credits for half a window at a time."""
        if not has_window(prefix.tag):
            return
        with self._lock:
            self._freed += prefix.nbytes + _OVERHEAD
            if self._freed < WINDOW_BYTES // 2:
                return
            freed, self._freed = self._freed, 0
        self._tell(freed, _CREDIT)

    def grant(self, number: int) -> None:
        """Have the peer send the bytes of an announced message."""
        self._tell(number, _GRANT)

    def _tell(self, value: int, meaning: int) -> None:
        self.due.append((value, CONTROL_TAG, meaning))
        self.tell_due()

    def tell_due(self) -> bool:
        """Send the control frames that are due; return whether all have left."""
        if self._stream.is_due and self._stream.sending.take():
            # What the socket does not take now leaves before the next message.
            for _ in self._stream.write_due(self):
                break
            self._stream.sending.leave()
        return not self._stream.is_due
