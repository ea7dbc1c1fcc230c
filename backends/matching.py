"""Matching of messages to receivers by source and tag, in Python, for transports of byte streams.

A message is a prefix and its bytes, on a stream from one rank to another. A transport has a
*carrier* for each peer, which moves prefixes and bytes: through a ring in shared memory, or over a
connection. This module decides which message a receiver gets.

A message whose tag no receiver has asked for yet must not block the messages behind it. So each
receiver takes all messages off the stream up to its own, and keeps them for later receivers. Nobody
takes messages off a stream in which no receiver waits, so a sender that is too fast has to wait.
Over connections :mod:`.flow` bounds what is kept.

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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
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

from .flow import CONTROL_TAG, Flow, has_window

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
    """Lock of the stream from a peer, held by the thread that reads there.

    A call that gives up in the middle of a message keeps the lock, since the next bytes of the
    stream are no prefix.
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
        receiving: lock of the stream from the peer. The stream to it belongs to the engine's queue.
    """

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
    """A send or a receive in flight; see :class:`collective.contract.mail.Posted`.

    Args:
        memory, source, to, tag, mask: as of the engine's methods.
        mark: mark of the messages that a receive accepts; None for any.
        exact: whether an accepted message must be as long as the memory.
    """

    __slots__ = ("damage", "data", "error", "exact", "mark", "mask", "memory", "nbytes", "number",
                 "prefix", "room", "source", "state", "tag", "to")  # fmt: skip

    def __init__(
        self, memory: Any, source: int, to: int, tag: int, mask: int = -1, mark: int | None = None,
        exact: bool = False,
    ) -> None:  # fmt: skip
        array = None if memory is None else bytes_of(memory)
        if array is not None and not array.flags.writeable and array.size:
            raise BufferError("the buffer is read-only")
        self.memory = array
        self.room = 0 if array is None else array.size
        self.source, self.to, self.tag, self.mask, self.mark = source, to, tag, mask, mark
        self.exact, self.state, self.nbytes, self.number = exact, PENDING, 0, 0
        self.data: Any = None
        self.prefix: Any = None
        self.damage: str | None = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state > MATCHED

    @property
    def whole(self) -> bool:
        """Whether it is over, and a received message has fitted into its memory."""
        placed = self.to >= 0 or self.data is not None or self.nbytes <= self.room
        return self.state == OVER and placed

    def accepts(self, prefix: Any) -> bool:
        """Return whether a message has the mark that this receive wants, if it wants one."""
        return self.mark is None or (self.mark != 0 and prefix.mark == self.mark)

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
        self._inboxes = {rank: _Inbox(self, rank, carrier) for rank, carrier in carriers.items()}
        if rank != NOBODY:
            self._inboxes[rank] = _Inbox(self, rank, None)
        self.queues: dict[int, deque[tuple[Posted, Generator[Any, None, None], int]]] = {}
        # Sends that wait for a grant, in nobody's way: by rank and number, with the same parts.
        self._announced: dict[int, dict[int, tuple[Posted, Generator[Any, None, None], int]]] = {}
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
        self._ended: set[int] = set()
        self.lock = threading.RLock()

    # -- posted operations --------------------------------------------------------------

    def post_send(self, data: Any, to: int, tag: int) -> Posted:
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

    def _send_to_self(self, content: Array, tag: int) -> Posted:
        posted = Posted(None, NOBODY, self._rank, tag)
        posted.nbytes = content.size
        posted.end()
        inbox = self._inboxes[self._rank]
        while not inbox.lock.take():
            time.sleep(0)
        inbox.deliver()
        inbox.put(_Prefix(content.size, tag), content)
        if inbox.lock.leave() | inbox.have_moved():
            self._news()
        return posted

    def _enqueue(
        self, content: Array, to: int, tag: int, mark: int | None = None, copied: int = 0
    ) -> Posted:
        """Append a message to the queue of a rank.

        Args:
            copied: bytes of the message that have been copied.
        """
        posted = Posted(None, NOBODY, to, tag)
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
            yield from _whole(carrier, carrier.write(content, tag, *marks))
            return
        number = flow.begin(content.size) if has_window(tag) else 0
        if number:
            yield from _framed(carrier, carrier.announce(content.size, tag, number))
            while not flow.granted(number):
                yield number
            tag, marks = CONTROL_TAG, (-number,)
        yield from _framed(carrier, carrier.write(content, tag, *marks))

    def post_receive(self, memory: Any, source: int, tag: int, mask: int) -> Posted:
        """Post a receive; see :class:`collective.contract.mail.Engine`."""
        posted = self._await(Posted(memory, source, NOBODY, tag, mask))
        self.progress()
        return posted

    def _await(self, posted: Posted) -> Posted:
        """Append a receive to those that wait."""
        with self.lock:
            self._posts = posted.number = self._posts + 1
            self._waiting.append(posted)
            self._wanted[posted.source] += 1
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
            is_free = not self._flushing.get(to)
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

    def match(self, rank: int, prefix: Any, last: int | None) -> Posted | None:
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

    def newer(self, number: int, rank: int) -> list[Posted]:
        """Return the receives from a rank that were posted after the one with a number."""
        with self.lock:
            waiting = itertools.takewhile(lambda p: p.number > number, reversed(self._waiting))
            return [p for p in waiting if p.source in (rank, ANY_SOURCE)][::-1]

    def take(self, posted: Posted, rank: int, prefix: Any) -> Posted:
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

    def _remove(self, receives: list[Posted], posted: Posted) -> None:
        receives.remove(posted)
        self._wanted[posted.source] -= 1

    @property
    def posts(self) -> int:
        """Number of receives that have been posted."""
        return self._posts

    def give(self, posted: Posted, prefix: Any, content: Array, placed: bool = False) -> None:
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
            receiving = self._await(Posted(dst, source, NOBODY, tag, mark=mark, exact=True))
        if src is not None:
            sending = self._enqueue(src, to, tag, mark)
        return Exchange(self, sending, receiving)

    def withdraw(self, posted: Posted) -> None:
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
                        queue[index] = posted, never if begun else _nothing(), copied
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

    def __init__(self, engine: Engine, ready: Callable[[], bool], pending: int) -> None:
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

    def __init__(self, engine: Engine, sending: Posted | None, receiving: Posted | None) -> None:
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


class _Inbox:
    """Messages from one rank: those in the stream, and those kept until a receiver asks for them.

    A caller of its methods must hold the lock.

    Attributes:
        over: whether a message stays incomplete, so that nobody reads the stream any more.
    """

    def __init__(self, engine: Engine, rank: int, carrier: Any) -> None:
        self.lock = StreamLock() if carrier is None else carrier.receiving
        self._engine = engine
        self._rank = rank
        self._carrier = carrier  # None for the messages of this rank to itself
        self._flow: Flow | None = getattr(carrier, "flow", None)
        self._kept: deque[_Kept] = deque()  # in order
        # Reads a message that has arrived only in part.
        self._keeping = _nothing()
        self._moved = self.over = False
        self._scanned = 0  # number of the last receive that the kept messages have been offered to

    def have_moved(self) -> bool:
        """Return whether a message has been kept or given to a receive since the last call."""
        moved, self._moved = self._moved, False
        return moved

    def give_up(self) -> None:
        """Read the message that is coming no further."""
        self.over = True
        self._keeping.close()

    def drain(self, wanted: Callable[[], bool]) -> None:
        """Read what has come, as long as it is wanted, for receives or to be kept.

        Raises:
            BackendError: the stream has no valid message.
            EOFError: the stream has ended.
        """
        self.deliver()
        # A message's bytes follow its prefix. The next prefix comes after these bytes.
        while _is_over(self._keeping) and wanted() and self._next():
            pass

    def _next(self) -> bool:
        """Begin to read the next message; return False if there is none yet."""
        prefix = None if self._carrier is None else self._carrier.prefix()
        if prefix is None:
            return False
        if not 0 <= prefix.nbytes < _NO_LENGTH:
            self._carrier.refuse(f"the header {tuple(prefix)} is not valid")
        if self._flow is not None and prefix.tag == CONTROL_TAG:
            self._control(self._flow, prefix)
        else:
            self._keeping = self._keep(prefix, self._match(prefix))
        return True

    def _control(self, flow: Flow, prefix: Any) -> None:
        """Act on a control frame: a credit, a grant, or the bytes of an announced message."""
        if prefix.mark >= 0:
            _is_over(self._carrier.read(prefix, _NOTHING))
            if (damage := flow.note(prefix)) is not None:
                self._carrier.refuse(damage)
            return
        posted, announced = flow.asked.pop(-prefix.mark, (None, None))
        kept = next((k for k in self._kept if k.coming and k.prefix.mark == -prefix.mark), None)
        if kept is not None:
            announced = kept.prefix
        if announced is None or announced.nbytes != prefix.nbytes:
            self._carrier.refuse(f"nobody has asked for the message {tuple(prefix)}")
        elif kept is not None:
            self._keeping = self._fill(kept)
        else:
            self._keeping = self._keep(announced._replace(mark=0), posted, is_counted=False)

    def _fill(self, kept: _Kept) -> Generator[None, None, None]:
        """Read the bytes of a message that a probe has asked for."""
        kept.content = np.empty(kept.prefix.nbytes, np.uint8)
        yield from _whole(self._carrier, self._carrier.read(kept.prefix, kept.content))
        kept.prefix = kept.prefix._replace(mark=0)
        kept.coming = False
        self._moved = True
        if kept.posted is not None:
            self._engine.give(kept.posted, kept.prefix, kept.content)

    def _match(self, prefix: Any) -> Posted | None:
        # A receive that has not looked at the kept messages yet may match one of them, which is
        # older.
        return self._engine.match(self._rank, prefix, self._scanned if self._kept else None)

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
                        self._engine.take(posted, self._rank, kept.prefix)
                        self._give(posted, kept)
                        break

    def put(
        self, prefix: Any, content: Array | None, posted: Posted | None = None,
        is_counted: bool = True,
    ) -> None:  # fmt: skip
        """Give a message, which is complete or announced, to its receive, or keep it."""
        kept = _Kept(prefix, content, is_counted)
        posted = posted or self._match(prefix)
        if posted is not None:
            self._give(posted, kept)
        else:
            self._kept.append(kept)
            self._moved = True

    def _give(self, posted: Posted, kept: _Kept) -> None:
        """Give a kept message to its receive, or ask for its bytes."""
        if kept.coming:
            kept.posted = posted  # _fill() gives it the message
        elif kept.content is None:
            assert self._flow is not None
            self._flow.asked[kept.prefix.mark] = (posted, kept.prefix)
            self._flow.grant(kept.prefix.mark)
        else:
            if kept.is_counted:
                self._free(kept.prefix)
            self._engine.give(posted, kept.prefix, kept.content)
            self._moved = True

    def _is_announced(self, prefix: Any) -> bool:
        return self._flow is not None and has_window(prefix.tag) and prefix.mark > 0

    def _free(self, prefix: Any) -> None:
        """Note that a receive has taken a message that was not announced."""
        if self._flow is not None:
            self._flow.free(prefix)

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

    def _keep(
        self, prefix: Any, posted: Posted | None, is_counted: bool = True
    ) -> Generator[None, None, None]:
        if self._is_announced(prefix):
            _is_over(self._carrier.read(prefix, _NOTHING))
            self.put(prefix, None, posted)
            return
        memory = None if posted is None else posted.memory
        fits = memory is not None and prefix.nbytes <= memory.size
        if posted is not None and memory is not None and fits and posted.accepts(prefix):
            content = memory[: prefix.nbytes]
            yield from _whole(self._carrier, self._carrier.read(prefix, content))
            if is_counted:
                self._free(prefix)
            self._engine.give(posted, prefix, content, placed=True)
            self._moved = True
            return
        content = np.empty(prefix.nbytes, np.uint8)
        yield from _whole(self._carrier, self._carrier.read(prefix, content))
        self.put(prefix, content, posted, is_counted)


def _nothing() -> Generator[None, None, None]:
    """Return a message that is over."""
    return (None for _ in ())


def _whole(carrier: Any, steps: Iterator[None]) -> Generator[None, None, None]:
    """Move a message; if that fails or is given up, the carrier's streams are not used again."""
    try:
        yield from steps
    except BaseException:
        carrier.spoil()
        raise


def _framed(carrier: Any, steps: Iterator[None]) -> Generator[None, None, None]:
    """Send a frame, between which and the others control frames may leave."""
    while not carrier.sending.take():
        yield
    yield from _whole(carrier, steps)
    carrier.sending.leave()


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
