"""Sending and receiving for the algorithms: one tag, one deadline, and no empty messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.memory.buffer import Buffer

__all__ = ["COLLECTIVE_TAG", "GROUP_TAG", "Messages", "PointToPoint"]

# Negative tags belong to the package. Each one has a single purpose, because a transport may use
# other transports. Tag -2 is for groups over shm, and -3 for hierarchical. Tags -4, -5 and all from
# -16 down are for nccl.

#: The tag of the default algorithms' messages; a user's tags are 0 to 2**31 - 1.
COLLECTIVE_TAG = -1
#: The tag of the messages by which the members of a new group meet.
GROUP_TAG = -6


class PointToPoint(Protocol):
    """Part of a transport that the algorithms need, and that every transport has.

    Attributes:
        rank: this rank.
        size: number of ranks.
    """

    rank: int
    size: int

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> object:
        """Send a buffer."""

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> object:
        """Receive a buffer."""

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> object:
        """Send one buffer and receive another, at once."""


class Messages:
    """The messages of one collective call.

    A buffer without elements is not sent: both sides know its count.

    Attributes:
        rank: this rank.
        size: number of ranks.
    """

    __slots__ = ("_backend", "_deadline", "rank", "size")

    def __init__(self, backend: PointToPoint, deadline: Deadline) -> None:
        self._backend = backend
        self._deadline = deadline
        self.rank = backend.rank
        self.size = backend.size

    def send(self, src: Buffer, dst: int) -> None:
        """Send ``src`` to rank ``dst``."""
        if src.count:
            self._backend.send(src, dst, COLLECTIVE_TAG, self._deadline)

    def recv(self, dst: Buffer, src: int) -> None:
        """Receive ``dst`` from rank ``src``."""
        if dst.count:
            self._backend.recv(dst, src, COLLECTIVE_TAG, self._deadline)

    def exchange(self, src: Buffer, to: int, dst: Buffer, source: int) -> None:
        """Send ``src`` to rank ``to`` while receiving ``dst`` from rank ``source``."""
        if src.count and dst.count:
            self._backend.sendrecv(src, to, dst, source, COLLECTIVE_TAG, self._deadline)
        else:
            # One buffer is empty and needs no message. So this rank waits for at most one peer, and
            # the order of the two calls does not matter.
            self.send(src, to)
            self.recv(dst, source)
