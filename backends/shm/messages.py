"""Messages in Python over the rings, for ranks of which not all have the native core.

A message is a header and its bytes. Where it may, a receiver reads a long message in the sender's
memory. Then the ring holds nothing but the header, which leaves the ring when the receiver has
all bytes. The sender waits for that before it gives the memory back.

A message whose tag nobody asks for yet must not block those behind it. So each receiver takes
all messages off the ring up to its own, and keeps the others for whoever asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator

import numpy as np

from collective.contract.backend import ANY_SOURCE
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.native import NOBODY

from .control import Control, fence
from .memory import PeerMemory, address_of
from .ring import Array, Header, Ring, refuse

__all__ = ["RingMessages", "describe", "wait_for_message"]

#: Parts of an exchange that are not over, to be added up; as in ``messages.h``.
SENDING, RECEIVING = 1, 2
# No message is as long: the header that says so is damaged.
_NO_LENGTH = 1 << 47


class RingMessages:
    """The messages of one rank: a function that sends, receives, or does both.

    A message under way is an iterator. Each of its steps does what can be done at once, and yields
    where the message has to wait for the peer.

    Args:
        control, peers: of the rank.
        single_copy: whether all ranks can read each other's memory.
    """

    def __init__(self, control: Control, peers: PeerMemory, single_copy: bool) -> None:
        rank = control.rank
        others = [peer for peer in range(control.size) if peer != rank]
        self._control = control
        self._single_copy = single_copy
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
        """Send, receive, or both, neither waiting for the other; return who sent.

        Args:
            src, to: what is sent to whom; None and ``NOBODY`` if nothing is.
            dst, source: what is received from whom, likewise.
            tag, deadline: as of :meth:`Backend.send`.
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
        # From its header to its end a message has the ring to itself.
        while not ring.lock.acquire(blocking=False):
            yield
        yield from ring.put(Header(content.size, tag, address))
        if address:
            while ring.filled():
                yield
        else:
            yield from ring.write(content)
        ring.lock.release()

    def _receive(self, out: Array, source: int, tag: int) -> Generator[None, None, int]:
        """Receive a message; return who sent it."""
        inboxes = self._incoming.values() if source == ANY_SOURCE else (self._incoming[source],)
        while True:
            for inbox in inboxes:
                # Another thread may be in the middle of a message from this rank, and for long.
                # Meanwhile another rank may have sent.
                if not inbox.ring.lock.acquire(blocking=False):
                    continue
                message = inbox.receive(tag, out)
                if message is not None:
                    yield from message
                inbox.ring.lock.release()
                if message is not None:
                    return inbox.ring.peer
            yield


class _Inbox:
    """Messages from one rank: those in the ring, and those taken off it that nobody has asked for.

    Its methods need the ring's lock.
    """

    def __init__(self, control: Control, peers: PeerMemory, ring: Ring) -> None:
        self.ring = ring
        self._control = control
        self._peers = peers
        self._kept: dict[int, deque[Array]] = {}  # by tag
        self._keeping: Iterator[None] = iter(())  # takes a message of which a part has come

    def receive(self, tag: int, out: Array) -> Iterator[None] | None:
        """Find the next message with a tag.

        Returns:
            Steps that take the message to ``out``; the caller holds the lock until they are over.
            None if there is no such message yet.

        Raises:
            BackendError: what is in the ring is no message, or the message has another length.
        """
        # Behind a header are the message's bytes. The next header can be read at their end.
        while _is_over(self._keeping):
            if kept := self._kept.get(tag):
                content = kept.popleft()
                self._check_length(content.size, out)
                out[:] = content
                return iter(())
            header = self.ring.header()
            if header is None:
                return None
            if not 0 <= header.nbytes < _NO_LENGTH:
                refuse(self._control, self.ring.peer, f"the header {tuple(header)}")
            if header.tag == tag:
                self._check_length(header.nbytes, out)
                return self._take(header, out)
            self._keeping = self._keep(header)
        return None

    def _check_length(self, nbytes: int, out: Array) -> None:
        if nbytes != out.size:
            refuse(self._control, self.ring.peer, f"{nbytes} bytes in place of {out.size}")

    def _take(self, header: Header, out: Array) -> Iterator[None]:
        if not header.address:
            self.ring.drop_header()
            yield from self.ring.read(out)
            return
        self._peers.fetch(self.ring.peer, header.address, out)
        # The sender leaves its memory alone until the header is gone, or until it gives up. In the
        # second case it has broken the communicator before it changed anything.
        fence()
        self._control.refuse_broken(f"recv(tag={header.tag})")
        self.ring.drop_header()

    def _keep(self, header: Header) -> Iterator[None]:
        content = np.empty(header.nbytes, np.uint8)
        yield from self._take(header, content)
        self._kept.setdefault(header.tag, deque()).append(content)


def _is_over(steps: Iterator[None]) -> bool:
    """Do what can be done at once; return whether that was the last of it."""
    return next(steps, steps) is steps


# -- in Python and in C -------------------------------------------------------------------------


def describe(to: int, source: int, tag: int) -> str:
    """Return an exchange as errors name it."""
    return f"{'send' * (to != NOBODY)}{'recv' * (source != NOBODY)}(tag={tag})"


def wait_for_message(
    control: Control, advance: Callable[[], int], to: int, source: int, tag: int, deadline: Deadline
) -> None:
    """Wait until ``advance``, which returns what is still to be done, returns 0."""
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
        # A peer that has done its part may have left.
        return sorted({*[to] * (pending & SENDING), *(sources if pending & RECEIVING else [])})

    what = describe(to, source, tag)
    control.wait(ready, awaited, what, deadline, all_needed=source != ANY_SOURCE)
