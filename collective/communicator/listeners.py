"""Listeners of one communicator, and the handling of their exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from collective.contract.work import Lane

from .listener import CallEvent, Listener

__all__ = ["Listeners"]

T = TypeVar("T")
#: Function that breaks the communicator, and sends the error to the peers.
Fail = Callable[[BaseException], None]


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

    def lane_of_messages(self, name: str) -> Lane:
        """Return a lane for messages: that of the first listener that has one, or a new lane."""
        lanes = (listener.lane(name, messages=True) for listener in self.all)
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
