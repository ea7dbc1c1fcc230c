"""Process that mpiexec starts for a rank: it starts the rank, and reports the rank's end.

It runs as a file, ``python -I -S mpi_rank.py DIRECTORY COMMAND …``. It imports nothing of the
package, so it costs only a few milliseconds. The directory is that of :mod:`collective.launch.mpi`,
and contains some files for each rank N: ``N.environment``; ``N.in``, if the rank reads standard
input; and the named pipes ``N.out``, ``N.error``, ``N.orders`` and ``N.end``. This process writes
the rank's process id to ``N.pid``. An order is one byte. It is the number of a signal for the rank,
plus 128 if the signal is for the whole process group of the rank. The order 0 makes this process
end. Once the rank has ended, the order SIGKILL makes this process kill itself.
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
# Signals that this process passes on to the rank, if mpiexec or another process sends them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Variables in which the process manager of an MPI library gives a process its rank.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def main(directory: Path, command: Sequence[str]) -> int:
    """Run ``command`` as the rank that the process manager has assigned; return its exit code."""
    rank = next((os.environ[name] for name in _RANK if name in os.environ), "")
    prefix = directory / rank
    try:
        out, error, end = (_writer(f"{prefix}.{kind}") for kind in ("out", "error", "end"))
        orders = os.open(f"{prefix}.orders", os.O_RDONLY | os.O_NONBLOCK)
        environment = os.fsdecode(Path(f"{prefix}.environment").read_bytes())
    except OSError as problem:
        print(
            f"collective run: rank {rank or '?'} on {socket.gethostname()}: {problem}. "
            "`collective run` starts ranks on one host only; for several hosts, call mpiexec "
            "yourself.",
            file=sys.stderr,
        )
        return 1
    own = dict(entry.split("=", 1) for entry in environment.split("\0") if entry)
    wake, wake_end = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_end, False)
    for number in (signal.SIGCHLD, *_SIGNALS):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    try:
        standard_input = os.open(f"{prefix}.in", os.O_RDONLY)
    except OSError:  # this rank reads no input, or the input cannot be reopened, such as a socket
        standard_input = subprocess.DEVNULL
    child = subprocess.Popen(
        command,
        env={**os.environ, **own},
        stdin=standard_input,
        stdout=out,
        stderr=error,
        close_fds=False,  # the rank needs a descriptor that leads to the process manager
        start_new_session=True,
        preexec_fn=_die_with_parent(),  # safe: this process has one thread
    )
    with contextlib.suppress(OSError):  # the launcher and its directory are gone
        Path(f"{prefix}.pid").write_text(str(child.pid))
    code = _attend(child, orders, wake)
    with contextlib.suppress(OSError):
        os.write(end, b"%d" % code)
    # When this process ends with a failure, mpiexec stops the other ranks. So wait for an order:
    # the other ranks first get time to report what they noticed.
    while _GO not in (order := _read(orders)) and order:
        # The other ranks continue. Open MPI reports to them only a process that dies by a signal.
        # If this one ended with a code other than 0, or went on, they would wait for ever.
        if signal.SIGKILL in order:
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([orders], [], [])
    return code if code >= 0 else 128 - code


def _writer(path: str) -> int:
    """Open a named pipe for writing.

    Raises:
        OSError: no process reads the pipe (ENXIO), since the launcher and its supervisor have
            ended. Without O_NONBLOCK, the open would wait for them without end.
    """
    pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    return pipe


def _die_with_parent() -> Callable[[], None]:
    """Return the same as :func:`collective.platform.die_with_parent`.

    mpiexec may kill this process without killing the rank.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call of prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def _attend(child: subprocess.Popen[bytes], orders: int, wake: int) -> int:
    """Pass on signals until the rank has ended; return its code in the form of ``subprocess``."""
    while child.poll() is None:
        ready, _, _ = select.select([orders, wake], [], [])
        if wake in ready:
            for number in _read(wake):
                if number in _SIGNALS:
                    _send(child, number)
        if orders in ready:
            # End of file means that the launcher has ended, so kill the rank.
            for order in _read(orders) or bytes([signal.SIGKILL | _GROUP]):
                _send(child, order)
    return int(child.returncode)


def _send(child: subprocess.Popen[bytes], order: int) -> None:
    # The child is not reaped yet, so no other process or group can have its id.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if order & _GROUP:
            os.killpg(child.pid, order & ~_GROUP)
        elif order:
            os.kill(child.pid, order)


def _read(pipe: int) -> bytes:
    """Return the bytes in the pipe: nothing at its end, a harmless order if it is empty."""
    try:
        return os.read(pipe, 4096)
    except BlockingIOError:
        return bytes([_GROUP])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
