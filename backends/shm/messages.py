"""Messages in Python over the rings, for communicators in which some rank lacks the native core.

A message is a prefix and its bytes. If it may, the receiver reads a long message directly in the
sender's memory. Then the ring holds only the prefix. The receiver takes the prefix off the ring
when it has all bytes. The sender waits for that before it returns the memory to its caller.
:mod:`collective.backends.matching` decides which receiver gets a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np

from collective.backends.inbox import Array, StreamLock
from collective.backends.mail import PythonMail
from collective.backends.matching import RECEIVING, SENDING, Matcher, Waiter, awaited, describe
from collective.contract.backend import ANY_SOURCE
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.native import NOBODY

from .control import BROKEN, Control, address_of
from .ring import Ring, RingPrefix, refuse

__all__ = ["RingMessages", "describe", "mail_of", "receive_alone", "wait_for_message"]


class RingMessages:
    """Messages of one rank: a function that sends, receives, or does both.

    Args:
        control: that of this rank.
        single_copy: whether all ranks can read each other's memory.

    Attributes:
        engine: the messages in flight.
        carriers: the rings to and from each other rank.
    """

    def __init__(self, control: Control, single_copy: bool) -> None:
        others = [rank for rank in range(control.size) if rank != control.rank]
        self._control = control
        self.carriers = {rank: RingPair(control, rank, single_copy) for rank in others}
        self.engine = Matcher(self.carriers, rank=control.rank)

    def __call__(
        self,
        src: Buffer | None,
        to: int,
        dst: Buffer | None,
        source: int,
        tag: int,
        deadline: Deadline,
    ) -> int:
        """Send, receive, or both; neither half waits for the other. Return the sender's rank.

        Args:
            src, to: array to send, and its receiver; None and ``NOBODY`` to send nothing.
            dst, source: array to receive into, and the rank that sends; None and ``NOBODY`` to
                receive nothing.
            tag, deadline: as in :meth:`Backend.send`.
        """
        self._control.refuse_broken(describe(to, source, tag))
        x, out = (None if each is None else each.array.view(np.uint8) for each in (src, dst))
        exchange = self.engine.exchange(x, to, out, source, tag)
        try:
            if exchange.advance():
                wait_for_message(self._control, exchange.advance, to, source, tag, deadline)
        except BaseException:
            exchange.give_up()
            raise
        return exchange.sender


def mail_of(control: Control, engine: Matcher) -> PythonMail:
    """Return the posted messages of a rank over ``engine``."""

    def wait(waiter: Waiter, to: int, source: int, tag: int, deadline: Deadline) -> None:
        wait_for_message(control, waiter.advance, to, source, tag, deadline)

    return PythonMail(
        engine, wait, control.refuse_broken, lambda: control.words[BROKEN], lambda each: each.error
    )


class RingPair:
    """The rings to and from one rank, as a :class:`~collective.backends.inbox.Carrier`.

    Attributes:
        outgoing, incoming: the rings.
    """

    def __init__(self, control: Control, rank: int, single_copy: bool) -> None:
        self.outgoing = Ring(control, control.rank, rank)
        self.incoming = Ring(control, rank, control.rank)
        self.receiving = StreamLock()
        self._control = control
        self._single_copy = single_copy
        self._rank = rank

    def write(self, content: Array, tag: int) -> Iterator[None]:
        """Send a message; yield while there is no room, or while the receiver still reads it."""
        ring = self.outgoing
        is_long = content.size > ring.capacity // 2
        address = address_of(content) if is_long and self._single_copy else 0
        yield from ring.put(RingPrefix(content.size, tag, address))
        if address:
            while ring.filled():
                yield
        else:
            yield from ring.write(content)

    def prefix(self) -> RingPrefix | None:
        """Return the next prefix and leave it in the ring; None if there is no prefix yet."""
        return self.incoming.prefix()

    def read(self, prefix: RingPrefix, out: Array) -> Iterator[None]:
        """Take a message off the ring, or out of its sender's memory."""
        if not prefix.address:
            self.incoming.drop_prefix()
            yield from self.incoming.read(out)
            return
        self._control.fetch(self._rank, prefix.address, out)
        # The sender does not change the memory until the prefix is gone, or until it gives up. In
        # the second case it breaks the communicator before it changes anything. So if the
        # communicator is not broken now, the copy is valid.
        self._control.refuse_broken(f"recv(tag={prefix.tag})")
        self.incoming.drop_prefix()

    def spoil(self) -> None:
        """Do nothing: the lock of the ring stays held."""

    def refuse(self, what: str) -> NoReturn:
        """Break the communicator, since this rank's messages from the peer are damaged."""
        refuse(self._control, self._rank, what)


# -- for messages in Python and in C ------------------------------------------------------------


def receive_alone(
    control: Control, src: None, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
) -> int:
    """Wait for a message from any source, which the only rank of a communicator never gets."""
    wait_for_message(control, lambda: RECEIVING, to, source, tag, deadline)
    return NOBODY


def wait_for_message(
    control: Control, advance: Callable[[], int], to: int, source: int, tag: int, deadline: Deadline
) -> None:
    """Wait until ``advance()``, which returns the sum of the unfinished parts, returns 0."""
    pending = SENDING | RECEIVING
    peers = [rank for rank in range(control.size) if rank != control.rank]

    def ready() -> bool:
        nonlocal pending
        pending = advance()
        return not pending

    control.wait(
        ready, lambda: awaited(pending, to, source, peers), describe(to, source, tag), deadline,
        all_needed=source != ANY_SOURCE,
    )  # fmt: skip
