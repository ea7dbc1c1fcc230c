"""A rank's end of its control line, which receives jobs and sends outcomes.

See :mod:`collective.launch.ranks`. The line is one connection. A thread of the rank listens to it.
So a rank that hangs still answers a request for its stacks, and a rank ends when the controlling
program has closed the line.
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

from collective.inner import detect, platform

from .outcome import Outcome, RemoteError
from .ranks import LEAVE_S, Job, Participant, perform

#: Request for the stacks of a rank's threads, and the first bytes of the answer.
STACKS = b"stacks"
#: Report of a rank that it has loaded a job, and the order to begin it. If another job comes in
#: place of the order, another rank could not load the first one.
LOADED, GO = b"loaded", b"go"


class _Interrupts:
    """Ctrl-C of a rank's process: ignored, except while the rank runs a job.

    A terminal or Jupyter sends SIGINT to every process of its process group. A rank between two
    jobs has nothing to interrupt, and can serve the next job. It ignores the signal from the end of
    a job on, before it sends the outcome: the program that receives the outcome may send SIGINT
    at once.

    The handler is a function instead of SIG_IGN, because programs that another thread starts in the
    meantime would inherit SIG_IGN.
    """

    def __init__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        # Only the main thread can set handlers. None stands for a handler that Python cannot
        # restore. In both cases the signal keeps its handler.
        self._handler = handler if main else None

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore SIGINT in the block."""
        if self._handler is None:
            yield
            return
        signal.signal(signal.SIGINT, _ignore)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._handler)

    @contextlib.contextmanager
    def delivered(self) -> Iterator[None]:
        """Restore the job's handler of SIGINT in the block, which may set another one."""
        if self._handler is None:
            yield
            return
        signal.signal(signal.SIGINT, self._handler)
        try:
            yield
        finally:
            self._handler = signal.signal(signal.SIGINT, _ignore)


def _ignore(number: int, frame: object) -> None:
    """Do nothing."""


class _RankConnection:
    """Connection of a rank, with the thread that listens to it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[bytes | None] = SimpleQueue()
        self._sending = threading.Lock()
        self._working = False
        self._left = threading.Event()
        # A child that the rank forks is not a rank. Its copy would keep the line open.
        os.register_at_fork(after_in_child=connection.close)
        threading.Thread(target=self._listen, name="collective-control", daemon=True).start()

    def next(self) -> bytes | None:
        """Return the next message, or None once the line is closed."""
        self._working = False
        message = self._messages.get()
        self._working = message is not None
        return message

    def answer(self, message: bytes) -> None:
        """Send the answer to the last message."""
        # Before the send: the receiver of the answer may close the line at once, and _listen()
        # must not treat that as an end in the middle of a job.
        self._working = False
        self._send(message)

    def _send(self, message: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # if the line is closed, next() tells
            self._connection.send_bytes(message)

    def leave(self) -> None:
        """Record that the rank has finished all its work before the end of its process."""
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
            # Do not wait for the end of a running job, since the job may hang.
            if self._working:
                os._exit(1)
        self._messages.put(None)
        if not self._left.wait(LEAVE_S):
            os._exit(1)


def serve(participant: Participant, connection: Connection, foreign: bool = False) -> None:
    """Run the jobs that come through ``connection`` until it is closed at the other end.

    Args:
        participant: state of this rank.
        connection: control line of this rank.
        foreign: whether this Python has packages of its own. They come before the packages of the
            program that controls the ranks.
    """
    line = _RankConnection(connection)
    interrupts = _Interrupts()
    with interrupts.ignored():
        result: Job | Outcome | None = None
        while (message := line.next()) is not None:
            with interrupts.delivered():
                if message == GO:
                    assert isinstance(result, Job)
                    result = perform(result, participant)
                else:
                    result = _load(participant.rank, message, foreign)
            line.answer(LOADED if isinstance(result, Job) else _dump(result))
    participant.leave()
    line.leave()


def serve_as(environ: Mapping[str, str], rank: int, connection: Connection) -> None:
    """Run jobs as :func:`serve` does, with these variables as the environment.

    A library such as OpenMP's reads its variables when it is loaded. If this process was forked
    from a server that had already loaded the library, the library ignores these variables.
    """
    os.environ.clear()
    os.environ.update(environ)
    serve(Participant(rank), connection)


def main(arguments: Sequence[str]) -> None:
    """Run as the rank that the launcher has assigned to this process, and call back.

    Args:
        arguments: the address where the program that controls the ranks listens.
    """
    launched = detect(os.environ)
    if launched is None:
        raise SystemExit(
            "collective.launch.rank_line: no launcher has given this process a rank. Start it with "
            "a launcher, such as mpiexec."
        )
    if launched.launcher in ("mpich", "intelmpi"):
        leave_process_group()
    serve(Participant(launched.rank), call_back(arguments[0], launched.rank), foreign=True)


def call_back(address: str, rank: int) -> Connection:
    """Connect to the program that controls the ranks, and send this rank's number."""
    with platform.short_path(address) as path:
        connection = Client(path, "AF_UNIX")
    connection.send((rank, os.getpid()))
    return connection


def leave_process_group() -> None:
    """Continue in a child process that ``mpiexec`` does not know.

    When a rank dies, the ``mpiexec`` of MPICH sends signals to the process groups of the other
    ranks, now and then SIGKILL. It does so even with ``-disable-auto-cleanup``.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    os._exit(max(0, os.waitstatus_to_exitcode(status)))


def outcome_of(message: bytes) -> Outcome:
    """Return the outcome in a message from a control line."""
    outcome = pickle.loads(message)
    assert isinstance(outcome, Outcome)
    return outcome


def _load(rank: int, message: bytes, foreign: bool) -> Job | Outcome:
    try:
        version, path, payload = pickle.loads(message)
        if not foreign:
            sys.path[:] = path
        elif version == sys.version_info[:2]:  # packages for another Python version do not work
            sys.path += [entry for entry in path if entry not in sys.path]
        job = pickle.loads(payload)
        assert isinstance(job, Job)
        job.load()
        return job
    except Exception as error:  # importing a module may raise anything
        return Outcome.failed(
            RemoteError(
                f"rank {rank}: the function, an argument or the transport cannot be loaded in the "
                f"process of this rank: {error!r}. Define the function in a module that this "
                "process can import."
            )
        )


def _dump(outcome: Outcome) -> bytes:
    """Pickle an outcome, with a text in place of an object that cannot be pickled."""
    try:
        return pickle.dumps(outcome.portable())
    except Exception as problem:  # a user's __reduce__ may raise anything
        failure = RemoteError(
            f"the result, a {type(outcome.value).__name__}, cannot be pickled: {problem!r}"
        )
        return pickle.dumps(Outcome.failed(failure))


def _stacks() -> str:
    """Return the stacks of this process's threads, except for the calling thread."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    parts = []
    for thread in threading.enumerate():
        if thread.ident in frames and thread is not threading.current_thread():
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            name = "main" if thread.ident == main else thread.name
            parts.append(f"thread {name}:\n{stack}")
    return "".join(parts)
