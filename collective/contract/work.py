"""Handles of operations that may still run."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, CommunicatorClosedError
from collective.request import in_thread

from .copying import NotCopied

__all__ = ["Lane", "Work", "all_idle"]

T = TypeVar("T")


class Work(NotCopied, Generic[T]):
    """An operation on its way, as returned with ``async_op=True``.

    Buffers of the operation must not be touched until :meth:`wait` has returned. Until the
    operation is over NumPy refuses to resize them, and the old storage of a tensor stays alive.
    """

    instead = "Copy what wait() returns."

    def __init__(self, what: str) -> None:
        self._what = what
        self._over = False
        # Set with it; only if a thread is to run the operation, as it takes long to make.
        self._finished: threading.Event | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._held: object = None

    @classmethod
    def finished(cls, what: str, result: T) -> Work[T]:
        """Return an operation that is over, well."""
        work = cls(what)
        work._run(lambda: result)
        return work

    def wait(self, timeout: float | None = None) -> T:
        """Wait until the operation is over and return its result.

        Args:
            timeout: seconds; None waits for as long as the operation's own deadline
                allows. A wait that times out cancels nothing: wait again.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed and the operation still runs.
            CollectiveError: whatever the operation itself raised.
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
        """Wait until the result may be read by the host; as :meth:`wait`, but for arrays of GPUs.

        There :meth:`wait` makes the caller's current stream wait, and not the host.
        """
        return self.wait(timeout)

    def done(self) -> bool:
        """Tell whether the operation is over, well or badly, without waiting."""
        return self._over

    def exception(self) -> BaseException | None:
        """Return what the operation raised, or None if it is running or went well."""
        return self._error

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._result = function()
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._end()

    def _end(self) -> None:
        """Tell that it is over, once what came of it is there."""
        self._over = True
        self._held = None
        if self._finished is not None:
            self._finished.set()

    def keep(self, held: object) -> None:
        """Keep a reference until the operation is over: to what holds the memory of its arrays."""
        self._held = held
        if self._over:  # maybe since before, and then nobody else lets go of it
            self._held = None

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._error else "done"
        return f"<Work {self._what}: {state}>"


# How long an idle lane keeps its thread: longer than a training step, so that a
# loop does not start one a step.
_LINGER_S = 5.0

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


class Lane:
    """Runs functions one after the other, in the order of submission, in a thread.

    The thread starts with the first submission and leaves after some idle seconds. It
    is a daemon: an interpreter that wants to exit is not held up by a peer that never
    comes.

    Attributes:
        queue: what is to be run, each with its function; the first one may be running. For reading:
            the lane is idle when it is empty.
    """

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
        """Queue ``function``; ``what`` names it in error texts. ``work`` is what it becomes."""
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
        """Wait until the lane is idle; return whether it is before ``deadline``."""
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
        """Wait until the lane is idle, or until ``deadline``, and see its thread off."""
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
                    in_thread.site = None  # C's does not end with the thread
                    return
                work, function = self.queue[0]
            # No reference to the call may outlive it: it holds the user's arrays.
            try:
                work._run(function)
            finally:
                with self._condition:
                    del self.queue[0]
                del work, function

    def _disown(self) -> None:
        """Begin anew in a forked child: what runs is the parent's, as are thread and lock."""
        works = [work for work, _ in self.queue]
        self._begin()
        for work in works:
            work._error = CommunicatorClosedError(
                f"{work._what}: it runs in the process that this one (pid {os.getpid()}) was "
                "forked from, which alone can wait for it. Start processes with the method "
                "'spawn', or wait before they are forked."
            )
            # Not _end(): a thread of the parent's may have held its lock.
            work._over = True


def all_idle() -> bool:
    """Tell whether no lane of this process has anything to do."""
    return all(lane.idle for lane in list(_lanes))


def _disown() -> None:
    for lane in list(_lanes):
        lane._disown()


os.register_at_fork(after_in_child=_disown)
