"""Matching of messages to receivers by source and tag, in Python, for transports of byte streams.

A message is a prefix and its bytes, on a stream from one rank to another. A transport has a
*carrier* for each peer, which moves prefixes and bytes: through a ring in shared memory, or over a
connection. This module decides which message a receiver gets.

A message whose tag no receiver has asked for yet must not block the messages behind it. So each
receiver takes all messages off the stream up to its own, and keeps them for later receivers. Nobody
takes messages off a stream in which no receiver waits, so a sender that is too fast has to wait.
Over connections :mod:`.flow` bounds what is kept.

A message in flight is an iterator. Each step does all that is possible without waiting. If the
message must wait, the step yields the ranks whose streams it waits for. The sequence is empty if it
waits for another thread of this rank, which is in the middle of a message on the same stream.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np

from collective.contract.backend import ANY_SOURCE, Turns
from collective.contract.mail import (
    CANCELLED,
    EAGER_BYTES,
    FAILED,
    MATCHED,
    OVER,
    PAYLOAD_TAG,
    PENDING,
)
from collective.contract.waits import MessageCall
from collective.native import NOBODY

from .flow import CONTROL_TAG, Flow, Granting, has_window

if TYPE_CHECKING:
    from collective import native
    from collective.deadline import Deadline

__all__ = [
    "RECEIVING", "SENDING", "Array", "Carrier", "Engine", "Exchange", "Posted", "Prefix",
    "StreamLock", "Waiter", "awaited", "bytes_of", "describe", "exchange_in_c",
]  # fmt: skip

Array = np.ndarray[Any, Any]

#: Parts of an exchange; the sum of the unfinished parts is its state, as in C.
SENDING, RECEIVING = 1, 2
# No message is as long as this. A greater length is a sign of damage.
_NO_LENGTH = 1 << 47
# Bytes of all copies of posted sends; the same number as in messages.h.
_COPIED_BYTES = 64 << 20
_NOTHING = np.empty(0, np.uint8)


class Prefix(Protocol):
    """Beginning of a message.

    Attributes:
        nbytes: length of the message, without the prefix.
        tag: tag of the message.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def tag(self) -> int: ...


class _Prefix(NamedTuple):
    """Beginning of a message of this rank to itself."""

    nbytes: int
    tag: int


def bytes_of(memory: Any) -> Array:
    """Return a contiguous buffer as an array of bytes."""
    view = memoryview(memory)
    if not view.c_contiguous:
        raise BufferError("the buffer is not contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


class StreamLock:
    """Lock of one stream, held by the thread that is in the middle of a message there.

    A call that fails in the middle keeps the lock, since the next bytes of the stream are no
    prefix.
    """

    __slots__ = ("_lock", "_wanted")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False

    def take(self) -> bool:
        """Take the lock if it is free; return whether this thread has it now."""
        if self._lock.acquire(blocking=False):
            return True
        # Note the wish, and then try again. The other thread releases the lock before it looks for
        # wishes, so either this attempt succeeds, or the other thread finds the wish.
        self._wanted = True
        return self._lock.acquire(blocking=False)

    def leave(self) -> bool:
        """Release the lock; return whether another thread has wanted it meanwhile."""
        self._lock.release()
        if self._wanted:
            self._wanted = False
            return True
        return False


class Carrier(Protocol):
    """The streams to and from one peer.

    Attributes:
        sending, receiving: locks of the two streams.
    """

    sending: StreamLock
    receiving: StreamLock

    def write(self, content: Array, tag: int) -> Iterator[None]:
        """Send a prefix and the bytes of ``content``; yield while there is no room."""

    def prefix(self) -> Any:
        """Return the next :class:`Prefix`, and leave it in the stream; None if there is none yet.

        Raises:
            EOFError: the stream has ended.
        """

    def read(self, prefix: Any, out: Array) -> Iterator[None]:
        """Take a prefix and its message off the stream; yield while bytes are missing."""

    def spoil(self) -> None:
        """Use the streams no more, because a message stays incomplete."""

    def refuse(self, what: str) -> NoReturn:
        """Break the communicator, since the peer has sent damaged data."""


class _Kept:
    """A message for later receivers.

    Attributes:
        prefix: its prefix.
        content: its bytes; None as long as the sender has only announced it.
        coming: whether the bytes have been asked for, and are not complete.
        is_counted: whether it takes room in the window.
        posted: the receive that gets it meanwhile, or None.
    """

    __slots__ = ("coming", "content", "is_counted", "posted", "prefix")

    def __init__(self, prefix: Any, content: Array | None, is_counted: bool = True) -> None:
        self.prefix, self.content, self.is_counted = prefix, content, is_counted
        self.coming = False
        self.posted: Posted | None = None


class Posted:
    """A send or a receive in flight; see :class:`collective.contract.mail.Posted`."""

    __slots__ = ("damage", "data", "error", "mask", "memory", "nbytes", "number", "room",
                 "source", "state", "tag", "to")  # fmt: skip

    def __init__(self, memory: Any, source: int, to: int, tag: int, mask: int = -1) -> None:
        array = None if memory is None else bytes_of(memory)
        if array is not None and not array.flags.writeable and array.size:
            raise BufferError("the buffer is read-only")
        self.memory = array
        self.room = 0 if array is None else array.size
        self.source, self.to, self.tag, self.mask = source, to, tag, mask
        self.state, self.nbytes, self.number = PENDING, 0, 0
        self.data: Any = None
        self.damage: str | None = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state > MATCHED

    def end(self, state: int = OVER, error: BaseException | None = None) -> None:
        """Mark the operation as ended, and give back its memory."""
        self.memory = None
        self.error, self.damage = error, None if error is None else str(error)
        self.state = state


class Engine:
    """The messages of one rank over the carriers of its peers, by rank.

    Args:
        carriers: those of all peers.
        news: function that is called when other threads that wait should try again: a stream that
            they wanted is free, or a message has been kept for them.
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
        self._inboxes = {rank: _Inbox(self, rank, carrier) for rank, carrier in carriers.items()}
        if rank != NOBODY:
            self._inboxes[rank] = _Inbox(self, rank, None)
        self.queues: dict[int, deque[tuple[Posted, Generator[Any, None, None], int]]] = {}
        # Posted sends that wait for a grant, with the same parts. They are in nobody's way.
        self._announced: dict[int, deque[tuple[Posted, Generator[Any, None, None], int]]] = {}
        self._flows: dict[int, Flow] = {
            rank: carrier.flow for rank, carrier in carriers.items() if hasattr(carrier, "flow")
        }
        self._rank = rank
        # Receives that wait, in posted order, and those whose message has come in part.
        self._waiting: list[Posted] = []
        self._matched: list[Posted] = []
        # Number of receives in flight that name a rank, or have matched it.
        self._wanted: Counter[int] = Counter()
        self._posts = self._copied = 0
        self._flushing: dict[int, bool] = {}
        # For the first send of each queue, the streams that it waits for: none if another call is
        # in the middle of a message there.
        self._blocked: dict[int, Sequence[int]] = {}
        self._ended: set[int] = set()
        self.lock = threading.RLock()

    # -- posted operations --------------------------------------------------------------

    def post_send(self, data: Any, to: int, tag: int) -> Posted:
        """Post a send; see :class:`collective.contract.mail.Engine`."""
        content = np.empty(0, np.uint8) if data is None else bytes_of(data)
        posted = Posted(None, NOBODY, to, tag)
        posted.nbytes = nbytes = content.size
        copies = to == self._rank or (nbytes <= EAGER_BYTES and self._copied <= _COPIED_BYTES)
        if copies:
            content = content.copy()
        if to == self._rank:
            posted.end()
            inbox = self._inboxes[to]
            while not inbox.lock.take():
                time.sleep(0)
            inbox.deliver()
            inbox.put(_Prefix(nbytes, tag), content)
            inbox.lock.leave()
            return posted
        with self.lock:
            copied = nbytes if copies else 0
            self._copied += copied
            steps = self.send(content, to, tag, None, queued=True)
            self.queues.setdefault(to, deque()).append((posted, steps, copied))
        self._flush(to)
        # A send that cannot leave has failed by now.
        if copies and not posted.done:
            posted.end()
        return posted

    def post_receive(self, memory: Any, source: int, tag: int, mask: int) -> Posted:
        """Post a receive; see :class:`collective.contract.mail.Engine`."""
        posted = Posted(memory, source, NOBODY, tag, mask)
        with self.lock:
            self._posts = posted.number = self._posts + 1
            self._waiting.append(posted)
            self._wanted[source] += 1
        self.progress()
        return posted

    def cancel(self, posted: Posted) -> bool:
        """Withdraw a receive; return False if it has a message already."""
        with self.lock:
            if posted not in self._waiting:
                return False
            self._remove(self._waiting, posted)
            posted.end(CANCELLED)
        return True

    def find(self, source: int, tag: int, mask: int, take: bool) -> Posted | None:
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
        queues = [rank for rank, queue in self.queues.items() if queue and self._blocked.get(rank)]
        reading = [rank for rank in self._carriers if self.wants(rank) or self._announced.get(rank)]
        return {SENDING: queues, RECEIVING: reading}

    def due(self) -> list[int]:
        """Send the control frames that are due; return the ranks for which some are left."""
        return [rank for rank, flow in self._flows.items() if not flow.tell_due()]

    def progress(self) -> None:
        """Do all that is possible for the operations in flight without waiting."""
        for to in [to for to, sends in self._announced.items() if sends]:
            self.look_for_grants(to)
        for to in [to for to, queue in self.queues.items() if queue]:
            self._flush(to)
        self.due()
        if not (self._waiting or self._matched):
            return
        for rank in self._turns.of(self._inboxes, 0):
            inbox = self._inboxes[rank]
            if not self.wants(rank) or not inbox.lock.take():
                continue
            try:
                inbox.drain(lambda rank=rank: self.wants(rank))  # type: ignore[misc]
            except EOFError as error:
                self.fail(rank, error)
            finally:
                if inbox.lock.leave() | inbox.have_kept():
                    self._news()

    def look_for_grants(self, to: int) -> None:
        """Read what a rank sends, and put the posted sends that it grants into their queue."""
        try:
            self.read(to)
            with self.lock:
                sends = self._announced.get(to, ())
                for send in [send for send in sends if self._flows[to].has_granted()]:
                    # The generator takes the grant, if it is its own.
                    if not isinstance(next(send[1], None), Granting):
                        self._announced[to].remove(send)
                        self.queues.setdefault(to, deque()).append(send)
        except (EOFError, OSError) as error:
            self._drop(to, error)

    def read(self, rank: int) -> None:
        """Read what a rank has sent, for posted receives or to be kept.

        Raises:
            EOFError: the stream has ended.
        """
        inbox = self._inboxes[rank]
        if not inbox.lock.take():
            return
        try:
            inbox.drain(lambda: True)
        finally:
            if inbox.lock.leave() | inbox.have_kept():
                self._news()

    def _flush(self, to: int) -> bool:
        """Send what can be sent of a queue; return whether the queue is empty.

        If a send fails, all sends of the queue have its error, and nothing is raised here: whoever
        moves them need not be the one that waits for them.
        """
        queue = self.queues.get(to)
        while queue:
            with self.lock:
                if self._flushing.get(to) or not queue:
                    return not queue
                self._flushing[to] = True
            posted, steps, copied = queue[0]
            try:
                peers = next(steps, None)
            except BaseException as error:
                self._drop(to, error)
                if not isinstance(error, Exception):
                    raise
                return True
            finally:
                self._flushing[to] = False
            if isinstance(peers, Granting):
                queue.popleft()
                self._announced.setdefault(to, deque()).append((posted, steps, copied))
                continue
            if peers is not None:
                self._blocked[to] = peers
                return False
            queue.popleft()
            self._copied -= copied
            if not posted.done:
                posted.end()
        return True

    def _drop(self, to: int, error: BaseException) -> None:
        """End all sends to a rank after an error."""
        sends = [*self.queues.pop(to, ()), *self._announced.pop(to, ())]
        for posted, steps, copied in sends:
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

    def match(self, rank: int, tag: int) -> Posted | None:
        """Take the first receive for a message, or return None."""
        if not self._waiting:
            return None
        with self.lock:
            for posted in self._waiting:
                if tag & posted.mask == posted.tag and posted.source in (rank, ANY_SOURCE):
                    return self.take(posted, rank)
        return None

    def newer(self, number: int, rank: int) -> list[Posted]:
        """Return the receives from a rank that were posted after the one with a number."""
        with self.lock:
            waiting = itertools.takewhile(lambda p: p.number > number, reversed(self._waiting))
            return [p for p in waiting if p.source in (rank, ANY_SOURCE)][::-1]

    def take(self, posted: Posted, rank: int) -> Posted:
        """Take a receive that a message of a rank matches out of those that wait."""
        with self.lock:
            self._remove(self._waiting, posted)
            if posted.source == ANY_SOURCE:
                self._turns.serve(self._inboxes, rank, 0)
            posted.source, posted.state = rank, MATCHED
            self._matched.append(posted)
            self._wanted[rank] += 1
        return posted

    def _remove(self, receives: list[Posted], posted: Posted) -> None:
        receives.remove(posted)
        self._wanted[posted.source] -= 1

    @property
    def posts(self) -> int:
        """Number of receives that have been posted."""
        return self._posts

    def give(self, posted: Posted, prefix: Any, content: Array, placed: bool = False) -> None:
        """End a receive whose message is complete, and perhaps in its place already."""
        posted.tag, posted.nbytes = prefix.tag, content.size
        if posted.memory is None:
            posted.data = content.data
        elif not placed:
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
        steps: dict[int, Generator[Sequence[int], None, None]] = {}
        exchange = Exchange(self, steps)
        if src is not None:
            steps[SENDING] = self.send(src, to, tag, mark)
        if dst is not None:
            steps[RECEIVING] = exchange.note(self.receive(dst, source, tag, mark))
        return exchange

    def send(
        self, content: Array, to: int, tag: int, mark: int | None = None, queued: bool = False
    ) -> Generator[Sequence[int], None, None]:
        """Send a message; see :meth:`exchange`.

        Args:
            queued: whether it is in a queue. Otherwise it waits for all that are.
        """
        carrier, flow = self._carriers[to], self._flows.get(to) if has_window(tag) else None
        while not queued and self.queues and not self._flush(to):
            yield (to,)
        # A message owns the stream from its prefix to its end.
        while not carrier.sending.take():
            yield ()
        peers = (to,)
        marks = () if mark is None else (mark,)
        if flow is not None and flow.is_full(content.size):
            self.read(to)  # there may be a credit
        number = 0 if flow is None else flow.begin(content.size)
        if flow is not None and number:
            for _ in _whole(carrier, carrier.announce(content.size, tag, number)):
                yield peers
            if carrier.sending.leave():
                self._news()
            try:
                while not flow.granted(number):
                    if not queued:
                        self.read(to)
                    yield Granting(peers)
                while not carrier.sending.take():
                    yield ()
            except BaseException:
                carrier.spoil()  # the peer may ask for bytes that are gone
                raise
            tag, marks = CONTROL_TAG, (-number,)
        for _ in _whole(carrier, carrier.write(content, tag, *marks)):
            if flow is not None and not queued:
                self.read(to)  # the receiver may wait until it can send as much
            yield peers
        if carrier.sending.leave():
            self._news()

    def receive(
        self, out: Array, source: int, tag: int, mark: int | None = None
    ) -> Generator[Sequence[int], None, tuple[int, Any]]:
        """Receive a message; return the sender's rank and the prefix. See :meth:`exchange`."""
        sources = self._inboxes if source == ANY_SOURCE else (source,)
        while True:
            awaited = []
            ended: EOFError | None = None
            for rank in self._turns.of(sources, tag):
                inbox = self._inboxes[rank]
                # Another thread may be receiving a message from this rank, for a long time.
                # Meanwhile another rank may have sent one, so do not wait for the lock.
                if not inbox.lock.take():
                    continue
                try:
                    message = inbox.receive(tag, out, mark)
                except EOFError as error:
                    inbox.lock.leave()
                    ended = error
                    continue
                if message is not None:
                    self._turns.serve(sources, rank, tag)
                    peers = (rank,)
                    prefix, moves = message
                    for _ in moves or ():
                        yield peers
                if inbox.lock.leave() | inbox.have_kept():
                    self._news()
                if message is not None:
                    if message[1] is None:
                        yield from self._receive_announced(inbox, rank, prefix, out)
                    return rank, prefix
                awaited.append(rank)
            # Of several sources one is enough, so the end of a stream matters once all have ended.
            if ended is not None and not awaited:
                raise ended
            yield awaited

    def _receive_announced(
        self, inbox: _Inbox, rank: int, prefix: Any, out: Array
    ) -> Generator[Sequence[int], None, None]:
        """Receive the bytes of a message, which this exchange has asked for."""
        peers, moves = (rank,), None
        try:
            while moves is None:
                if not inbox.lock.take():
                    yield ()
                    continue
                try:
                    moves = inbox.receive_announced(prefix.mark, out)
                except EOFError:
                    inbox.lock.leave()
                    raise
                for _ in moves or ():
                    yield peers
                if inbox.lock.leave() | inbox.have_kept():
                    self._news()
                if moves is None:
                    yield peers
        except BaseException:
            self._carriers[rank].spoil()  # nobody will take the bytes
            raise


class Exchange:
    """A send, a receive, or both, in flight.

    Attributes:
        awaited: by unfinished part, the ranks whose streams it waits for.
        sender: the rank that has sent the received message, or ``NOBODY``.
        prefix: the prefix of the received message, or None.
    """

    __slots__ = ("_engine", "_steps", "awaited", "prefix", "sender")

    def __init__(
        self, engine: Engine, steps: Mapping[int, Generator[Sequence[int], None, None]]
    ) -> None:
        self._engine = engine
        self._steps = steps
        self.awaited: dict[int, Sequence[int]] = {}
        self.sender = NOBODY
        self.prefix: Any = None

    def note(
        self, receiving: Generator[Sequence[int], None, tuple[int, Any]]
    ) -> Generator[Sequence[int], None, None]:
        """Run a receive, and remember the sender and the prefix."""
        self.sender, self.prefix = yield from receiving

    def give_up(self) -> None:
        """End the exchange; streams on which a message stays incomplete are not used again."""
        for steps in self._steps.values():
            steps.close()

    def advance(self) -> int:
        """Do all that is possible without waiting; return the sum of the unfinished parts."""
        pending = 0
        self.awaited.clear()
        for part, steps in self._steps.items():
            ranks = next(steps, None)
            if ranks is not None:
                self._await(part, () if isinstance(ranks, Granting) else ranks)
                if isinstance(ranks, Granting):
                    self._await(RECEIVING, ranks)
                pending += part
        if pending and self._engine.busy:
            # Whoever waits moves the posted messages, too.
            self._engine.progress()
            for part, ranks in self._engine.awaited().items():
                self._await(part, ranks)
        if due := self._engine.due():
            self._await(SENDING, due)
        return pending

    def _await(self, part: int, ranks: Sequence[int]) -> None:
        self.awaited[part] = [*self.awaited.get(part, ()), *ranks]


class Waiter:
    """A wait for posted operations, for those that wait for an :class:`Exchange`.

    Attributes:
        awaited: as that of an exchange.
    """

    def __init__(self, engine: Engine, ready: Callable[[], bool], pending: int) -> None:
        self._engine = engine
        self._ready = ready
        self._pending = pending
        self.awaited: dict[int, list[int]] = {}

    def advance(self, seconds: float = 0.0) -> int:
        """Make progress; return what is pending, or 0 if the wait is over."""
        self._engine.progress()
        due = self._engine.due()
        if self._ready():
            return 0
        self.awaited = self._engine.awaited()
        self.awaited[SENDING] += due
        return self._pending

    def give_up(self) -> None:
        """Do nothing: the operations stay in flight."""


class _Inbox:
    """Messages from one rank: those in the stream, and those kept until a receiver asks for them.

    A caller of its methods must hold the lock.
    """

    def __init__(self, engine: Engine, rank: int, carrier: Any) -> None:
        self.lock = StreamLock() if carrier is None else carrier.receiving
        self._engine = engine
        self._rank = rank
        self._carrier = carrier  # None for the messages of this rank to itself
        self._flow: Flow | None = getattr(carrier, "flow", None)
        self._kept: deque[_Kept] = deque()  # in order
        self._keeping: Iterator[None] = iter(())  # reads a message that has arrived only in part
        self._taken = self._new = False
        self._scanned = 0  # number of the last receive that the kept messages have been offered to

    def have_kept(self) -> bool:
        """Return whether a message has been kept since the last call."""
        new, self._new = self._new, False
        return new

    def receive(
        self, tag: int, out: Array, mark: int | None
    ) -> tuple[Any, Iterator[None] | None] | None:
        """Find the next message with a tag.

        Returns:
            The prefix, and an iterator that moves the message to ``out``, or drops it if it has
            another mark; the caller holds the lock until its end. In place of the iterator None if
            the message was only announced: see :meth:`receive_announced`. None if there is no such
            message yet.

        Raises:
            BackendError: the stream has no valid message, or the message has another length.
            EOFError: the stream has ended before such a message.
        """
        self.deliver()
        # The message's bytes follow its prefix. The next prefix comes after these bytes.
        while _is_over(self._keeping):
            kept = next((each for each in self._kept if each.prefix.tag == tag), None)
            if kept is not None and not kept.coming:
                self._kept.remove(kept)
                if not self._fits(kept.prefix, out, mark):
                    return kept.prefix, iter(())
                if kept.content is None:
                    return self._ask(kept.prefix)
                out[:] = kept.content
                if kept.is_counted:
                    self._free(kept.prefix)
                return kept.prefix, iter(())
            prefix = self._next(tag if kept is None else None)
            if prefix is None:
                return None
            if kept is None and prefix.tag == tag and _is_over(self._keeping) and not self._taken:
                if not self._fits(prefix, out, mark):
                    out = np.empty(prefix.nbytes, np.uint8)
                if self._is_announced(prefix):
                    _is_over(self._carrier.read(prefix, _NOTHING))
                    return self._ask(prefix)
                self._free(prefix)
                return prefix, _whole(self._carrier, self._carrier.read(prefix, out))
        return None

    def receive_announced(self, number: int, out: Array) -> Iterator[None] | None:
        """Find the bytes of a message that :meth:`receive` has asked for.

        Returns:
            An iterator that moves them to ``out``; None if they are not there yet.

        Raises:
            EOFError: the stream has ended.
        """
        self.deliver()
        while _is_over(self._keeping):
            prefix = self._next(None, number)
            if prefix is None:
                return None
            if prefix.tag == CONTROL_TAG and prefix.mark == -number:
                self._fits(prefix, out, None)
                assert self._flow is not None
                self._flow.asking -= 1
                return _whole(self._carrier, self._carrier.read(prefix, out))
        return None

    def _ask(self, prefix: Any) -> tuple[Any, None]:
        """Ask for the bytes of an announced message, for an exchange."""
        assert self._flow is not None
        self._flow.asking += 1
        self._flow.grant(prefix.mark)
        return prefix, None

    def _is_announced(self, prefix: Any) -> bool:
        return self._flow is not None and has_window(prefix.tag) and prefix.mark > 0

    def _free(self, prefix: Any) -> None:
        """Note that a receive has taken a message that was not announced."""
        if self._flow is not None:
            self._flow.free(prefix)

    def drain(self, wanted: Callable[[], bool]) -> None:
        """Read what has come, as long as it is wanted, for posted receives or to be kept."""
        self.deliver()
        while _is_over(self._keeping) and wanted() and self._next(None) is not None:
            pass

    def _next(self, tag: int | None, number: int = 0) -> Any:
        """Return the next prefix, or None; begin to read its message, unless it has this tag.

        The bytes of the announced message with this number stay in the stream, too.
        """
        if self._carrier is None:
            return None
        prefix = self._carrier.prefix()
        if prefix is None:
            return None
        if not 0 <= prefix.nbytes < _NO_LENGTH:
            self._carrier.refuse(f"the header {tuple(prefix)} is not valid")
        if self._flow is not None and prefix.tag == CONTROL_TAG:
            return self._control(self._flow, prefix, number)
        posted = None if self._keeps(prefix.tag) else self._engine.match(self._rank, prefix.tag)
        self._taken = posted is not None
        if posted is not None or prefix.tag != tag:
            self._keeping = self._keep(prefix, posted)
        return prefix

    def _control(self, flow: Flow, prefix: Any, number: int) -> Any:
        """Act on a control frame; return its prefix, or None if another thread has to act on it."""
        if prefix.mark >= 0:
            _is_over(self._carrier.read(prefix, _NOTHING))
            if (damage := flow.note(prefix)) is not None:
                self._carrier.refuse(damage)
            return prefix
        if prefix.mark == -number:
            return prefix
        announced: Any
        posted, announced = flow.asked.pop(-prefix.mark, (None, None))
        kept = next((k for k in self._kept if k.coming and k.prefix.mark == -prefix.mark), None)
        if kept is not None:
            announced = kept.prefix
        if announced is None and flow.asking > (number != 0):
            self._new = True  # wakes that thread
            return None
        if announced is None or announced.nbytes != prefix.nbytes:
            self._carrier.refuse(f"nobody has asked for the message {tuple(prefix)}")
        if kept is not None:
            self._keeping = self._fill(kept)
        else:
            self._keeping = self._keep(announced._replace(mark=0), posted, is_counted=False)
        return prefix

    def _fill(self, kept: _Kept) -> Iterator[None]:
        """Read the bytes of a message that a probe has asked for."""
        kept.content = np.empty(kept.prefix.nbytes, np.uint8)
        yield from _whole(self._carrier, self._carrier.read(kept.prefix, kept.content))
        kept.prefix = kept.prefix._replace(mark=0)
        kept.coming = False
        if kept.posted is not None:
            self._engine.give(kept.posted, kept.prefix, kept.content)

    def _keeps(self, tag: int) -> bool:
        """Return whether an older message with a tag is kept, which a new receive gets first."""
        return any(kept.prefix.tag == tag for kept in self._kept)

    def deliver(self) -> None:
        """Offer the kept messages to the receives that have been posted since."""
        before, self._scanned = self._scanned, self._engine.posts
        if before == self._scanned:
            return
        with self._engine.lock:
            for posted in self._engine.newer(before, self._rank):
                for kept in self._kept:
                    if kept.prefix.tag & posted.mask == posted.tag:
                        self._kept.remove(kept)
                        self._engine.take(posted, self._rank)
                        self._give(posted, kept)
                        break

    def put(
        self, prefix: Any, content: Array | None, posted: Posted | None = None,
        is_counted: bool = True,
    ) -> None:  # fmt: skip
        """Give a message, which is complete or announced, to its receive, or keep it."""
        kept = _Kept(prefix, content, is_counted)
        if posted is None and not self._keeps(prefix.tag):
            posted = self._engine.match(self._rank, prefix.tag)
        if posted is not None:
            self._give(posted, kept)
        else:
            self._kept.append(kept)
            self._new = True

    def _give(self, posted: Posted, kept: _Kept) -> None:
        if kept.content is None:
            assert self._flow is not None
            self._flow.asked[kept.prefix.mark] = (posted, kept.prefix)
            if not kept.coming:
                self._flow.grant(kept.prefix.mark)
        elif kept.coming:
            kept.posted = posted  # _fill() gives it the message
        else:
            if kept.is_counted:
                self._free(kept.prefix)
            self._engine.give(posted, kept.prefix, kept.content)

    def find(self, tag: int, mask: int, take: bool) -> Posted | None:
        """Return a kept message, which the caller owns if ``take`` is true."""
        for kept in self._kept:
            if kept.prefix.tag & mask == tag:
                message = Posted(None, self._rank, NOBODY, kept.prefix.tag)
                message.nbytes = kept.prefix.nbytes
                if not take:
                    return message
                if kept.content is None and not kept.coming and self._flow is not None:
                    kept.coming, kept.is_counted = True, False
                    self._flow.grant(kept.prefix.mark)
                if kept.content is None or kept.coming:
                    return None  # it may be taken once it is complete
                self._kept.remove(kept)
                if kept.is_counted:
                    self._free(kept.prefix)
                message.data = kept.content.data
                message.end()
                return message
        return None

    def _fits(self, prefix: Any, out: Array, mark: int | None) -> bool:
        """Return whether a message has the wanted mark, and check the length if it has."""
        if mark is not None and (not mark or prefix.mark != mark):
            return False
        if prefix.nbytes != out.size:
            self._carrier.refuse(f"{prefix.nbytes} bytes in place of {out.size}")
        return True

    def _keep(self, prefix: Any, posted: Posted | None, is_counted: bool = True) -> Iterator[None]:
        if self._is_announced(prefix):
            _is_over(self._carrier.read(prefix, _NOTHING))
            self.put(prefix, None, posted)
            return
        memory = None if posted is None else posted.memory
        if posted is not None and memory is not None and prefix.nbytes <= memory.size:
            content = memory[: prefix.nbytes]
            yield from _whole(self._carrier, self._carrier.read(prefix, content))
            if is_counted:
                self._free(prefix)
            self._engine.give(posted, prefix, content, placed=True)
            return
        content = np.empty(prefix.nbytes, np.uint8)
        yield from _whole(self._carrier, self._carrier.read(prefix, content))
        self.put(prefix, content, posted, is_counted)


def _whole(carrier: Any, steps: Iterator[None]) -> Iterator[None]:
    """Move a message; if that fails or is given up, the carrier's streams are not used again."""
    try:
        yield from steps
    except BaseException:
        carrier.spoil()
        raise


def _is_over(steps: Iterator[None]) -> bool:
    """Do all that is possible without waiting; return whether the iterator has ended."""
    return next(steps, steps) is steps


def awaited(pending: int, to: int, source: int, peers: Iterable[int]) -> list[int]:
    """Return the ranks that have not done their part of an exchange; the others may have left.

    Args:
        pending: the sum of the unfinished parts.
        to, source: as in :meth:`Engine.exchange`.
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
        x, to, out, source, tag: as in :meth:`Engine.exchange`.
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
