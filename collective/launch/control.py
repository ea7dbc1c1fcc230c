"""A rank's end of its control line: jobs come, outcomes go; see :mod:`collective.launch.ranks`.

The line is one connection. A thread of the rank listens to it, so that whoever steers the ranks
can ask a rank that hangs for its stacks, and a rank ends when nobody steers it any more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection
from queue import SimpleQueue

from collective.start.launchers import detect

from .outcome import Outcome, RemoteError
from .ranks import LEAVE_S, Job, Participant, perform

__all__ = [
    "GO",
    "LOADED",
    "SKIP",
    "STACKS",
    "call_back",
    "leave_process_group",
    "main",
    "outcome_of",
    "serve",
    "serve_as",
    "short_path",
]

#: Where are your threads? And the first bytes of the answer.
STACKS = b"stacks"
#: What the rank says when it has loaded a job; what lets all ranks begin, or drop it.
LOADED, GO, SKIP = b"loaded", b"go", b"skip"


class _Line:
    """The connection of a rank, and the thread that listens to it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._sending = threading.Lock()
        self._working = False
        self._left = threading.Event()
        # A child that a rank forks is no rank: its copy would keep the line open.
        os.register_at_fork(after_in_child=connection.close)
        threading.Thread(target=self._listen, name="collective-control", daemon=True).start()

    def next(self) -> bytes | None:
        """Return the next message, or None when there will be no more."""
        self._working = False
        message = self._messages.get()
        self._working = message is not None
        return message

    def answer(self, message: bytes) -> None:
        """Send what the last message asks for."""
        # Before it is sent: whoever has got the answer may close the line at once.
        self._working = False
        self._send(message)

    def _send(self, message: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # nobody is there: next() says so
            self._connection.send_bytes(message)

    def leave(self) -> None:
        """Say that the rank has done all that it had to do before its process ends."""
        self._left.set()

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.recv_bytes()
                if message == STACKS:
                    self._send(STACKS + _stacks().encode())
                else:
                    self._messages.put(message)
        except (EOFError, OSError):
            # In the middle of a job it is not waited for: it may hang.
            if self._working:
                os._exit(1)
        self._messages.put(None)
        if not self._left.wait(LEAVE_S):
            os._exit(1)


def serve(participant: Participant, connection: Connection, foreign: bool = False) -> None:
    """Run the jobs that come through ``connection`` until it is closed at the other end.

    Args:
        participant: the rank that this is.
        connection: its control line.
        foreign: whether this Python has packages of its own, which come before those of whoever
            steers the ranks.
    """
    line = _Line(connection)
    while (message := line.next()) is not None:
        job = _load(participant.rank, message, foreign)
        if isinstance(job, Outcome):
            line.answer(_dump(job))
            continue
        line.answer(LOADED)
        if line.next() == GO:
            line.answer(_dump(perform(job, participant)))
    participant.leave()
    line.leave()


def serve_as(environ: Mapping[str, str], rank: int, connection: Connection) -> None:
    """Run jobs as :func:`serve` does, with these variables in the environment.

    A library that reads one when it is loaded, as OpenMP's does, does not hear of it if a server
    that this process was forked from had loaded it already.
    """
    os.environ.clear()
    os.environ.update(environ)
    serve(Participant(rank), connection)


def main(arguments: Sequence[str]) -> None:
    """Be the rank that a launcher says this process is, and call back.

    Args:
        arguments: the address where whoever steers the ranks listens.
    """
    launched = detect(os.environ)
    if launched is None:
        raise SystemExit("collective.launch.control: to be started by a launcher of ranks")
    if launched.launcher in ("mpich", "intelmpi"):
        leave_process_group()
    serve(Participant(launched.rank), call_back(arguments[0], launched.rank), foreign=True)


def call_back(address: str, rank: int) -> Connection:
    """Connect to whoever steers the ranks, and say which one this is."""
    with short_path(address) as path:
        connection = Client(path, "AF_UNIX")
    connection.send((rank, os.getpid()))
    return connection


@contextlib.contextmanager
def short_path(address: str) -> Iterator[str]:
    """Give a socket's file a name that a socket address has room for, which is 107 bytes.

    That is not so in every job's directory for temporary files.
    """
    if sys.platform != "linux":
        yield address
        return
    folder = os.open(os.path.dirname(address), os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(address)}"
    finally:
        os.close(folder)


def leave_process_group() -> None:
    """Go on in a child that ``mpiexec`` does not know of.

    MPICH's sends signals to the process groups of the others when a rank dies, SIGKILL among
    them now and then, even if told to leave them alone (``-disable-auto-cleanup``).
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    os._exit(max(0, os.waitstatus_to_exitcode(status)))


def outcome_of(message: bytes) -> Outcome:
    """Return the outcome that came through a control line."""
    outcome = pickle.loads(message)
    assert isinstance(outcome, Outcome)
    return outcome


def _load(rank: int, message: bytes, foreign: bool) -> Job | Outcome:
    try:
        version, path, payload = pickle.loads(message)
        if not foreign:
            sys.path[:] = path
        elif version == sys.version_info[:2]:  # packages for another Python are no use
            sys.path += [entry for entry in path if entry not in sys.path]
        job = pickle.loads(payload)
        assert isinstance(job, Job)
        job.load()
        return job
    except Exception as error:  # whatever importing a module raises
        return Outcome.failed(
            RemoteError(
                f"rank {rank}: the function, an argument or the transport cannot be loaded "
                f"here: {error!r}. Ranks are processes of their own: the function has to be "
                "importable."
            )
        )


def _dump(outcome: Outcome) -> bytes:
    """Pickle an outcome; what cannot be pickled comes as text."""
    try:
        pickled = pickle.dumps(outcome)
        # Some exceptions are pickled without complaint and cannot be read back.
        if outcome.error is not None:
            pickle.loads(pickled)
    except Exception as problem:  # a user's __reduce__ may raise anything
        if outcome.error is None:
            failure = RemoteError(f"the result, a {type(outcome.value).__name__}: {problem!r}")
            return pickle.dumps(Outcome.failed(failure))
        stand_in = RemoteError(f"{type(outcome.error).__name__}: {outcome.error}")
        return pickle.dumps(Outcome(error=stand_in, traceback=outcome.traceback, when=outcome.when))
    return pickled


def _stacks() -> str:
    """Return where this process's threads are, but for the one that asks."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    parts = []
    for thread in threading.enumerate():
        if thread.ident in frames and thread is not threading.current_thread():
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            name = "main" if thread.ident == main else thread.name
            parts.append(f"thread {name}:\n{stack}")
    return "".join(parts)
