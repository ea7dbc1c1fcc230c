"""How the algorithms send and receive: one tag, one deadline, nothing for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.memory.buffer import Buffer

__all__ = ["COLLECTIVE_TAG", "GROUP_TAG", "Messages", "PointToPoint"]

# Tags below 0 are the package's own, and one is used for one purpose only, as transports are made
# of others: -2 is of groups over shm, -3 of hierarchical, -4, -5 and all from -16 down of nccl.

#: The tag of the default algorithms' messages; a user's tags are 0 to 2**31 - 1.
COLLECTIVE_TAG = -1
#: The tag by which the members of a new group meet.
GROUP_TAG = -6


class PointToPoint(Protocol):
    """What the algorithms stand on: the part of a transport that every one has.

    Attributes:
        rank: this rank.
        size: how many ranks there are.
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
        """Send one and receive one, at once."""


class Messages:
    """The messages of one collective call.

    What has no elements is not sent: both sides know the counts.

    Attributes:
        rank: this rank.
        size: how many ranks there are.
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
            # One of them is nothing, which neither side sends: nobody waits for two.
            self.send(src, to)
            self.recv(dst, source)
