"""The process that mpiexec starts for a rank: starts the rank, and reports its end.

It is run as a file, ``python -I -S mpi_rank.py DIRECTORY COMMAND …``, and imports
nothing of the package, so that it costs a few milliseconds. The directory is that of
:mod:`collective.launch.mpi`, with some files a rank: ``N.environment``; ``N.in``, if it is to
read something; and the named pipes ``N.out``, ``N.error``, ``N.orders`` and ``N.end``. An
order is a byte: the number of a signal for the rank, plus 128 if it is for all its process
group; or 0, to end. Once the rank has ended, SIGKILL is for this process itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["main"]

_GO = 0
_GROUP = 0x80
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
# Passed on to the rank, should mpiexec or somebody else send them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# How an MPI library's process manager says who a process is.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def main(directory: Path, command: Sequence[str]) -> int:
    """Run ``command`` as the rank that the process manager says; return its exit code."""
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "")
    prefix = directory / rank
    try:
        out, error, end = (_writer(f"{prefix}.{kind}") for kind in ("out", "error", "end"))
        orders = os.open(f"{prefix}.orders", os.O_RDONLY | os.O_NONBLOCK)
        given = os.fsdecode(Path(f"{prefix}.environment").read_bytes())
    except OSError as problem:
        print(
            f"collective run: rank {rank or '?'} on {socket.gethostname()}: {problem}. It starts "
            "ranks on one host; on several call mpiexec yourself.",
            file=sys.stderr,
        )
        return 1
    own = dict(entry.split("=", 1) for entry in given.split("\0") if entry)
    wake, wake_end = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_end, False)
    for number in (signal.SIGCHLD, *_SIGNALS):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    try:
        given_in = os.open(f"{prefix}.in", os.O_RDONLY)
    except OSError:  # not meant for this rank, or not to be opened twice, as a socket
        given_in = subprocess.DEVNULL
    child = subprocess.Popen(
        command,
        env={**os.environ, **own},
        stdin=given_in,
        stdout=out,
        stderr=error,
        close_fds=False,  # one of them is the process manager's
        start_new_session=True,
        preexec_fn=_die_with_parent(),  # safe: this process has one thread
    )
    code = _attend(child, orders, wake)
    with contextlib.suppress(OSError):
        os.write(end, b"%d" % code)
    # mpiexec stops the others when this process ends in failure: not before they had their
    # moment to tell what they noticed.
    while _GO not in (order := _read(orders)) and order:
        if signal.SIGKILL in order:  # the others go on, and mpiexec is to see that it is dead
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([orders], [], [])
    return code if code >= 0 else 128 - code


def _writer(path: str) -> int:
    """Open a named pipe for writing.

    Raises:
        OSError: nobody reads it (ENXIO): the launcher and its supervisor are gone. An open that
            waits, as without O_NONBLOCK, would wait for them for ever.
    """
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    return pipe


def _die_with_parent() -> Callable[[], None]:
    """As in :mod:`collective.launch.processes`: mpiexec may kill this process, not the rank."""
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def _attend(child: subprocess.Popen[bytes], orders: int, wake: int) -> int:
    """Pass on signals until the rank has ended; return its code as ``subprocess`` gives it."""
    while child.poll() is None:
        ready, _, _ = select.select([orders, wake], [], [])
        if wake in ready:
            for number in _read(wake):
                if number in _SIGNALS:
                    _send(child, number)
        if orders in ready:
            # The end of the orders: the launcher is gone.
            for order in _read(orders) or bytes([signal.SIGKILL | _GROUP]):
                _send(child, order)
    return int(child.returncode)


def _send(child: subprocess.Popen[bytes], order: int) -> None:
    # Not reaped yet, so neither its process id nor its group can be another's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if order & _GROUP:
            os.killpg(child.pid, order & ~_GROUP)
        elif order:
            os.kill(child.pid, order)


def _read(pipe: int) -> bytes:
    """Return what is there, nothing at the end of the pipe, or a harmless order."""
    try:
        return os.read(pipe, 4096)
    except BlockingIOError:
        return bytes([_GROUP])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
