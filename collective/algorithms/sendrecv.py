"""Send and receive at once, over a send that may wait for its receiver."""

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

    Whatever the peers match it with, their own sendrecv or a send and a recv in either
    order, it does not deadlock. With a user's tag the send runs in a thread of its own,
    which costs some 50 µs. The algorithms, where every peer is in a sendrecv too, take
    turns instead: one message's time where the transport's send does not wait for the
    receiver; where it does, two in pairs and even rings, three in odd ones.

    Raises:
        RankError: one of ``to`` and ``source`` is this rank and the other is not.
    """
    if backend.rank in (to, source):
        if to != source:
            raise RankError(
                f"sendrecv: to rank {to}, from rank {source}; a rank exchanges with itself on "
                f"both sides or on neither [rank {backend.rank} of {backend.size}]."
            )
        pieces.copy(src, dst)
    elif tag == COLLECTIVE_TAG:
        _in_turn(backend, src, to, dst, source, deadline)
    else:
        _at_once(backend, src, to, dst, source, tag, deadline)


def _in_turn(
    backend: PointToPoint, src: Buffer, to: int, dst: Buffer, source: int, deadline: Deadline
) -> None:
    """Send first or receive first, so that no circle of ranks does the same.

    In the order of their bits read backwards, a rank sends first to a rank after it. A
    circle has a first and a last rank, which differ, so it never stalls; and along the
    shifts that algorithms use (to rank + d, from rank - d) neighbours differ in the
    lowest bit of d, so they alternate and a message waits for two others at most.
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
        except BaseException as error:  # raised below, in the caller's thread
            failures.append(error)

    sender = threading.Thread(target=send, name="collective-sendrecv", daemon=True)
    sender.start()
    # Where this raises the transport is broken, and the send ends by itself.
    backend.recv(dst, source, tag, deadline)
    sender.join()
    if failures:
        raise failures[0]
