"""Messages from one rank, in Python: what has come, and what is kept for later receivers.

A message whose tag no receiver has asked for yet must not block the messages behind it. So each
receiver takes all messages off the stream up to its own, and keeps them for later receivers. Nobody
takes messages off a stream in which no receiver waits, so a sender that is too fast has to wait.
Over connections :mod:`.flow` bounds what is kept.

A message that arrives is an iterator, whose steps do all that is possible without waiting.
:mod:`.matching` has the receives, and the messages that leave.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from collective.contract.mail import MATCHED, OVER, PENDING
from collective.native import NOBODY

from .flow import CONTROL_TAG, Flow, has_window

if TYPE_CHECKING:
    from .matching import Matcher

Array = np.ndarray[Any, Any]

# No message is as long as this. A greater length is a sign of damage.
_NO_LENGTH = 1 << 47
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


class Transfer:
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


class _KeptMessage:
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
        self.posted: Transfer | None = None


class Inbox:
    """Messages from one rank: those in the stream, and those kept until a receiver asks for them.

    A caller of its methods must hold the lock.

    Attributes:
        over: whether a message stays incomplete, so that nobody reads the stream any more.
    """

    def __init__(self, engine: Matcher, rank: int, carrier: Any) -> None:
        self.lock = StreamLock() if carrier is None else carrier.receiving
        self._engine = engine
        self._rank = rank
        self._carrier = carrier  # None for the messages of this rank to itself
        self._flow: Flow | None = getattr(carrier, "flow", None)
        self._kept: deque[_KeptMessage] = deque()  # in order
        # Reads a message that has arrived only in part.
        self._keeping = nothing()
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
        while is_over(self._keeping) and wanted() and self._next():
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
            is_over(self._carrier.read(prefix, _NOTHING))
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

    def _fill(self, kept: _KeptMessage) -> Generator[None, None, None]:
        """Read the bytes of a message that a probe has asked for."""
        kept.content = np.empty(kept.prefix.nbytes, np.uint8)
        yield from whole(self._carrier, self._carrier.read(kept.prefix, kept.content))
        kept.prefix = kept.prefix._replace(mark=0)
        kept.coming = False
        self._moved = True
        if kept.posted is not None:
            self._engine.give(kept.posted, kept.prefix, kept.content)

    def _match(self, prefix: Any) -> Transfer | None:
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
        self, prefix: Any, content: Array | None, posted: Transfer | None = None,
        is_counted: bool = True,
    ) -> None:  # fmt: skip
        """Give a message, which is complete or announced, to its receive, or keep it."""
        kept = _KeptMessage(prefix, content, is_counted)
        posted = posted or self._match(prefix)
        if posted is not None:
            self._give(posted, kept)
        else:
            self._kept.append(kept)
            self._moved = True

    def _give(self, posted: Transfer, kept: _KeptMessage) -> None:
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

    def find(self, tag: int, mask: int, take: bool) -> Transfer | None:
        """Return a kept message, which the caller owns if ``take`` is true."""
        for kept in self._kept:
            if kept.prefix.tag & mask == tag:
                message = Transfer(None, self._rank, NOBODY, kept.prefix.tag)
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
        self, prefix: Any, posted: Transfer | None, is_counted: bool = True
    ) -> Generator[None, None, None]:
        if self._is_announced(prefix):
            is_over(self._carrier.read(prefix, _NOTHING))
            self.put(prefix, None, posted)
            return
        memory = None if posted is None else posted.memory
        fits = memory is not None and prefix.nbytes <= memory.size
        if posted is not None and memory is not None and fits and posted.accepts(prefix):
            content = memory[: prefix.nbytes]
            yield from whole(self._carrier, self._carrier.read(prefix, content))
            if is_counted:
                self._free(prefix)
            self._engine.give(posted, prefix, content, placed=True)
            self._moved = True
            return
        content = np.empty(prefix.nbytes, np.uint8)
        yield from whole(self._carrier, self._carrier.read(prefix, content))
        self.put(prefix, content, posted, is_counted)


def nothing() -> Generator[None, None, None]:
    """Return a message that is over."""
    return (None for _ in ())


def whole(carrier: Any, steps: Iterator[None]) -> Generator[None, None, None]:
    """Move a message; if that fails or is given up, the carrier's streams are not used again."""
    try:
        yield from steps
    except BaseException:
        carrier.spoil()
        raise


def framed(carrier: Any, steps: Iterator[None]) -> Generator[None, None, None]:
    """Send a frame, between which and the others control frames may leave."""
    while not carrier.sending.take():
        yield
    yield from whole(carrier, steps)
    carrier.sending.leave()


def is_over(steps: Iterator[None]) -> bool:
    """Do all that is possible without waiting; return whether the iterator has ended."""
    return next(steps, steps) is steps
