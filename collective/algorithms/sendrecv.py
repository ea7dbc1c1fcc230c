"""Sending and receiving at once, over a send that may wait for its receiver."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from collective.errors import RankError

from . import pieces
from .messages import COLLECTIVE_TAG, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.memory.buffer import Buffer

__all__ = ["sendrecv"]


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
