"""Posted messages of a transport: the engine in C, or that of :mod:`.matching`, and their waits."""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from collective.contract.backend import ANY_SOURCE
from collective.contract.process import forked_from
from collective.deadline import Deadline
from collective.errors import CollectiveError, CommunicatorClosedError
from collective.native import NOBODY

from .matching import RECEIVING, SENDING, Matcher, Waiter, describe

# The text of a failed operation in C whose connection has ended; see streams.c.
_ENDED = "the connection has ended"
# The text of an operation in C that the end of the communicator has ended; see posted.c.
_CLOSED = "this rank has closed the communicator"


class BaseMail(ABC):
    """What all engines share: waiting for one operation after the other."""

    refuse: Any  # function that raises if the communicator is broken or closed
    _wait: Any  # function that waits for what _advancing() returns
    _why: CollectiveError | None = None  # error of the operations that close() ends

    def wait(self, items: Sequence[Any], any_of: bool, deadline: Deadline | float) -> None:
        """Wait for operations; see :meth:`collective.contract.mail.Engine.wait`."""
        if self._step(items, any_of, 0.0):
            return
        deadline = Deadline.of(deadline)
        if any_of:
            receives = [item.source for item in items if item.to < 0]
            sources = set(receives)
            source = ANY_SOURCE if len(sources) > 1 else sources.pop() if sources else NOBODY
            to = NOBODY if receives else items[0].to
            tag = items[0].tag
            self._wait_for(lambda: any(i.done for i in items), items, to, source, tag, deadline)
            return
        for item in items:
            if not item.done:
                source = item.source if item.to < 0 else NOBODY
                ready = partial(getattr, item, "done")
                self._wait_for(ready, (item,), item.to, source, item.tag, deadline)

    def wait_until(
        self, ready: Callable[[], bool], source: int, tag: int, deadline: Deadline | float
    ) -> None:
        """Wait for a message; see :meth:`collective.contract.mail.Engine.wait_until`."""
        self._wait_for(ready, (), NOBODY, source, tag, Deadline.of(deadline))

    def close(self) -> None:
        """End all operations; their error is the failure that came before, if there is one."""
        try:
            self.refuse("a message in flight")
            self._why = CommunicatorClosedError(
                f"a message in flight: {_CLOSED}. Call close() after its messages have ended."
            )
        except CollectiveError as error:
            self._why = error.with_traceback(None)  # its frames would keep the transport alive
        self._end_all(self._why)

    def _end_all(self, error: CollectiveError) -> None:  # noqa: B027  some end with their levels
        """End all operations with an error."""

    def disown(self) -> None:
        """Touch the connections no more, in a forked child: they belong to its parent."""

        def refuse(*_: object) -> NoReturn:
            raise CommunicatorClosedError(f"messages: {forked_from('a rank')}")

        for name in ("cancel", "explain", "find", "progress", "refuse", "wait", "wait_until"):
            setattr(self, name, refuse)
        self._leave()

    def _leave(self) -> None:  # noqa: B027  some leave their levels
        """Let nobody post any more."""

    def deliver(self, deadline: Deadline) -> None:
        """Wait until the posted sends have left, or until they cannot."""
        if self.queued():
            with contextlib.suppress(CollectiveError):
                self._wait_for(lambda: not self.queued(), (), NOBODY, ANY_SOURCE, 0, deadline)

    def queued(self) -> bool:
        """Return whether sends have not left yet."""
        return False

    @abstractmethod
    def _step(self, items: Sequence[Any], any_of: bool, seconds: float) -> bool:
        """Make progress; return whether all operations are over, or any one of them."""

    def _wait_for(
        self, ready: Callable[[], bool], items: Sequence[Any], to: int, source: int, tag: int,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        pending = RECEIVING if to == NOBODY else SENDING
        self._wait(self._advancing(ready, items, pending), to, source, tag, deadline)

    def _advancing(self, ready: Callable[[], bool], items: Sequence[Any], pending: int) -> Any:
        """Return what makes progress while a transport waits, and returns what is pending."""

        def advance(seconds: float = -1.0) -> int:
            self._step(items, True, seconds)
            return 0 if ready() else pending

        return advance


class PythonMail(BaseMail):
    """Posted messages in Python.

    Args:
        engine: the messages of this rank.
        wait: waits for a :class:`Waiter`; gets also the other ranks, the tag and a deadline.
        refuse: raises if the communicator is broken or closed; gets the call.
        broken: tells whether the communicator is broken or closed, so that nothing is posted.
        explain: returns the error to raise for an operation whose stream has ended.
    """

    def __init__(
        self, engine: Matcher, wait: Callable[[Waiter, int, int, int, Deadline], object],
        refuse: Callable[[object], object], broken: Callable[[], object],
        explain: Callable[[Any], BaseException],
    ) -> None:  # fmt: skip
        self._wait, self.refuse = wait, refuse
        self._engine = engine
        self._broken = broken
        self._explain = explain
        self.find: Any = engine.find
        self.cancel: Any = engine.cancel
        self.progress: Any = engine.progress

    def send(self, data: Any, to: int, tag: int) -> Any:
        """Post a send."""
        return NotImplemented if self._broken() else self._engine.post_send(data, to, tag)

    def receive(self, memory: Any, source: int, tag: int, mask: int, wait: bool) -> Any:
        """Post a receive. ``wait`` is for the engine in C, which waits without leaving C."""
        if self._broken():
            return NotImplemented
        return self._engine.post_receive(memory, source, tag, mask)

    def explain(self, posted: Any) -> NoReturn:
        """Raise the error of an operation that has failed."""
        if self._why is not None and posted.error is self._why:
            raise self._why
        raise self._explain(posted) from posted.error

    def _end_all(self, error: CollectiveError) -> None:
        self._engine.close(error)

    def busy(self) -> bool:
        """Return whether operations are in flight."""
        return self._engine.busy

    def _leave(self) -> None:
        self._broken = lambda: True

    def queued(self) -> bool:
        """Return whether sends have not left yet."""
        return not self._broken() and self._engine.sends

    def _step(self, items: Sequence[Any], any_of: bool, seconds: float) -> bool:
        self._engine.progress()
        return (any if any_of else all)([item.done for item in items])

    def _advancing(self, ready: Callable[[], bool], items: Sequence[Any], pending: int) -> Any:
        return Waiter(self._engine, ready, pending)


class CompiledMail(BaseMail):
    """Posted messages in C.

    Args:
        exchange: function of :func:`collective.native.messages` or of ``native.streams``.
        callbacks: object with the methods that C calls for the messages.
        refuse: as for :class:`PythonMail`.
    """

    def __init__(self, exchange: Any, callbacks: Any, refuse: Callable[[object], object]) -> None:
        self._wait, self.refuse = callbacks.wait, refuse
        self._callbacks = callbacks
        self._messages: Any = exchange.__self__
        # No method in Python stands between a caller and these methods of C.
        self.send: Any = self._messages.send
        self.receive: Any = self._messages.receive
        self.find: Any = self._messages.find
        self.cancel: Any = self._messages.cancel
        self.progress: Any = partial(self._messages.step, (), False, -1.0)
        # In C the messages and the operations in flight refer to each other, where the garbage
        # collector does not look. If all this is dropped, their end breaks the cycle.
        weakref.finalize(self, _end, self._messages, os.getpid()).atexit = False

    def _end_all(self, error: CollectiveError) -> None:
        self._messages.end(True)

    def _leave(self) -> None:
        self._messages.end(None)

    def queued(self) -> bool:
        """Return whether sends have not left yet."""
        return bool(self._messages.end(False)[0])

    def busy(self) -> bool:
        """Return whether operations are in flight."""
        return any(self._messages.end(False))

    def explain(self, posted: Any) -> NoReturn:
        """Raise the error of an operation that has failed."""
        if posted.damage == _CLOSED and self._why is not None:
            raise self._why
        to, source, rank = posted.to, posted.source, max(posted.to, posted.source)
        self.refuse(describe(to, source, posted.tag))
        raises = self._callbacks.ended if posted.damage == _ENDED else self._callbacks.refuse
        raises(rank, posted.damage, to, source, posted.tag)
        raise AssertionError(posted.damage)

    def _step(self, items: Sequence[Any], any_of: bool, seconds: float) -> bool:
        return bool(self._messages.step(tuple(items), any_of, seconds))


def _end(messages: Any, pid: int) -> None:
    """End the operations of messages in C that nobody can wait for any more."""
    if os.getpid() == pid:  # in a forked child, a thread of the parent may have been moving them
        messages.end(True)
