"""Waits that Gloo cannot interrupt: another thread watches them, or waits in their place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

from collective.contract.waits import Caller
from collective.deadline import Deadline
from collective.request import in_thread

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.backends.peers.wait import Wait

__all__ = ["Blocked", "Elsewhere", "watched"]

# Seconds between two checks of the waits, and the age of a wait at its first check.
_TICK_S = 0.05


class Blocked:
    """Call that is about to block in Gloo.

    Args:
        channel: channel of the communicator.
        where: the operation, for errors.
        deadline: deadline of the call.
        awaited: the ranks that the call waits for; None if it belongs to a collective, which
            depends on more ranks.

    Attributes:
        error: the error that ended the wait, or None.
    """

    __slots__ = ("_channel", "_since", "_wait", "_who", "awaited", "deadline", "error", "where")

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
        # Another thread makes the wait. A call of caller() would cost every message more.
        site = in_thread.site
        self._who: Caller = threading.get_ident() if site is None else site
        self._wait: Wait | None = None

    def wait(self) -> Wait:
        """Return the channel's wait for the same ranks and deadline."""
        return self._channel.wait(self.where, self.deadline, self.awaited, who=self._who)

    def look(self, now: float) -> None:
        """End the wait by breaking the communicator, if the monitor knows a reason.

        Args:
            now: the present time, by ``time.monotonic()``.
        """
        if now - self._since < _TICK_S or self.error is not None:
            return
        try:
            self._wait = self._wait or self.wait()
            self._wait.check()
        except Exception as error:  # the communicator is broken; the waiting thread raises this
            self.error = error


class _Watched:
    """The waits of this process, and the thread that checks them while there are any.

    No thread can wait for a message in slices: a wait that times out closes Gloo's
    connections. So the calling thread blocks until the message is there, and the watching thread
    checks deadlines, stalls and peers. This costs about a microsecond per message.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the state: a forked child has neither the thread nor the waits."""
        self._waits: dict[Blocked, None] = {}
        self._wake = threading.Event()
        self._asleep = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def add(self, wait: Blocked) -> None:
        """Check ``wait`` regularly from now on."""
        self._waits[wait] = None
        if self._asleep:
            self._wake.set()
        elif self._thread is None:
            self._start()

    def remove(self, wait: Blocked) -> None:
        """Stop checking ``wait``."""
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
            # Look for waits after setting _asleep: a thread that adds a wait later than this check
            # sees _asleep and sets the event.
            if not self._waits:
                self._wake.wait()
            self._asleep = False
            time.sleep(_TICK_S)
            self._look()

    def _look(self) -> None:
        # A separate function, because the variables of _serve stay alive while it sleeps: they
        # would keep the last wait alive, and with it the communicator and its connections.
        now = time.monotonic()
        for wait in self._waits.copy():
            wait.look(now)


class Elsewhere:
    """Run of a function in another thread of this process; the function may never return.

    Args:
        function: the function that blocks.

    Attributes:
        over: lock that the job releases when the function has returned or raised.
        error: the RuntimeError that the function raised, or None.
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


# The queues of the idle threads.
_idle: list[SimpleQueue[Elsewhere]] = []


def _serve(jobs: SimpleQueue[Elsewhere]) -> None:
    while True:
        job = jobs.get()
        try:
            job.function()
        except RuntimeError as error:
            job.error = error
        # Become idle before releasing the lock. Otherwise the waiting thread's next job would find
        # no idle thread.
        _idle.append(jobs)
        job.over.release()
        del job  # the job refers to the caller's arrays


watched = _Watched()
os.register_at_fork(after_in_child=watched.begin)
os.register_at_fork(after_in_child=_idle.clear)
