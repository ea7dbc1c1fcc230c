"""Messages of bytes that are in flight while the program goes on: what a transport offers for them.

An operation is *posted*: the transport returns a :class:`Posted` and needs no thread for it. Posted
operations make progress whenever this process posts, tests or waits for one, exchanges another
message of the communicator, or waits in any other call, on any communicator (there with a delay of
up to 50 ms). In between, only those bytes move that the kernel moves, or that the peer takes out of
memory which the ranks share.

Receives match in posted order: a message goes to the first receive whose source and tag match.
Messages from one rank are matched in the order in which they were sent. A receive from
``ANY_SOURCE`` lets the sources take turns.

A message of at most :data:`EAGER_BYTES` is copied if it cannot leave at once, as long as the copies
of this rank have at most 64 MiB together. Then its send is over at once. A rank reads what a peer
has sent only while it waits for a message from this peer, or looks for one. Meanwhile the sender's
messages fill the ring or the socket's buffers, and then the sender's own copies. Messages before
the wanted one are kept in memory. Over ``tcp`` that has a bound, beyond which messages are only
announced. Over the other transports it has none: to stop reading would be a deadlock.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar

from collective.errors import CollectiveError, ShapeError

if TYPE_CHECKING:
    from collective.deadline import Deadline

#: Value of ``tag`` with which a receive takes a message of any tag.
ANY_TAG = -1
#: Bytes of a message that its sender may copy; the same number as in messages.h.
EAGER_BYTES = 64 << 10
#: What a second message with the elements of a long array adds to its tag; as in messages.h.
PAYLOAD_TAG = 1 << 31
#: Mask of a receive for one tag only.
EXACTLY = -1
#: States of a posted operation. From OVER on it has ended.
PENDING, MATCHED, OVER, CANCELLED, FAILED = range(5)


class Truncated(ShapeError):
    """A message is longer than the memory of its receive, which has the message's first part."""


class Envelope(NamedTuple):
    """Description of a message.

    Attributes:
        source: rank that sent it.
        tag: tag of the message.
        nbytes: length of the whole message, also if the receive had less memory.
    """

    source: int
    tag: int
    nbytes: int


class Posted(Protocol):
    """A send or a receive in flight. The caller must not touch its memory before it has ended.

    Attributes:
        done: whether it has ended: it is over, cancelled, or has failed.
        whole: whether it is over, and its memory has the whole message.
        state: one of the states above.
        source: rank that sends the message; before a receive has matched, the rank that it names.
        to: rank that the message is sent to; negative for a receive.
        tag: the engine's tag.
        nbytes: length of the message; 0 as long as it is unknown.
        room: length of the memory of a receive.
        data: memory of a received message for which none was passed; else None.
        damage: if it has failed, the reason.
    """

    @property
    def done(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def state(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def to(self) -> int: ...
    @property
    def tag(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def room(self) -> int: ...
    @property
    def data(self) -> Any: ...
    @property
    def damage(self) -> str | None: ...


class InFlight(Protocol):
    """What is in flight without a thread, and moves while this process waits for anything."""

    def busy(self) -> bool:
        """Return whether operations are in flight."""

    def progress(self) -> None:
        """Do all that is possible without waiting."""

    def deliver(self, deadline: Deadline) -> None:
        """Wait until the posted sends have left, or until they cannot leave any more."""

    def disown(self) -> None:
        """Touch the connections no more, in a forked child: they belong to its parent."""


class Engine(InFlight, Protocol):
    """Posted messages of one rank, over the connections of its transport.

    A message matches a receive if ``message.tag & mask == tag``.
    """

    def send(self, data: Any, to: int, tag: int, /) -> Posted:
        """Post a send of a buffer of bytes (None: no bytes); ``to`` may be this rank.

        Returns ``NotImplemented`` if the communicator is broken or closed; see :meth:`refuse`.
        """

    def receive(self, memory: Any, source: int, tag: int, mask: int, wait: bool, /) -> Posted:
        """Post a receive into a buffer; if ``memory`` is None, into memory of the engine.

        Args:
            wait: whether the caller is about to wait for it, so that the engine may do so for a
                moment.

        Returns ``NotImplemented`` as :meth:`send`.
        """

    def find(self, source: int, tag: int, mask: int, take: bool, /) -> Posted | None:
        """Return a message that no receive has got yet, or None.

        Args:
            take: if true, no receive gets it any more: it belongs to the caller. If its sender has
                only announced it, the result is None until its bytes are there.
        """

    def cancel(self, posted: Any, /) -> bool:
        """Withdraw a receive; return False if it has a message already."""

    def wait(self, items: Sequence[Any], any_of: bool, deadline: Deadline | float) -> None:
        """Wait until all operations have ended, or any one of them.

        Raises:
            CollectiveTimeoutError, PeerLostError, CommunicatorAbortedError: as every call.
        """

    def wait_until(
        self, ready: Callable[[], bool], source: int, tag: int, deadline: Deadline | float
    ) -> None:
        """Wait until ``ready()`` has found a message; see :meth:`wait`."""

    def refuse(self, where: object) -> None:
        """Raise the reason why the communicator is broken or closed."""

    def explain(self, posted: Any) -> NoReturn:
        """Raise the error of an operation that has failed."""


_Used = TypeVar("_Used", bound=InFlight)

# The engines that have posted operations, or those who use them, of all communicators.
_used: weakref.WeakSet[InFlight] = weakref.WeakSet()


def use(engine: _Used) -> _Used:
    """Let all waits of this process move what is in flight in an engine; return the engine."""
    _used.add(engine)
    return engine


def engines_in_use() -> list[InFlight]:
    """Return the engines that have posted operations."""
    return list(_used)


def progress_all() -> bool:
    """Move the operations of all engines in use; return whether some are still in flight.

    A wait calls this now and then, whatever it waits for: otherwise a peer could wait for a posted
    operation of this rank before it does what this rank waits for.
    """
    busy = False
    for engine in engines_in_use():
        if engine.busy():
            with contextlib.suppress(CollectiveError):  # the operation's own wait raises it
                engine.progress()
            busy = True
    return busy


def _disown() -> None:
    for engine in engines_in_use():
        engine.disown()
    _used.clear()


os.register_at_fork(after_in_child=_disown)
