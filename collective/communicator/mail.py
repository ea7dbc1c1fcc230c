"""Messages of bytes, for adapters of interfaces with arrays and requests of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from collective.contract.backend import ANY_SOURCE
from collective.contract.mail import (
    ANY_TAG,
    CANCELLED,
    FAILED,
    OVER,
    Engine,
    Envelope,
    Posted,
    Truncated,
)
from collective.contract.waits import MessageCall
from collective.deadline import Deadline
from collective.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from .path import Path

# The engine's tags of these messages have this bit, then the context, then a bit for a wanted
# answer, then 31 bits for the tag of the caller. All other messages of a communicator have smaller
# or negative tags.
_MAIL_BIT, _CONTEXT_SHIFT, _CONTEXTS, _TAGS = 1 << 62, 32, 1 << 30, 1 << 31


class Mail:
    """Posted messages of bytes between the ranks of a communicator, in one context.

    Messages of different contexts never match, nor do those of the communicator's own calls. See
    :mod:`collective.contract.mail` for the order in which messages match, and for their progress.

    Attributes:
        rank, size: this rank, and the number of ranks.
        engine: the transport's engine. An adapter that has checked all arguments itself may post by
            it, and must handle ``NotImplemented``.
        bits: what the engine's tags of this context have beside a tag.
        places: the engine's rank of each rank.
    """

    #: Bit of the engine's tag of a message whose sender waits for an answer.
    WANTS_ANSWER = 1 << 31
    #: Masks of a receive of the engine for any tag of a context, and for one tag.
    ANY, ONE = ~(WANTS_ANSWER | _TAGS - 1), ~WANTS_ANSWER

    def __init__(
        self, path: Path, engine: Engine, context: int = 0, ranks: Sequence[int] | None = None
    ) -> None:
        self._path = path
        self.engine = engine
        if ranks is not None and list(ranks) == list(range(path.size)):
            ranks = None
        self._ranks = ranks
        self.places = tuple(range(path.size) if ranks is None else ranks)
        self.bits = _MAIL_BIT | context << _CONTEXT_SHIFT
        self._send, self._receive = engine.send, engine.receive
        self.size, self.rank = len(self.places), self.places.index(path.rank)

    def context(self, number: int, ranks: Sequence[int] | None = None) -> Mail:
        """Return the messages of another context. No rank waits, and nothing needs to be closed.

        Args:
            number: number of the context, from 1 to 2**30 - 1, on which its members have agreed.
            ranks: the members, in the order of their new numbers; by default all ranks.
        """
        if not 0 < number < _CONTEXTS:
            raise InvalidArgumentError(f"context: {number}; expected 1 to {_CONTEXTS - 1}.")
        members = self._ranks if ranks is None else [self.places[rank] for rank in ranks]
        return Mail(self._path, self.engine, number, members)

    # -- posting ------------------------------------------------------------------------

    def send(self, data: Any, dst: int, tag: int, answer: bool = False) -> Posted:
        """Post a send, which may go to this rank itself.

        Args:
            data: contiguous buffer, or None for an empty message. It must not change until the
                send has ended.
            dst, tag: rank that receives it, and an integer from 0 to 2**31 - 1.
            answer: whether the receiver's tag has the bit :attr:`WANTS_ANSWER`.
        """
        if not 0 <= tag < _TAGS:
            self._refuse_tag(tag)
        to = dst if self._ranks is None else self._ranks[dst]
        if answer:
            tag |= self.WANTS_ANSWER
        posted = self._send(data, to, self.bits | tag)
        return self._refuse("send", tag) if posted is NotImplemented else posted

    def receive(self, memory: Any, src: int, tag: int, wait: bool = False) -> Posted:
        """Post a receive.

        Args:
            memory: contiguous buffer for the message; None if its length is unknown, see
                :attr:`Posted.data`.
            src: rank that sends the message, or ``ANY_SOURCE``.
            tag: tag of the message, or ``ANY_TAG``.
            wait: whether the caller is about to wait for it.
        """
        posted = self._receive(memory, *self._wanted(src, tag), wait)
        return self._refuse("recv", tag) if posted is NotImplemented else posted

    def _wanted(self, src: int, tag: int) -> tuple[int, int, int]:
        """Return source, tag and mask for the engine."""
        if self._ranks is not None and src != ANY_SOURCE:
            src = self._ranks[src]
        if tag == ANY_TAG:
            return src, self.bits, self.ANY
        if not 0 <= tag < _TAGS:
            self._refuse_tag(tag)
        return src, self.bits | tag, self.ONE

    def cancel(self, posted: Posted) -> bool:
        """Withdraw a receive; return False if it has a message already, or is a send."""
        return self.engine.cancel(posted)

    # -- the end of an operation ----------------------------------------------------------

    def progress(self) -> None:
        """Do all that is possible for all posted operations, without waiting."""
        self.engine.progress()

    def wait(self, posted: Posted, timeout: float | None = None) -> Posted:
        """Wait for an operation, and return it.

        Args:
            timeout: seconds; None for the communicator's, ``math.inf`` for no limit.

        Raises:
            Truncated: the message was longer than the memory.
            CollectiveTimeoutError: the operation has not ended in time. The communicator is broken.
            PeerLostError: the other rank is lost; for ``ANY_SOURCE``, all ranks are.
        """
        if posted.whole:
            return posted
        if not posted.done:
            self._wait((posted,), False, timeout)
        return self.check(posted)

    def wait_all(self, items: Sequence[Posted], timeout: float | None = None) -> None:
        """Wait for all operations, and then raise the first one's error, if any has failed."""
        self._wait(tuple(items), False, timeout)
        for posted in items:
            if not posted.whole:
                self.check(posted)

    def wait_any(self, items: Sequence[Posted], timeout: float | None = None) -> int:
        """Wait until one operation has ended; return its index. It may have failed."""
        self._wait(tuple(items), True, timeout)
        return next(index for index, posted in enumerate(items) if posted.done)

    def check(self, posted: Posted) -> Posted:
        """Raise the error of an operation that has ended; return the operation if it has none."""
        if posted.state == FAILED:
            try:
                self.engine.explain(posted)
            except BaseException as error:
                self._path.note_failure(error)
                raise
        if posted.state == OVER and not posted.whole:
            self._refuse_long(posted)
        return posted

    def status(self, posted: Posted) -> Envelope:
        """Return source, tag and length of the message of a receive that is over."""
        source = posted.source
        if self._ranks is not None and posted.state != CANCELLED:
            source = self._ranks.index(source)
        return Envelope(source, posted.tag & _TAGS - 1, posted.nbytes)

    def _wait(self, items: Sequence[Posted], any_of: bool, timeout: float | None) -> None:
        try:
            self.engine.wait(items, any_of, self._limit(timeout))
        except BaseException as error:
            self._path.note_failure(error)
            raise

    def _limit(self, timeout: float | None) -> float | Deadline:
        limit = self._path.timeout if timeout is None else timeout
        return Deadline.never() if limit == math.inf else limit

    # -- probing ------------------------------------------------------------------------

    def iprobe(self, src: int, tag: int) -> Envelope | None:
        """Return the status of a message that a receive would get now, or None."""
        found = self.engine.find(*self._wanted(src, tag), False)
        return None if found is None else self.status(found)

    def imatch(self, src: int, tag: int) -> Posted | None:
        """Take a message that a receive would get now, or return None; see :meth:`read`."""
        return self.engine.find(*self._wanted(src, tag), True)

    def probe(self, src: int, tag: int, timeout: float | None = None) -> Envelope:
        """Wait for a message, and return its status; a receive gets it later."""
        return self.status(self._probe(src, tag, False, timeout))

    def match(self, src: int, tag: int, timeout: float | None = None) -> Posted:
        """Wait for a message, and take it: no receive gets it. See :meth:`read`."""
        return self._probe(src, tag, True, timeout)

    def _probe(self, src: int, tag: int, take: bool, timeout: float | None) -> Posted:
        wanted = self._wanted(src, tag)
        found: list[Posted] = []

        def look() -> bool:
            # A wait may ask again after it has heard yes, and a message is taken only once.
            message = None if found else self.engine.find(*wanted, take)
            if message is not None:
                found.append(message)
            return bool(found)

        if not look():
            try:
                self.engine.wait_until(look, *wanted[:2], self._limit(timeout))
            except BaseException as error:
                self._path.note_failure(error)
                raise
        return found[0]

    def read(self, posted: Posted, memory: Any) -> Posted:
        """Copy a message that :meth:`match` or :meth:`imatch` has taken to ``memory``.

        Raises:
            Truncated: the memory is shorter; it has the first part of the message.
        """
        room = memoryview(memory).cast("B")
        room[: posted.nbytes] = posted.data[: room.nbytes]
        if posted.nbytes > room.nbytes:
            self._refuse_long(posted, room.nbytes)
        return posted

    # -- errors -------------------------------------------------------------------------

    def _refuse(self, what: str, tag: int) -> Any:
        call = MessageCall(what, tag, None, None)
        self.engine.refuse(call)
        raise UnsupportedError(f"{call}: the transport takes no messages {self._path.who}.")

    def _refuse_tag(self, tag: int) -> None:
        raise InvalidArgumentError(f"tag: {tag!r}; expected an integer from 0 to {_TAGS - 1}.")

    def _refuse_long(self, posted: Posted, room: int | None = None) -> None:
        status = self.status(posted)
        raise Truncated(
            f"recv: the message from rank {status.source} with tag {status.tag} has "
            f"{status.nbytes} bytes; the memory has {posted.room if room is None else room} "
            f"[rank {self.rank} of {self.size}]. The memory has the first part."
        )
