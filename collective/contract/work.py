"""Handles of operations that may still run."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, CommunicatorClosedError
from collective.request import in_thread

from .mail import engines_in_use
from .process import NotCopied

T = TypeVar("T")

#: Names that handles of other libraries have, and what to write instead.
_FOREIGN = {
    "Test": "done()", "Wait": "wait()", "get_future": "wait()", "is_completed": "done()",
    "is_success": "exception(), which returns None after a success", "result": "wait()",
    "test": "done()",
}  # fmt: skip


class Work(NotCopied, Generic[T]):
    """Handle of an operation that may still run, as returned with ``async_op=True``.

    The program must not touch the buffers of the operation until :meth:`wait` has returned. Until
    the operation is over, NumPy refuses to resize the buffers, and the old storage of a tensor
    stays alive.
    """

    instead = "Copy what wait() returns."

    def __init__(self, what: str) -> None:
        self._what = what
        self._over = False
        # Event that is set together with _over. It exists only if a thread runs the operation,
        # because an event takes long to make.
        self._finished: threading.Event | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._held: object = None

    @classmethod
    def finished(cls, what: str, result: T) -> Work[T]:
        """Return the handle of an operation that has succeeded already."""
        work = cls(what)
        work._run(lambda: result)
        return work

    def wait(self, timeout: float | None = None) -> T:
        """Wait until the operation is over and return its result.

        Args:
            timeout: seconds; None waits for as long as the operation's own deadline
                allows. A wait that times out does not cancel the operation: call ``wait`` again.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed and the operation is still running.
            CollectiveError: the error that the operation itself raised.
        """
        finished = self._finished
        if not self._over and finished is not None:
            deadline = Deadline.never() if timeout is None else Deadline(timeout)
            while not finished.wait(deadline.left()):
                if deadline.expired:
                    raise CollectiveTimeoutError(
                        f"wait: timed out: {self._what} is still running after {timeout:g} s; wait "
                        "again, or abort() the communicator."
                    )
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set before _over

    def synchronize(self, timeout: float | None = None) -> T:
        """Wait until the host may read the result, and return it.

        This differs from :meth:`wait` only for GPU arrays: there :meth:`wait` makes the caller's
        current stream wait, and not the host.
        """
        return self.wait(timeout)

    def done(self) -> bool:
        """Tell, without waiting, whether the operation has succeeded or failed."""
        return self._over

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if it is running or has succeeded."""
        return self._error

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._result = function()
        except BaseException as error:  # raised by wait()
            self._error = error
        self._end()

    def _end(self) -> None:
        """Mark the operation as over; the result or the error must be set before."""
        self._over = True
        self._held = None
        if self._finished is not None:
            self._finished.set()

    def keep(self, held: object) -> None:
        """Keep a reference to the owner of the arrays' memory until the operation is over."""
        self._held = held
        # The operation may have ended before _held was set. Then _end() has dropped nothing.
        if self._over:
            self._held = None

    if not TYPE_CHECKING:  # a type checker would conclude that a Work has every name

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _FOREIGN:
                text += f"; use work.{_FOREIGN[name]}"
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"<Work {self._what}: {state}>"


# Seconds that an idle lane keeps its thread: longer than a training step, so that a loop does not
# start a thread in every step.
_LINGER_S = 5.0

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


class Lane:
    """Queue of functions that one thread runs in the order of submission.

    The thread starts with the first submission and ends after some idle seconds. It
    is a daemon thread, so a peer that never comes cannot keep the interpreter from exiting.

    Attributes:
        queue: the submitted operations, each with its function; the first one may be running. Other
            modules only read the queue: the lane is idle when it is empty.
        delivers: whether other ranks need the operations, which is not so if they only receive.
    """

    delivers = True

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()
        _lanes.add(self)

    def _begin(self) -> None:
        self._condition = threading.Condition()
        self.queue: list[tuple[Work[Any], Callable[[], Any]]] = []
        self._thread: threading.Thread | None = None
        self._linger = _LINGER_S

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self.queue

    def submit(self, what: str, function: Callable[[], T], work: Work[T] | None = None) -> Work[T]:
        """Queue ``function`` and return its handle.

        Args:
            what: name of the operation in error texts.
            function: the function to run.
            work: the handle; None makes a new one.
        """
        work = work or Work(what)
        work._finished = threading.Event()
        with self._condition:
            self.queue.append((work, function))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify()
        return work

    def drain(self, deadline: Deadline) -> bool:
        """Wait until the lane is idle; return False if it is still busy at ``deadline``."""
        while not self.idle:
            with self._condition:
                last = self.queue[-1][0] if self.queue else None
            if last is None:
                continue
            assert last._finished is not None
            if not last._finished.wait(deadline.left()) and deadline.expired:
                return False
        return True

    def close(self, deadline: Deadline) -> None:
        """Wait until the lane is idle, or until ``deadline``, and end its thread."""
        idle = self.drain(deadline)
        with self._condition:
            self._linger = 0.0
            self._condition.notify()
            thread = self._thread
        if idle and thread is not None:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._condition:
                if not self.queue and self._linger:
                    self._condition.wait_for(lambda: self.queue or not self._linger, self._linger)
                if not self.queue:
                    self._thread = None
                    in_thread.site = None  # the slot in C outlives the thread
                    return
                work, function = self.queue[0]
            # Drop every reference to the call when it is over: the call holds the user's arrays.
            try:
                work._run(function)
            finally:
                with self._condition:
                    del self.queue[0]
                del work, function

    def _disown(self) -> None:
        """Reset the lane in a forked child.

        The queued operations, the thread and the lock belong to the parent process.
        """
        works = [work for work, _ in self.queue]
        self._begin()
        for work in works:
            work._error = CommunicatorClosedError(
                f"{work._what}: this process (pid {os.getpid()}) was forked from the one that runs "
                "the operation, and only that one can wait for it. Start processes with the method "
                "'spawn', or call wait() before the fork."
            )
            # Do not call _end(), which sets the event: a thread of the parent process may have held
            # the lock of that event during the fork.
            work._over = True


def deliver(lanes: Iterable[Lane] | None, deadline: Deadline) -> None:
    """Wait for operations that other ranks need, at the end of a program that waits for none.

    Operations that only receive are left alone: nobody will read what they receive, and perhaps no
    rank sends it.

    Args:
        lanes: the lanes; None for all of this process.
        deadline: moment at which to stop waiting.
    """
    for lane in list(_lanes if lanes is None else lanes):
        if lane.delivers:
            lane.drain(deadline)
    for engine in engines_in_use() if lanes is None else ():
        engine.deliver(deadline)


def all_idle(receives: bool = False) -> bool:
    """Tell whether all lanes of this process are idle, and no posted message is in flight.

    Args:
        receives: whether the caller waits for a posted message, so that these do not count.
    """
    lanes_are = all(lane.idle for lane in list(_lanes))
    return lanes_are and (receives or not any(engine.busy() for engine in engines_in_use()))


def _disown() -> None:
    for lane in list(_lanes):
        lane._disown()


os.register_at_fork(after_in_child=_disown)
