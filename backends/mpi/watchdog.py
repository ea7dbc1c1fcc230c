"""A watchdog, which ends a process whose thread will never return from MPI.

A blocking MPI call waits for its peers and for nothing else. All peers were there when the call
began, so normally the call ends. If a peer dies in the middle, is stopped, or fails on the way, the
call never ends. ``mpiexec`` ends such jobs by itself, when it notices.

Open MPI with ULFM returns from the call, if the ranks that have left the call cooperate. Suppose a
rank sends a long message to a peer that has left the call with an error. Only MPI in the peer's
process can report that to the sender. MPI works only inside its calls, so this thread calls MPI now
and then, once a rank is lost.
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

# Pause between two looks at the running calls.
_LOOK_S = 0.25
# Pause between two calls of MPI for ranks that are still in a call that this rank has left.
_ATTEND_S = 0.001
# How long a call may still run once its communicator is broken. After the death of a rank the call
# cannot end. After another failure it may yet end by itself.
_LOST_S = 1.0
_BROKEN_S = 10.0


class Blocking:
    """The blocking calls of one communicator.

    Attributes:
        running: the call that is running, or None.
        deadline: deadline of the running call; it is set before ``running``.
        revocable: whether this rank may revoke the communicator. Open MPI 5.0.11 sends this rank's
            number of the communicator to the other ranks. Ranks number a communicator that is made
            of a group differently (:func:`.transport.assembled`), so they would break another
            communicator. Open MPI also ended processes then.
        lasting: whether MPI returns from a call once it has noticed that a peer has died. On a busy
            host MPI can notice that a second later than the monitor.
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
        """Let MPI answer ranks that are still in a broken call; return whether to go on.

        If a message arrives for a communicator that was revoked, or in which a rank has died, MPI
        sends the message back, and the sender's call returns.
        """
        self._broken_at = self._broken_at or time.monotonic()
        with contextlib.suppress(self.module.Exception), waiting() as pause_for_good:
            pause_for_good()
            self.module.COMM_SELF.Iprobe()
        # After this time the watchdogs of the other ranks have ended the processes that still hang.
        return time.monotonic() - self._broken_at < _BROKEN_S

    def broken(self) -> None:
        """Wake the watchdog, because the communicator is now broken."""
        if self.lasting:
            with _lock:
                _attended.add(self)
        _news.set()

    def revoke(self) -> None:
        """Ask MPI to give up, as Open MPI does if it was started with ``--with-ft ulfm``.

        Then all ranks return from their calls on the communicator. This function waits for nobody.
        """
        if self.revocable and self.module.get_vendor()[0] == "Open MPI":
            with contextlib.suppress(self.module.Exception, NotImplementedError):
                self.comm.Revoke()

    def _exit(self, call: object, deadline: Deadline, failure: Failure) -> None:
        # The call may have ended at the last moment, and a next call of the same kind may have
        # begun.
        if self.running is not call or self.deadline is not deadline:
            return
        error = failure.error(str(call), self.channel.rank)
        instead = "(Open MPI reports errors instead, if started with mpiexec --with-ft ulfm.)"
        sys.stderr.write(
            f"collective: {type(error).__name__}: {error}\n"
            f"collective: rank {self.channel.rank} is inside an operation of MPI, and "
            "nobody can call it back: the process ends here, with exit code 1."
            f"{'' if self.lasting else f' {instead}'}\n"
        )
        sys.stderr.flush()
        # The main thread is inside MPI, so it cannot run the handlers at exit. One of these,
        # MPI_Finalize, would wait for the other ranks anyway.
        os._exit(1)


_lock = threading.Lock()
_watched: weakref.WeakSet[Blocking] = weakref.WeakSet()
# Broken communicators in which other ranks may still wait, even if the program here has closed and
# dropped them.
_attended: set[Blocking] = set()
# Number of threads during whose work the watchdog must not call MPI.
_alone = 0
_thread: threading.Thread | None = None
# Set when a communicator has broken, so that the watchdog looks at once.
_news = threading.Event()


def watch(blocking: Blocking) -> None:
    """Watch the calls of ``blocking`` for as long as it exists."""
    global _thread
    blocking.channel.when_broken(blocking.broken)
    with _lock:
        _watched.add(blocking)
        if _thread is None:
            _thread = threading.Thread(target=_serve, name="collective-mpi-watchdog", daemon=True)
            _thread.start()
    if blocking.channel.failure is not None:  # the channel broke before when_broken() registered
        blocking.broken()


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Keep the watchdog from calling MPI while the surviving ranks make a new communicator.

    The ranks have agreed to go on, so they have left all broken calls. And Open MPI sometimes hangs
    if one thread makes a communicator while another thread calls MPI.
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
    """Look at all communicators once; return whether MPI must be called again soon.

    The references end with this call, so that a dropped communicator can go between two looks.
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
