"""The process of one rank of a pool."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from collective.start.launchers import detect

from .failed import Outcome, RemoteError
from .seat import Job, Seat, backend_class

__all__ = ["GO", "LOADED", "PIPES", "STACKS", "leave_process_group", "main", "serve", "serve_as"]

#: What the pool asks over the second pipe: where are your threads?
STACKS = b"stacks"
#: What the rank says when it has loaded a job, and what lets all ranks begin.
LOADED, GO = b"loaded", b"go"
#: The connections of a rank that calls back.
PIPES = ("jobs", "control")


def serve(rank: int, jobs: Connection, control: Connection, foreign: bool = False) -> None:
    """Run the jobs that come through ``jobs`` until it is closed.

    Args:
        rank: which rank this process is.
        jobs: brings pickled jobs, takes pickled outcomes. A job begins when all ranks have
            loaded it: importing what it needs may take seconds, which are not the job's.
        control: brings :data:`STACKS`; its end means that the pool's process is gone.
        foreign: whether this Python has packages of its own, which come before the pool's.
    """
    threading.Thread(target=_attend, args=(control,), name="collective-attend", daemon=True).start()
    seat = Seat(rank)
    try:
        while True:
            path, payload = pickle.loads(jobs.recv_bytes())
            if foreign:
                sys.path += [entry for entry in path if entry not in sys.path]
            else:
                sys.path[:] = path
            job = _load(rank, payload)
            if isinstance(job, Outcome):
                jobs.send_bytes(_dump(job))
                continue
            jobs.send_bytes(LOADED)
            if jobs.recv_bytes() == GO:
                jobs.send_bytes(_dump(seat.run(job)))
    except (EOFError, ConnectionError):  # the pool is closed, perhaps in the middle of a job
        seat.leave()


def serve_as(environ: Mapping[str, str], *serving: Any) -> None:
    """Run jobs as :func:`serve` does, with these variables in the environment.

    A library that reads one when it is loaded, as OpenMP's does, does not hear of it if a server
    that this process was forked from had loaded it already.
    """
    os.environ.clear()
    os.environ.update(environ)
    serve(*serving)


def main(arguments: Sequence[str]) -> None:
    """Be the rank that a launcher says this process is, in the pool that listens at a socket.

    Args:
        arguments: where the socket is.
    """
    launched = detect(os.environ)
    if launched is None:
        raise SystemExit("collective.testing.worker: to be started by mpiexec, of a pool of ranks")
    if launched.launcher in ("mpich", "intelmpi"):
        leave_process_group()
    jobs, control = (_call_back(arguments[0], launched.rank, which) for which in PIPES)
    serve(launched.rank, jobs, control, foreign=True)


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


def _call_back(place: str, rank: int, which: str) -> Connection:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(place)
    pipe = Connection(sock.detach())
    pipe.send((rank, os.getpid(), which))
    return pipe


def _load(rank: int, payload: bytes) -> Job | Outcome:
    try:
        job = pickle.loads(payload)
        assert isinstance(job, Job)
        # A transport that cannot be imported here would keep the peers waiting for it.
        backend_class(job.opening.backend)
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


def _attend(control: Connection) -> None:
    """Answer the pool while a job runs; leave when the pool is gone, whatever runs."""
    try:
        while control.recv_bytes() == STACKS:
            frames = sys._current_frames()
            main = threading.main_thread().ident
            parts = []
            for thread in threading.enumerate():
                if thread.ident in frames and thread is not threading.current_thread():
                    stack = "".join(traceback.format_stack(frames[thread.ident]))
                    name = "main" if thread.ident == main else thread.name
                    parts.append(f"thread {name}:\n{stack}")
            control.send_bytes("".join(parts).encode())
    except (EOFError, OSError):
        os._exit(1)
