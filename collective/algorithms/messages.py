"""Everything that an algorithm does: messages with one tag and one deadline, copies and folds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from collective.errors import RankError
from collective.memory.buffer import Buffer

from . import pieces
from .folds import Folding

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp

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
    """The messages of one collective call, and all else that an algorithm does to memory.

    The algorithms touch memory only through this object and the folding that it makes. So the same
    algorithm can also be recorded (:mod:`~collective.algorithms.schedules`).

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

    def copy(self, src: Buffer, dst: Buffer) -> None:
        """Copy ``src`` to ``dst``, which may be the same memory."""
        pieces.copy(src, dst)

    def room(self, count: int, dtype: DType) -> Buffer:
        """Return scratch memory for ``count`` elements."""
        return Buffer.empty(count, dtype)

    def folding(self, op: ReduceOp, dtype: DType, size: int) -> Folding:
        """Return the arithmetic of a reduction of ``size`` ranks' inputs."""
        return Folding(op, dtype, size)


# -- both at once, over a send that may wait for its receiver --------------------------------------


def sendrecv(
    backend: PointToPoint,
    src: Buffer,
    to: int,
    dst: Buffer,
    source: int,
    tag: int,
    deadline: Deadline,
) -> None:
    """Send ``src`` to rank ``to`` and receive ``dst`` from rank ``source``.

    The call does not deadlock. The peers may match it with their own sendrecv, or with a send and a
    recv in either order. With a user's tag, the send runs in a thread of its own, which costs some
    50 µs. The algorithms need no thread, since there every peer is in a sendrecv, too: they send
    and receive one after the other, in an order that cannot stall. If the transport's send does not
    wait for the receiver, this takes the time of one message. If the send does wait, this takes the
    time of two messages in pairs and even rings, and of three in odd rings.

    Raises:
        RankError: only one of ``to`` and ``source`` is this rank.
    """
    if backend.rank in (to, source):
        if to != source:
            raise RankError(
                f"sendrecv: to rank {to}, from rank {source}; if one of the two is this rank, "
                f"both must be [rank {backend.rank} of {backend.size}]."
            )
        pieces.copy(src, dst)
    elif tag == COLLECTIVE_TAG:
        _in_turn(backend, src, to, dst, source, deadline)
    else:
        _at_once(backend, src, to, dst, source, tag, deadline)


def _in_turn(
    backend: PointToPoint, src: Buffer, to: int, dst: Buffer, source: int, deadline: Deadline
) -> None:
    """Send first or receive first, such that the ranks of a circle do not all do the same.

    Order the ranks by their bits read backwards. A rank sends first if the receiver comes after it
    in this order, and receives first if not. Every circle of ranks has a first and a last rank in
    this order, and these two act differently, so the circle never stalls. The algorithms use shifts
    (to rank + d, from rank - d). There neighbours differ in the lowest bit of d, so they alternate,
    and a message waits for at most two others.
    """
    differ = backend.rank ^ to
    if backend.rank & differ & -differ:
        backend.recv(dst, source, COLLECTIVE_TAG, deadline)
        backend.send(src, to, COLLECTIVE_TAG, deadline)
    else:
        backend.send(src, to, COLLECTIVE_TAG, deadline)
        backend.recv(dst, source, COLLECTIVE_TAG, deadline)


def _at_once(
    backend: PointToPoint,
    src: Buffer,
    to: int,
    dst: Buffer,
    source: int,
    tag: int,
    deadline: Deadline,
) -> None:
    failures: list[BaseException] = []

    def send() -> None:
        try:
            backend.send(src, to, tag, deadline)
        except BaseException as error:  # re-raised below, in the caller's thread
            failures.append(error)

    sender = threading.Thread(target=send, name="collective-sendrecv", daemon=True)
    sender.start()
    # If this raises, the transport is broken, and the send in the other thread ends by itself.
    backend.recv(dst, source, tag, deadline)
    sender.join()
    if failures:
        raise failures[0]
