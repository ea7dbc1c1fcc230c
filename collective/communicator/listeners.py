"""The listeners of one communicator, and what happens when one of them raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from collective.contract.work import Lane

from .listener import CallEvent, Listener

__all__ = ["Listeners"]

T = TypeVar("T")
#: Breaks the communicator, and tells the peers the error.
Fail = Callable[[BaseException], None]


class Listeners:
    """Listeners of one communicator, in the order in which they came.

    A listener that raises breaks the communicator: the peers wait for this rank's part of the call,
    or go on without knowing that the call has failed here.

    The caller says how: ``fail`` breaks the communicator, and tells the peers an error.

    Attributes:
        all: the listeners; empty if nobody listens.
    """

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> None:
        """Tell ``listener`` of every call from now on."""
        self.all = (*self.all, listener)

    def remove(self, listener: Listener) -> None:
        """Tell ``listener`` of no call any more."""
        self.all = tuple(other for other in self.all if other is not listener)

    def lane_of_messages(self, name: str) -> Lane:
        """Return a lane for messages: of the first listener that has its own, or a usual one."""
        lanes = (listener.lane(name, messages=True) for listener in self.all)
        return next((lane for lane in lanes if lane is not None), None) or Lane(name)

    def around(self, event: CallEvent, call: Callable[[], T], fail: Fail) -> T:
        """Make a call, and tell the listeners before and after it."""
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
        """Tell the listeners the length of a message whose first part has come."""
        try:
            for listener in self.all:
                listener.arrives(nbytes)
        except BaseException as error:
            fail(error)
            raise

    def _before(self, event: CallEvent, begun: list[Listener], fail: Fail) -> None:
        """Tell the listeners that a call begins; note in ``begun`` those that have not raised."""
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
        """Tell all of ``begun`` that a call is over, the last first, also if one of them raises.

        The call's own error, and those of several listeners, are each other's ``__context__``.
        """
        while begun:
            try:
                begun.pop().after(event, error)
            except BaseException as raised:
                fail(raised)
                self._after(begun, event, error, fail)
                raise
