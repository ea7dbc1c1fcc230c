"""Waits that Gloo cannot interrupt: watched by a thread, or made by one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from collective.deadline import Deadline

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel, Wait

__all__ = ["Blocked", "Elsewhere", "watched"]

# How often the waits are looked at, and how old one is when it is first looked at.
_TICK_S = 0.05


class Blocked:
    """One call that is about to block in Gloo.

    Args:
        channel: the communicator's.
        where: the operation, for errors.
        deadline: the call's.
        awaited: the ranks that it takes; None where the whole call depends on more of them.

    Attributes:
        error: why the wait was ended.
    """

    __slots__ = ("_channel", "_since", "_wait", "awaited", "deadline", "error", "where")

    def __init__(
        self,
        channel: Channel,
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None,
    ) -> None:
        self.where = where
        self.deadline = deadline
        self.awaited = awaited
        self.error: BaseException | None = None
        self._channel = channel
        self._since = time.monotonic()
        self._wait: Wait | None = None

    def wait(self) -> Wait:
        """Return the rest of the wait."""
        return self._channel.wait(self.where, self.deadline, self.awaited)

    def look(self, now: float) -> None:
        """End the wait if there is a reason to, by breaking the communicator."""
        if now - self._since < _TICK_S or self.error is not None:
            return
        try:
            self._wait = self._wait or self.wait()
            self._wait.check()
        except Exception as error:  # broken; raised by whoever waits
            self.error = error


class _Watched:
    """The waits of this process, and the thread that looks at them while there are any.

    A message cannot be waited for in slices: a wait that times out closes Gloo's
    connections. So the thread that wants it blocks until it is there, and this one keeps
    an eye on deadlines, stalls and peers. It costs a message about a microsecond.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew: a forked child has neither the thread nor the waits."""
        self._waits: dict[Blocked, None] = {}
        self._wake = threading.Event()
        self._asleep = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def add(self, wait: Blocked) -> None:
        """Look after ``wait`` from now on."""
        self._waits[wait] = None
        if self._asleep:
            self._wake.set()
        elif self._thread is None:
            self._start()

    def remove(self, wait: Blocked) -> None:
        """Forget ``wait``."""
        del self._waits[wait]

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="collective-gloo-watch", daemon=True
                )
                self._thread.start()

    def _serve(self) -> None:
        while True:
            self._wake.clear()
            self._asleep = True
            # In this order: whoever adds after it has seen _asleep wakes us.
            if not self._waits:
                self._wake.wait()
            self._asleep = False
            time.sleep(_TICK_S)
            self._look()

    def _look(self) -> None:
        # Not in _serve, whose variables stay while it sleeps: the last call that it looked at, and
        # with that the communicator and its connections.
        now = time.monotonic()
        for wait in self._waits.copy():
            wait.look(now)


class Elsewhere:
    """A function that runs in another thread of this process, which may never come back.

    Args:
        function: what blocks.

    Attributes:
        over: locked until it has returned or raised.
        error: the RuntimeError that it raised.
    """

    __slots__ = ("error", "function", "over")

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.error: RuntimeError | None = None
        self.over = threading.Lock()
        self.over.acquire()
        try:
            jobs = _idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(
                target=_serve, args=(jobs,), name="collective-gloo-wait", daemon=True
            ).start()
        jobs.put(self)


# The queues of the threads that have nothing to do.
_idle: list[SimpleQueue[Elsewhere]] = []


def _serve(jobs: SimpleQueue[Elsewhere]) -> None:
    while True:
        job = jobs.get()
        try:
            job.function()
        except RuntimeError as error:
            job.error = error
        # First this, or whoever waits would find no thread for what comes next.
        _idle.append(jobs)
        job.over.release()
        del job  # it holds the caller's arrays


watched = _Watched()
os.register_at_fork(after_in_child=watched.begin)
os.register_at_fork(after_in_child=_idle.clear)
