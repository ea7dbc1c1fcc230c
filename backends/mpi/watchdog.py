"""Ends a process whose thread MPI will never give back.

A blocking MPI call waits for its peers and for nothing else. They were all there when it
began, so it ends, unless one dies in the middle, is stopped, or fails on the way: then it
never does. ``mpiexec`` ends such jobs by itself, when it notices.

Open MPI with ULFM returns from it, if those who are out of it let it: a rank that sends a long
message to one that has left with an error hears so from that one's MPI, which does nothing outside
of MPI's calls. So this thread makes one now and then, once somebody is lost.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from collective.contract.failure import Failure
from collective.deadline import Deadline

from .library import waiting

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel

__all__ = ["Blocking", "agreed", "watch"]

# How often it is looked at the calls, and how long one may take once the communicator is
# broken: by a death, which it cannot survive, or otherwise, when it may yet end by itself.
_LOOK_S = 0.25
# How often MPI is called for those who are still in a call that this rank has left.
_ATTEND_S = 0.001
_LOST_S = 1.0
_BROKEN_S = 10.0


class Blocking:
    """The blocking calls of one communicator.

    Attributes:
        running: the call that is running, else None.
        deadline: its deadline; set before.
        revocable: whether MPI may be asked to give up. Open MPI 5.0.11 sends the others this
            rank's number of the communicator, by which they break another of theirs where ranks
            number it differently, as they do one that is made of a group
            (:func:`.transport.assembled`); it ended processes, too.
        lasting: whether MPI returns from a call when a peer has died, as it hears of it: on a busy
            host that can be a second after the monitor has.
    """

    __slots__ = (
        "__weakref__", "_broken_at", "_broken_since", "_seen", "channel", "comm", "deadline",
        "lasting", "module", "revocable", "running",
    )  # fmt: skip

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        self.module = module
        self.comm = comm
        self.channel = channel
        self.running: object = None
        self.revocable = True
        self.lasting = False
        self.deadline = Deadline.never()
        self._broken_at = 0.0
        self._seen: Deadline | None = None
        self._broken_since = 0.0

    def look(self) -> None:
        """End the process if the running call will not end."""
        call, deadline = self.running, self.deadline
        if call is None:
            return
        now = time.monotonic()
        failure = self.channel.failure
        if failure is not None and deadline is not self._seen:
            self._seen, self._broken_since = deadline, now
            self.revoke()
        elif failure is not None:
            patience = _LOST_S if failure.kind == "lost" and not self.lasting else _BROKEN_S
            if now - self._broken_since > patience:
                self._exit(call, deadline, failure)
        elif deadline.expired:
            text = "timed out: waited for MPI, in the middle of its operation, until the deadline"
            late = Failure("timeout", self.channel.rank, text)
            self.channel.abort(late)
            self.channel.await_heard(range(self.channel.size))
            self._exit(call, deadline, late)

    def attend(self) -> bool:
        """Have MPI answer whoever is still in a call that has broken; return whether to go on.

        What arrives for a communicator in which somebody has died, or that was revoked, MPI sends
        back, and the sender's call returns.
        """
        self._broken_at = self._broken_at or time.monotonic()
        with contextlib.suppress(self.module.Exception), waiting() as pause_for_good:
            pause_for_good()
            self.module.COMM_SELF.Iprobe()
        # Then the others' watchdogs have ended what would not end.
        return time.monotonic() - self._broken_at < _BROKEN_S

    def broken(self) -> None:
        """Have it looked at once, now that the communicator is broken."""
        if self.lasting:
            with _lock:
                _attended.add(self)
        _news.set()

    def revoke(self) -> None:
        """Ask MPI to give up: what Open MPI does if started with ``--with-ft ulfm``.

        Whoever is in a call returns from it, on all ranks. It waits for nobody.
        """
        if self.revocable and self.module.get_vendor()[0] == "Open MPI":
            with contextlib.suppress(self.module.Exception, NotImplementedError):
                self.comm.Revoke()

    def _exit(self, call: object, deadline: Deadline, failure: Failure) -> None:
        # It may have ended at the last moment, and the next call of the same kind have begun.
        if self.running is not call or self.deadline is not deadline:
            return
        error = failure.error(str(call), self.channel.rank)
        instead = "(Open MPI reports errors instead, if started with mpiexec --with-ft ulfm.)"
        sys.stderr.write(
            f"collective: {type(error).__name__}: {error}\n"
            f"collective: rank {self.channel.rank} is inside MPI's own operation, out of which "
            "nobody can call it back: the process ends here, with exit code 1."
            f"{'' if self.lasting else f' {instead}'}\n"
        )
        sys.stderr.flush()
        # The main thread is inside MPI, and runs no handlers at exit; and of these MPI_Finalize
        # would wait for the others.
        os._exit(1)


_lock = threading.Lock()
_watched: weakref.WeakSet[Blocking] = weakref.WeakSet()
# Those that others may wait for, though the program here has closed and dropped them.
_attended: set[Blocking] = set()
# How many threads want to be alone with MPI.
_alone = 0
_thread: threading.Thread | None = None
# A communicator has broken: it is looked at once.
_news = threading.Event()


def watch(blocking: Blocking) -> None:
    """Look after ``blocking`` for as long as it lives."""
    global _thread
    blocking.channel.when_broken(blocking.broken)
    with _lock:
        _watched.add(blocking)
        if _thread is None:
            _thread = threading.Thread(target=_serve, name="collective-mpi-watchdog", daemon=True)
            _thread.start()
    if blocking.channel.failure is not None:  # before anything could be told of it
        blocking.broken()


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Call MPI for nobody while the ranks that have agreed to go on make what they go on with.

    They are out of all calls that have broken; and Open MPI waits for ever now and then where a
    thread makes a communicator and another one calls it meanwhile.
    """
    global _alone
    with _lock:
        _alone += 1
    try:
        yield
    finally:
        with _lock:
            _attended.clear()
            _alone -= 1


def _serve() -> None:
    global _thread
    pause = _LOOK_S
    while True:
        _news.wait(pause)
        _news.clear()
        with _lock:
            if not _watched:
                _thread = None
                return
        pause = _ATTEND_S if _look_at_all() else _LOOK_S


def _look_at_all() -> bool:
    """Hold no reference between looks: what is dropped goes.

    Returns:
        Whether MPI is to be called again soon.
    """
    with _lock:
        watched = list(_watched)
        attended = [] if _alone else list(_attended)
    for blocking in watched:
        blocking.look()
    over = [blocking for blocking in attended if not blocking.attend()]
    with _lock:
        _attended.difference_update(over)
        return bool(_attended) and not _alone
