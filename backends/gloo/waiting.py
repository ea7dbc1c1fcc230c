"""Waits that Gloo cannot interrupt: another thread waits in place of the caller."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Elsewhere:
    """Run of a function in another thread of this process; the function may never return.

    Args:
        function: the function that blocks.

    Attributes:
        over: lock that the job releases when the function has returned or raised.
        error: the exception that the function raised, or None.
    """

    __slots__ = ("error", "function", "over")

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.error: Exception | None = None
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
        except Exception as error:  # Gloo's, or that of a group which another thread has closed
            job.error = error
        # Become idle before releasing the lock. Otherwise the waiting thread's next job would find
        # no idle thread.
        _idle.append(jobs)
        job.over.release()
        del job  # the job refers to the caller's arrays


os.register_at_fork(after_in_child=_idle.clear)
