"""Matching of messages to receivers by source and tag, in Python, for transports of byte streams.

A message is a prefix and its bytes, on a stream from one rank to another. A transport has a
*carrier* for each peer, which moves prefixes and bytes: through a ring in shared memory, or over a
connection, and an :class:`~.inbox.Inbox`, which reads them. This module decides which message a
receiver gets.

Every send and every receive is posted. A call that waits for its message posts it, and then moves
all that is in flight until the message is there. A message that leaves or arrives is an iterator,
whose steps do all that is possible without waiting.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective.contract.backend import ANY_SOURCE, Turns
from collective.contract.mail import CANCELLED, EAGER_BYTES, FAILED, MATCHED, PAYLOAD_TAG
from collective.contract.waits import MessageCall
from collective.native import NOBODY

from .flow import CONTROL_TAG, Flow, has_window
from .inbox import Array, Inbox, Transfer, bytes_of, framed, nothing, whole

if TYPE_CHECKING:
    from collective import native
    from collective.deadline import Deadline

#: Parts of an exchange; the sum of the unfinished parts is its state, as in C.
SENDING, RECEIVING = 1, 2
# Bytes of all copies of posted sends; the same number as in messages.h.
_COPIED_BYTES = 64 << 20


class _SelfPrefix(NamedTuple):
    """Beginning of a message of this rank to itself."""

    nbytes: int
    tag: int


class Matcher:
    """The messages of one rank over the carriers of its peers, by rank.

    Args:
        carriers: those of all peers.
        news: function that is called when other threads that wait should try again: a stream that
            they wanted is free, or a message may be theirs.
        rank: this rank, if it also posts messages to itself.

    Attributes:
        queues: posted sends that have not left yet, by rank, each with its steps and the number
            of bytes that it has copied.
        lock: lock of the lists of operations in flight; held for moments only.
    """

    def __init__(
        self,
        carriers: Mapping[int, Any],
        news: Callable[[], object] = lambda: None,
        rank: int = NOBODY,
    ) -> None:
        self._carriers = carriers
        self._news = news
        self._turns = Turns()
        self._inboxes = {rank: Inbox(self, rank, carrier) for rank, carrier in carriers.items()}
        if rank != NOBODY:
            self._inboxes[rank] = Inbox(self, rank, None)
        self.queues: dict[int, deque[tuple[Transfer, Generator[Any, None, None], int]]] = {}
        # Sends that wait for a grant, in nobody's way: by rank and number, with the same parts.
        self._announced: dict[int, dict[int, tuple[Transfer, Generator[Any, None, None], int]]] = {}
        self._flows: dict[int, Flow] = {
            rank: carrier.flow for rank, carrier in carriers.items() if hasattr(carrier, "flow")
        }
        self._rank = rank
        # Receives that wait, in posted order, and those whose message has come in part.
        self._waiting: list[Transfer] = []
        self._matched: list[Transfer] = []
        # Number of receives in flight that name a rank, or have matched it.
        self._wanted: Counter[int] = Counter()
        self._posts = self._copied = 0
        self._flushing: dict[int, bool] = {}
        self._ended: set[int] = set()
        self.lock = threading.RLock()

    # -- posted operations --------------------------------------------------------------

    def post_send(self, data: Any, to: int, tag: int) -> Transfer:
        """Post a send; see :class:`collective.contract.mail.Engine`."""
        content = np.empty(0, np.uint8) if data is None else bytes_of(data)
        nbytes = content.size
        copies = to == self._rank or (nbytes <= EAGER_BYTES and self._copied <= _COPIED_BYTES)
        if copies:
            content = content.copy()
        if to == self._rank:
            return self._send_to_self(content, tag)
        posted = self._enqueue(content, to, tag, copied=nbytes if copies else 0)
        self._flush(to)
        # A send that cannot leave has failed by now.
        if copies and not posted.done:
            posted.end()
        return posted

    def _send_to_self(self, content: Array, tag: int) -> Transfer:
        posted = Transfer(None, NOBODY, self._rank, tag)
        posted.nbytes = content.size
        posted.end()
        inbox = self._inboxes[self._rank]
        while not inbox.lock.take():
            time.sleep(0)
        inbox.deliver()
        inbox.put(_SelfPrefix(content.size, tag), content)
        if inbox.lock.leave() | inbox.have_moved():
            self._news()
        return posted

    def _enqueue(
        self, content: Array, to: int, tag: int, mark: int | None = None, copied: int = 0
    ) -> Transfer:
        """Append a message to the queue of a rank.

        Args:
            copied: bytes of the message that have been copied.
        """
        posted = Transfer(None, NOBODY, to, tag)
        posted.nbytes = content.size
        with self.lock:
            self._copied += copied
            steps = self._leaving(content, to, tag, () if mark is None else (mark,))
            self.queues.setdefault(to, deque()).append((posted, steps, copied))
        return posted

    def _leaving(
        self, content: Array, to: int, tag: int, marks: tuple[int, ...]
    ) -> Generator[object, None, None]:
        """Send a message; announce it first if it does not fit into the window.

        Yields:
            None while the stream takes no more; the number of an announced message that waits.
        """
        carrier, flow = self._carriers[to], self._flows.get(to)
        if flow is None:
            yield from whole(carrier, carrier.write(content, tag, *marks))
            return
        number = flow.begin(content.size) if has_window(tag) else 0
        if number:
            yield from framed(carrier, carrier.announce(content.size, tag, number))
            while not flow.granted(number):
                yield number
            tag, marks = CONTROL_TAG, (-number,)
        yield from framed(carrier, carrier.write(content, tag, *marks))

    def post_receive(self, memory: Any, source: int, tag: int, mask: int) -> Transfer:
        """Post a receive; see :class:`collective.contract.mail.Engine`."""
        posted = self._await(Transfer(memory, source, NOBODY, tag, mask))
        self.progress()
        return posted

    def _await(self, posted: Transfer) -> Transfer:
        """Append a receive to those that wait."""
        with self.lock:
            self._posts = posted.number = self._posts + 1
            self._waiting.append(posted)
            self._wanted[posted.source] += 1
        return posted

    def cancel(self, posted: Transfer) -> bool:
        """Withdraw a receive; return False if it has a message already."""
        with self.lock:
            if posted not in self._waiting:
                return False
            self._remove(self._waiting, posted)
            posted.end(CANCELLED)
        return True

    def find(self, source: int, tag: int, mask: int, take: bool) -> Transfer | None:
        """Look for a message; see :class:`collective.contract.mail.Engine`."""
        sources = self._inboxes if source == ANY_SOURCE else (source,)
        for rank in self._turns.of(sources, tag):
            inbox = self._inboxes[rank]
            if not inbox.lock.take():
                continue
            try:
                inbox.drain(lambda: True)
            except EOFError:
                pass  # what has come before the end may be looked for
            finally:
                message = inbox.find(tag, mask, take)
                inbox.lock.leave()
            if message is not None:
                if take:
                    self._turns.serve(sources, rank, tag)
                return message
        return None

    @property
    def busy(self) -> bool:
        """Whether operations are in flight."""
        return bool(self._waiting or self._matched or self.sends)

    @property
    def sends(self) -> bool:
        """Whether sends are in flight."""
        return any(self.queues.values()) or any(self._announced.values())

    def wants(self, rank: int) -> bool:
        """Return whether a receive in flight may get a message from a rank."""
        return self._wanted[rank] > 0 or self._wanted[ANY_SOURCE] > 0

    def awaited(self) -> dict[int, list[int]]:
        """Return the ranks whose streams the operations in flight wait for, as an Exchange."""
        return {
            SENDING: [rank for rank in self._carriers if self.queues.get(rank) or self._owes(rank)],
            RECEIVING: [rank for rank in self._carriers if self._reads(rank)],
        }

    def _reads(self, rank: int) -> bool:
        """Return whether something from a rank is waited for: a message, or room for one."""
        return self.wants(rank) or (rank in self._flows and self._sends_to(rank))

    def _sends_to(self, rank: int) -> bool:
        return bool(self.queues.get(rank) or self._announced.get(rank))

    def _owes(self, rank: int) -> bool:
        """Send the control frames that are due to a rank; return whether some are left."""
        return rank in self._flows and not self._flows[rank].tell_due()

    def progress(self) -> None:
        """Do all that is possible for the operations in flight without waiting."""
        for to in [to for to, queue in self.queues.items() if queue]:
            self._flush(to)
        # A receiver that cannot send as much may not read either.
        for to in [to for to in self._flows if self._sends_to(to)]:
            self._look_for_grants(to)
        for flow in self._flows.values():
            flow.tell_due()
        if not (self._waiting or self._matched):
            return
        for rank in self._sources():
            inbox = self._inboxes[rank]
            if not inbox.lock.take():
                continue
            try:
                inbox.drain(lambda rank=rank: self.wants(rank))  # type: ignore[misc]
            except EOFError as error:
                self.fail(rank, error)
            finally:
                if inbox.lock.leave() | inbox.have_moved():
                    self._news()

    def _look_for_grants(self, to: int) -> None:
        """Read what a rank sends, and put the sends that it grants into their queue."""
        try:
            self._read(to)
            with self.lock:
                sends = self._announced.get(to, {})
                for number in [n for n in sends if self._flows[to].has_granted(n)]:
                    self.queues.setdefault(to, deque()).append(sends.pop(number))
        except (EOFError, OSError) as error:
            self._drop(to, error)

    def _read(self, rank: int) -> None:
        """Read what a rank has sent, for receives or to be kept.

        Raises:
            EOFError: the stream has ended.
        """
        inbox = self._inboxes[rank]
        if not inbox.lock.take():
            return
        try:
            inbox.drain(lambda: True)
        finally:
            if inbox.lock.leave() | inbox.have_moved():
                self._news()

    def _sources(self) -> list[int]:
        """Return the ranks whose messages receives wait for; for a receive from any, in turns."""
        if not self._wanted[ANY_SOURCE]:
            return [rank for rank, count in list(self._wanted.items()) if count > 0]
        waiting = list(self._waiting)
        tag = next((posted.tag for posted in waiting if posted.source == ANY_SOURCE), 0)
        return self._turns.of(self._inboxes, tag)

    def _flush(self, to: int) -> bool:
        """Send what can be sent of a queue; return whether the queue is empty.

        If a send fails, all sends of the queue have its error, and nothing is raised here: whoever
        moves them need not be the one that waits for them.
        """
        queue = self.queues.get(to)
        while queue:
            if not self._begin_flushing(to):
                return not queue
            try:
                if not queue:
                    return True
                posted, steps, copied = queue[0]
                step = next(steps, steps)
                if step is None:
                    return False
                queue.popleft()
                if isinstance(step, int):
                    with self.lock:
                        self._announced.setdefault(to, {})[step] = posted, steps, copied
                    continue
            except BaseException as error:
                self._drop(to, error)
                if not isinstance(error, Exception):
                    raise
                return True
            finally:
                self._flushing[to] = False
            self._copied -= copied
            if not posted.done:
                posted.end()
            self._news()
        return True

    def _begin_flushing(self, to: int) -> bool:
        """Take a queue, so that no other thread does; return whether it was free."""
        with self.lock:
            # Its owner gives it back without the lock, so only who takes it may write here.
            if is_free := not self._flushing.get(to):
                self._flushing[to] = True
        return is_free

    def _drop(self, to: int, error: BaseException) -> None:
        """End all sends to a rank after an error."""
        for posted, steps, copied in [
            *self.queues.pop(to, ()),
            *self._announced.pop(to, {}).values(),
        ]:
            steps.close()
            self._copied -= copied
            if not posted.done:
                posted.end(FAILED, error)

    def fail(self, rank: int, error: BaseException) -> None:
        """End the receives that wait for a rank whose stream has ended, or for any if all have."""
        self._ended.add(rank)
        over = self._ended >= self._carriers.keys()
        for receives in (self._waiting, self._matched):
            for posted in list(receives):
                if posted.source == rank or (over and posted.source == ANY_SOURCE):
                    self._remove(receives, posted)
                    posted.source = rank
                    posted.end(FAILED, error)

    def close(self, error: BaseException) -> None:
        """End all operations in flight."""
        for to in {*self.queues, *self._announced}:
            self._drop(to, error)
        for rank in [*self._carriers, self._rank]:
            self.fail(rank, error)

    def match(self, rank: int, prefix: Any, last: int | None) -> Transfer | None:
        """Take the first receive for a message, or return None.

        Args:
            last: number of the last receive that may get it; None for any.
        """
        if not self._waiting:
            return None
        with self.lock:
            for posted in self._waiting:
                if last is not None and posted.number > last:
                    return None
                if prefix.tag & posted.mask == posted.tag and posted.source in (rank, ANY_SOURCE):
                    return self.take(posted, rank, prefix)
        return None

    def newer(self, number: int, rank: int) -> list[Transfer]:
        """Return the receives from a rank that were posted after the one with a number."""
        with self.lock:
            waiting = itertools.takewhile(lambda p: p.number > number, reversed(self._waiting))
            return [p for p in waiting if p.source in (rank, ANY_SOURCE)][::-1]

    def take(self, posted: Transfer, rank: int, prefix: Any) -> Transfer:
        """Take a receive that a message of a rank matches out of those that wait.

        Raises:
            BackendError: the message has another length than the receive expects.
        """
        with self.lock:
            self._remove(self._waiting, posted)
            if posted.source == ANY_SOURCE:
                self._turns.serve(self._inboxes, rank, posted.tag)
            posted.source, posted.state = rank, MATCHED
            self._matched.append(posted)
            self._wanted[rank] += 1
        if posted.exact and posted.accepts(prefix) and prefix.nbytes != posted.room:
            self._carriers[rank].refuse(f"{prefix.nbytes} bytes in place of {posted.room}")
        return posted

    def _remove(self, receives: list[Transfer], posted: Transfer) -> None:
        receives.remove(posted)
        self._wanted[posted.source] -= 1

    @property
    def posts(self) -> int:
        """Number of receives that have been posted."""
        return self._posts

    def give(self, posted: Transfer, prefix: Any, content: Array, placed: bool = False) -> None:
        """End a receive whose message is complete, and perhaps in its place already."""
        posted.tag, posted.nbytes, posted.prefix = prefix.tag, content.size, prefix
        if posted.memory is None:
            posted.data = content.data
        elif not placed and posted.accepts(prefix):
            room = posted.memory[: content.size]
            room[:] = content[: room.size]
        with self.lock:
            self._remove(self._matched, posted)
        posted.end()

    # -- exchanges ----------------------------------------------------------------------

    def exchange(
        self,
        src: Array | None,
        to: int,
        dst: Array | None,
        source: int,
        tag: int,
        mark: int | None = None,
    ) -> Exchange:
        """Return an exchange that sends, receives, or both; neither half waits for the other.

        Args:
            src, to: bytes to send (uint8), and their receiver; None and ``NOBODY`` to send nothing.
            dst, source: memory to receive into (uint8), and the rank that sends, or
                ``ANY_SOURCE``; None and ``NOBODY`` to receive nothing.
            tag: tag of both messages.
            mark: mark of both messages, for carriers whose prefixes have one. If a message with
                another mark comes, it is taken off the stream and dropped. If the mark is 0, any
                message is dropped.
        """
        sending = receiving = None
        if dst is not None:
            receiving = self._await(Transfer(dst, source, NOBODY, tag, mark=mark, exact=True))
        if src is not None:
            sending = self._enqueue(src, to, tag, mark)
        return Exchange(self, sending, receiving)

    def withdraw(self, posted: Transfer) -> None:
        """Take back an operation whose caller gives up.

        A stream on which a message stays incomplete is not used again: what would follow on it is
        no prefix.
        """
        if posted.to >= 0:
            while not self._begin_flushing(posted.to):
                time.sleep(0)
            try:
                queue = self.queues.get(posted.to, deque())
                for index, (each, steps, copied) in enumerate(queue):
                    if each is posted:
                        # As long as it is first in the queue, no other message follows.
                        never = (None for _ in itertools.repeat(None))
                        begun = inspect.getgeneratorstate(steps) != inspect.GEN_CREATED
                        steps.close()
                        queue[index] = posted, never if begun else nothing(), copied
                        posted.end(CANCELLED)
                sends = self._announced.get(posted.to, {})
                for number in [n for n, send in sends.items() if send[0] is posted]:
                    del sends[number]
                    self._carriers[posted.to].spoil()  # the peer may ask for bytes that are gone
                    posted.end(CANCELLED)
            finally:
                self._flushing[posted.to] = False
        elif not self.cancel(posted) and not posted.done:
            inbox = self._inboxes[posted.source]
            while not (inbox.over or inbox.lock.take()):
                time.sleep(0)
            if posted.done:
                inbox.lock.leave()
                return
            inbox.give_up()  # and the lock stays taken
            with self.lock:
                self._remove(self._matched, posted)
            posted.end(CANCELLED)


class Waiter:
    """A wait for posted operations.

    Args:
        engine: the messages of this rank.
        ready: tells whether the wait is over.
        pending: what is pending until then, :data:`SENDING` or :data:`RECEIVING`.

    Attributes:
        pending: the sum of the unfinished parts, as of the last step.
        awaited: by part, the ranks whose streams are waited for.
    """

    def __init__(self, engine: Matcher, ready: Callable[[], bool], pending: int) -> None:
        self._engine = engine
        self._ready = ready
        self.pending = pending
        self.awaited: dict[int, list[int]] = {}

    def advance(self, seconds: float = 0.0) -> int:
        """Do all that is possible without waiting; return the sum of the unfinished parts."""
        # Whoever waits moves all that is in flight.
        self._engine.progress()
        self.pending = self._left()
        self.awaited = self._engine.awaited() if self.pending else {}
        return self.pending

    def _left(self) -> int:
        return 0 if self._ready() else self.pending

    def give_up(self) -> None:
        """Do nothing: the operations stay in flight."""


class Exchange(Waiter):
    """A send, a receive, or both, of a caller that waits for them.

    Attributes:
        sender: rank that has sent the received message, or ``NOBODY``.
        prefix: prefix of the received message, or None.
    """

    def __init__(
        self, engine: Matcher, sending: Transfer | None, receiving: Transfer | None
    ) -> None:
        self._engine = engine
        self._items = sending, receiving
        self.pending = SENDING * (sending is not None) + RECEIVING * (receiving is not None)
        self.awaited = {}
        self.sender = NOBODY
        self.prefix: Any = None

    def _left(self) -> int:
        pending = 0
        for part, posted in zip((SENDING, RECEIVING), self._items):
            if posted is None:
                continue
            if posted.state == FAILED:
                assert posted.error is not None
                raise posted.error
            if not posted.done:
                pending += part
            elif part == RECEIVING:
                self.sender, self.prefix = posted.source, posted.prefix
        return pending

    def give_up(self) -> None:
        """End the exchange: its caller gets its memory back."""
        for posted in self._items:
            if posted is not None:
                self._engine.withdraw(posted)


def awaited(pending: int, to: int, source: int, peers: Iterable[int]) -> list[int]:
    """Return the ranks that have not done their part of an exchange; the others may have left.

    Args:
        pending: the sum of the unfinished parts.
        to, source: as in :meth:`Matcher.exchange`.
        peers: all other ranks.
    """
    ranks = {to} if pending & SENDING else set()
    if pending & RECEIVING:
        ranks.update(peers if source == ANY_SOURCE else (source,))
    return sorted(ranks - {NOBODY})


def exchange_in_c(
    exchange: native.Exchange, x: Array | None, to: int, out: Array | None, source: int, tag: int,
    deadline: Deadline, refuse_broken: Callable[[], object],
) -> int:  # fmt: skip
    """Send, receive, or both, by the core; the receivers must know the lengths.

    Args:
        exchange: function of :func:`collective.native.messages` or of ``native.streams``.
        x, to, out, source, tag: as in :meth:`Matcher.exchange`.
        deadline: deadline of the call.
        refuse_broken: function that raises if the communicator is broken or closed.

    Returns:
        The rank that has sent the received message, or ``NOBODY``.
    """
    done = exchange(x, to, out, source, tag, deadline, False)
    if done is NotImplemented:
        refuse_broken()
        # The class of an array may be unknown to C, such as np.memmap. A plain view may do.
        x, out = (None if each is None else each.view(np.uint8, np.ndarray) for each in (x, out))
        done = exchange(x, to, out, source, tag, deadline, False)
        if done is NotImplemented:
            refuse_broken()
            raise TypeError(f"{type(x)}, {type(out)}: C cannot access the memory of an array")
    return int(done)


def describe(to: int, source: int, tag: int) -> MessageCall:
    """Return an exchange in the form for error texts, such as ``recv(tag=0)``."""
    tag = tag if tag < 0 else tag % PAYLOAD_TAG  # as the program knows it
    operation = "send" * (to != NOBODY) + "recv" * (source != NOBODY)
    ends = (None if rank == NOBODY else rank for rank in (to, source))
    return MessageCall(operation, tag, *ends)
