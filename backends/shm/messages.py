"""Messages in Python over the rings, for communicators in which some rank lacks the native core.

A message is a prefix and its bytes. If it may, the receiver reads a long message directly in the
sender's memory. Then the ring holds only the prefix. The receiver takes the prefix off the ring
when it has all bytes. The sender waits for that before it returns the memory to its caller.

A message whose tag no receiver has asked for yet must not block the messages behind it. So each
receiver takes all messages off the ring up to its own, and keeps them for later receivers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator

import numpy as np

from collective.contract.backend import ANY_SOURCE, Turns
from collective.contract.waits import MessageCall
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.native import NOBODY

from .control import Control
from .memory import PeerMemory, address_of
from .ring import Array, Prefix, Ring, refuse

__all__ = ["RingMessages", "describe", "wait_for_message"]

#: Parts of an exchange; the sum of the unfinished parts is its state, as in ``messages.h``.
SENDING, RECEIVING = 1, 2
# No message is as long as this. A greater length is a sign of damage.
_NO_LENGTH = 1 << 47


class RingMessages:
    """Messages of one rank: a function that sends, receives, or does both.

    A message in flight is an iterator. Each step does all that is possible without waiting, and
    yields if the message must wait for the peer.

    Args:
        control, peers: those of this rank.
        single_copy: whether all ranks can read each other's memory.
    """

    def __init__(self, control: Control, peers: PeerMemory, single_copy: bool) -> None:
        rank = control.rank
        others = [peer for peer in range(control.size) if peer != rank]
        self._control = control
        self._single_copy = single_copy
        self._turns = Turns()
        self._outgoing = {peer: Ring(control, rank, peer) for peer in others}
        self._incoming = {
            peer: _Inbox(control, peers, Ring(control, peer, rank)) for peer in others
        }

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
        sender = NOBODY

        def receive(out: Array) -> Iterator[None]:
            nonlocal sender
            sender = yield from self._receive(out, source, tag)

        steps: dict[int, Iterator[None]] = {}
        if src is not None:
            steps[SENDING] = self._send(src.array.view(np.uint8), to, tag)
        if dst is not None:
            steps[RECEIVING] = receive(dst.array.view(np.uint8))

        def advance() -> int:
            return sum(part for part, iterator in steps.items() if not _is_over(iterator))

        if advance():
            wait_for_message(self._control, advance, to, source, tag, deadline)
        return sender

    def _send(self, content: Array, to: int, tag: int) -> Iterator[None]:
        ring = self._outgoing[to]
        is_long = content.size > ring.capacity // 2
        address = address_of(content) if is_long and self._single_copy else 0
        # A message owns the ring from its prefix to its end.
        while not ring.lock.acquire(blocking=False):
            yield
        yield from ring.put(Prefix(content.size, tag, address))
        if address:
            while ring.filled():
                yield
        else:
            yield from ring.write(content)
        ring.lock.release()

    def _receive(self, out: Array, source: int, tag: int) -> Generator[None, None, int]:
        """Receive a message; return the sender's rank."""
        sources = self._incoming if source == ANY_SOURCE else (source,)
        while True:
            for rank in self._turns.of(sources, tag):
                inbox = self._incoming[rank]
                # Another thread may be receiving a message from this rank, for a long time.
                # Meanwhile another rank may have sent one, so do not wait for the lock.
                if not inbox.ring.lock.acquire(blocking=False):
                    continue
                message = inbox.receive(tag, out)
                if message is not None:
                    self._turns.serve(sources, rank, tag)
                    yield from message
                inbox.ring.lock.release()
                if message is not None:
                    return rank
            yield


class _Inbox:
    """Messages from one rank: those in the ring, and those kept until a receiver asks for them.

    A caller of its methods must hold the ring's lock.
    """

    def __init__(self, control: Control, peers: PeerMemory, ring: Ring) -> None:
        self.ring = ring
        self._control = control
        self._peers = peers
        self._kept: dict[int, deque[Array]] = {}  # by tag
        self._keeping: Iterator[None] = iter(())  # keeps a message that has arrived only in part

    def receive(self, tag: int, out: Array) -> Iterator[None] | None:
        """Find the next message with a tag.

        Returns:
            Iterator that moves the message to ``out``; the caller holds the lock until its end.
            None if there is no such message yet.

        Raises:
            BackendError: the data in the ring is no message, or the message has another length.
        """
        # The message's bytes follow its prefix. The next prefix comes after these bytes.
        while _is_over(self._keeping):
            if kept := self._kept.get(tag):
                content = kept.popleft()
                self._check_length(content.size, out)
                out[:] = content
                return iter(())
            prefix = self.ring.prefix()
            if prefix is None:
                return None
            if not 0 <= prefix.nbytes < _NO_LENGTH:
                refuse(self._control, self.ring.peer, f"the header {tuple(prefix)} is not valid")
            if prefix.tag == tag:
                self._check_length(prefix.nbytes, out)
                return self._take(prefix, out)
            self._keeping = self._keep(prefix)
        return None

    def _check_length(self, nbytes: int, out: Array) -> None:
        if nbytes != out.size:
            refuse(self._control, self.ring.peer, f"{nbytes} bytes in place of {out.size}")

    def _take(self, prefix: Prefix, out: Array) -> Iterator[None]:
        if not prefix.address:
            self.ring.drop_prefix()
            yield from self.ring.read(out)
            return
        self._peers.fetch(self.ring.peer, prefix.address, out)
        # The sender does not change the memory until the prefix is gone, or until it gives up. In
        # the second case it breaks the communicator before it changes anything. So if the
        # communicator is not broken now, the copy is valid.
        self._control.refuse_broken(f"recv(tag={prefix.tag})")
        self.ring.drop_prefix()

    def _keep(self, prefix: Prefix) -> Iterator[None]:
        content = np.empty(prefix.nbytes, np.uint8)
        yield from self._take(prefix, content)
        self._kept.setdefault(prefix.tag, deque()).append(content)


def _is_over(steps: Iterator[None]) -> bool:
    """Do all that is possible without waiting; return whether the iterator has ended."""
    return next(steps, steps) is steps


# -- for messages in Python and in C ------------------------------------------------------------


def describe(to: int, source: int, tag: int) -> MessageCall:
    """Return an exchange in the form for error texts, such as ``recv(tag=0)``."""
    operation = "send" * (to != NOBODY) + "recv" * (source != NOBODY)
    ends = (None if rank == NOBODY else rank for rank in (to, source))
    return MessageCall(operation, tag, *ends)


def wait_for_message(
    control: Control, advance: Callable[[], int], to: int, source: int, tag: int, deadline: Deadline
) -> None:
    """Wait until ``advance()``, which returns the sum of the unfinished parts, returns 0."""
    pending = SENDING | RECEIVING
    sources = [
        rank
        for rank in range(control.size)
        if rank != control.rank and source in (ANY_SOURCE, rank)
    ]

    def ready() -> bool:
        nonlocal pending
        pending = advance()
        return not pending

    def awaited() -> list[int]:
        # A peer that has done its part may have left, so await only the peers that have not.
        return sorted({*[to] * (pending & SENDING), *(sources if pending & RECEIVING else [])})

    what = describe(to, source, tag)
    control.wait(ready, awaited, what, deadline, all_needed=source != ANY_SOURCE)
