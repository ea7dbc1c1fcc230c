"""Ends a process whose thread MPI will never give back.

A blocking MPI call waits for its peers and for nothing else. They were all there when it
began, so it ends, unless one dies in the middle, is stopped, or fails on the way: then it
never does. ``mpiexec`` ends such jobs by itself, when it notices.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from collective.contract.failure import Failure

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel

__all__ = ["TELL_S", "Blocking", "watch"]

# How often it is looked at the calls, and how long one may take once the communicator is
# broken: by a death, which it cannot survive, or otherwise, when it may yet end by itself.
_LOOK_S = 0.25
_LOST_S = 1.0
_BROKEN_S = 10.0
#: How long this rank's peers may take to hear why it goes.
TELL_S = 0.1


class Blocking:
    """The blocking calls of one communicator.

    Attributes:
        running: the call that is running, else None.
        end: its deadline, on the clock of ``time.monotonic()``; set before.
    """

    __slots__ = (
        "__weakref__", "_broken_since", "_seen", "channel", "comm", "end", "module", "running",
    )  # fmt: skip

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        self.module = module
        self.comm = comm
        self.channel = channel
        self.running: object = None
        self.end = 0.0
        self._seen = 0.0
        self._broken_since = 0.0

    def look(self) -> None:
        """End the process if the running call will not end."""
        call, end = self.running, self.end
        if call is None:
            return
        now = time.monotonic()
        failure = self.channel.failure
        if failure is not None and end != self._seen:
            self._seen, self._broken_since = end, now
            self._revoke()
        elif failure is not None:
            patience = _LOST_S if failure.kind == "lost" else _BROKEN_S
            if now - self._broken_since > patience:
                self._exit(call, end, failure)
        elif now > end:
            text = "timed out: waited for MPI, in the middle of its operation, until the deadline"
            late = Failure("timeout", self.channel.rank, text)
            self.channel.abort(late)
            time.sleep(TELL_S)
            self._exit(call, end, late)

    def _revoke(self) -> None:
        """Ask MPI to give up: what Open MPI does if started with ``--with-ft ulfm``."""
        if self.module.get_vendor()[0] == "Open MPI":
            with contextlib.suppress(self.module.Exception, NotImplementedError):
                self.comm.Revoke()

    def _exit(self, call: object, end: float, failure: Failure) -> None:
        if self.running is not call or self.end != end:
            return
        error = failure.error(str(call), self.channel.rank)
        sys.stderr.write(
            f"collective: {type(error).__name__}: {error}\n"
            f"collective: rank {self.channel.rank} is inside MPI's own operation, out of which "
            "nobody can call it back: the process ends here, with exit code 1. (Open MPI reports "
            "errors instead, if started with mpiexec --with-ft ulfm.)\n"
        )
        sys.stderr.flush()
        os._exit(1)


_lock = threading.Lock()
_watched: weakref.WeakSet[Blocking] = weakref.WeakSet()
_thread: threading.Thread | None = None


def watch(blocking: Blocking) -> None:
    """Look after ``blocking`` for as long as it lives."""
    global _thread
    with _lock:
        _watched.add(blocking)
        if _thread is None:
            _thread = threading.Thread(target=_serve, name="collective-mpi-watchdog", daemon=True)
            _thread.start()


def _serve() -> None:
    global _thread
    while True:
        time.sleep(_LOOK_S)
        with _lock:
            if not _watched:
                _thread = None
                return
        _look_at_all()


def _look_at_all() -> None:
    """Hold no reference between looks: what is dropped goes."""
    with _lock:
        watched = list(_watched)
    for blocking in watched:
        blocking.look()
