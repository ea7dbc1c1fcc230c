"""Listeners of a communicator's calls: the trace, and the hooks of programs.

The methods of a listener run in the thread that makes the call, which may be a lane's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from collective.contract.work import Lane

if TYPE_CHECKING:
    from collective.request import Request

    from .communicator import Communicator

T = TypeVar("T")
#: Function that breaks the communicator, and sends the error to the peers.
Fail = Callable[[BaseException], None]


class CallEvent(NamedTuple):
    """One call that is about to reach the transport.

    Attributes:
        operation: ``"all_reduce"``, …, ``"send"``, ``"recv"``, ``"sendrecv"``.
        nbytes: size of the larger of this rank's two buffers, in bytes; -1 for a receive, whose
            size is not known yet.
        request: request that all ranks must agree on; None for messages.
        number: number of this collective call on its communicator, from 1; 0 for messages.
        compares: whether the ranks' calls are only compared, and no data is moved.
        dst, src, tag: destination, source and tag of a message; else None. A ``sendrecv`` to or
            from :data:`collective.NULL` has None there.
    """

    operation: str
    nbytes: int
    request: Request | None = None
    number: int = 0
    compares: bool = False
    dst: int | None = None
    src: int | None = None
    tag: int | None = None


class Listener:
    """Base class of listeners; its methods do nothing."""

    def before(self, event: CallEvent) -> None:
        """Handle the beginning of a call."""

    def after(self, event: CallEvent, error: BaseException | None) -> None:
        """Handle the end of a call; ``error`` is the exception that it raised, or None."""

    def arrives(self, nbytes: int) -> None:
        """Handle the arrival of the first part of a message, which contains its length."""

    def group(self, child: Communicator, ranks: Sequence[int]) -> None:
        """Handle that ``child``, a communicator among ``ranks``, was made from this one."""

    def close(self) -> None:
        """Handle the closing of the communicator."""

    def lane(self, name: str) -> Lane | None:
        """Return a lane with a thread of that name, for calls in the background.

        Return None if an ordinary lane will do.
        """
        return None


class Hook(Listener):
    """Listener that calls two functions of a program."""

    def __init__(
        self,
        before: Callable[[CallEvent], Any] | None,
        after: Callable[[CallEvent, BaseException | None], Any] | None,
    ) -> None:
        self._before = before
        self._after = after

    def before(self, event: CallEvent) -> None:
        if self._before is not None:
            self._before(event)

    def after(self, event: CallEvent, error: BaseException | None) -> None:
        if self._after is not None:
            self._after(event, error)


class Listeners:
    """Listeners of one communicator, in the order in which they were added.

    If a listener raises, the communicator must break. Otherwise the peers would wait for this
    rank's part of the call, or continue without knowing that the call has failed here. The caller
    passes a function ``fail``, which breaks the communicator and sends the error to the peers.

    Attributes:
        all: the listeners; empty if there are none.
    """

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> None:
        """Notify ``listener`` of every call from now on."""
        self.all = (*self.all, listener)

    def remove(self, listener: Listener) -> None:
        """Stop notifying ``listener``."""
        self.all = tuple(other for other in self.all if other is not listener)

    def lane(self, name: str) -> Lane:
        """Return the lane of the first listener that has one, or an ordinary lane."""
        lanes = (listener.lane(name) for listener in self.all)
        return next((lane for lane in lanes if lane is not None), None) or Lane(name)

    def around(self, event: CallEvent, call: Callable[[], T], fail: Fail) -> T:
        """Make a call, and notify the listeners before and after it."""
        begun: list[Listener] = []
        try:
            self._before(event, begun, fail)
            result = call()
        except BaseException as error:
            self._after(begun, event, error, fail)
            raise
        self._after(begun, event, None, fail)
        return result

    def message_arrives(self, nbytes: int, fail: Fail) -> None:
        """Notify the listeners of the length of a message whose first part has arrived."""
        try:
            for listener in self.all:
                listener.arrives(nbytes)
        except BaseException as error:
            fail(error)
            raise

    def _before(self, event: CallEvent, begun: list[Listener], fail: Fail) -> None:
        """Notify the listeners that a call begins; add to ``begun`` those that have not raised."""
        try:
            for listener in self.all:
                listener.before(event)
                begun.append(listener)
        except BaseException as error:
            fail(error)
            raise

    def _after(
        self, begun: list[Listener], event: CallEvent, error: BaseException | None, fail: Fail
    ) -> None:
        """Notify all of ``begun`` that a call is over, the last one first.

        If a listener raises, the remaining listeners are notified nevertheless. The call's own
        error and the errors of several listeners are chained by ``__context__``.
        """
        while begun:
            try:
                begun.pop().after(event, error)
            except BaseException as raised:
                fail(raised)
                self._after(begun, event, error, fail)
                raise
