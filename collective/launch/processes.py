"""Linux calls which ensure that no process outlives the launcher.

On other systems these functions do less: ranks still get signals by process group, but orphans of
a killed rank are not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from collective.deadline import Deadline

__all__ = [
    "Ending",
    "adopt_orphans",
    "die_with_parent",
    "end_children",
    "mpi_segments",
    "remove_segments",
]

# From <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Names of shared memory of MPICH, Intel MPI and Open MPI, at the end of a line of /proc/PID/maps.
_SEGMENT = re.compile(
    rb" (/dev/shm/(?:mpich_shm_|Intel_MPI_|sm_segment\.|vader_segment\.)\S+)$", re.MULTILINE
)
# A process that has written its last traceback needs less processor time than this to end.
_ENDING_CPU_S = 1.0
_ENDING_S = 1.0
_LOOK_S = 0.25
# A process that uses a smaller share of a processor waits for something.
_IDLE = 0.25


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent dies.

    So no process that a rank started can leave the tree. It becomes a child of this process, which
    can find and end it. Its process id cannot be reused before this process has reaped it.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """Return a function for a child to call before exec, so that it dies with this process."""
    if sys.platform != "linux":
        return lambda: None
    # Look up prctl before the fork: between fork and exec a child should do as little as possible.
    prctl = _libc().prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call of prctl
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


class Ending:
    """Assumption that a process is about to end, as after the traceback of its last exception.

    The assumption is refuted if the process waits for something, or uses more processor time than
    an interpreter needs to end. A process that gets no processor, on a busy machine, does neither.

    Attributes:
        next_look: when to call :meth:`is_refuted`.
    """

    def __init__(self, pid: int) -> None:
        self.next_look = Deadline(_ENDING_S)
        self._pid = pid
        self._looked = time.monotonic()
        self._activity = self._first = _activity(pid)
        self._was_idle = False

    def is_refuted(self) -> bool:
        """Return whether the process does not end soon; ask again at :attr:`next_look`."""
        self.next_look = Deadline(_LOOK_S)
        before, self._activity = self._activity, _activity(self._pid)
        since, self._looked = self._looked, time.monotonic()
        if before is None or self._first is None or self._activity is None:
            # The process has ended, unless the system does not tell.
            return self._pid == 0 or not os.path.isdir("/proc/self")
        share = (self._activity.cpu_s - before.cpu_s) / (self._looked - since)
        is_idle = share < _IDLE and not self._activity.runs
        # One look may hit the moment in which an ending process waits for one of its threads.
        was_idle, self._was_idle = self._was_idle, is_idle
        used = self._activity.cpu_s - self._first.cpu_s
        return (is_idle and was_idle) or used > _ENDING_CPU_S


class _Activity(NamedTuple):
    """Activity of a process so far.

    Attributes:
        cpu_s: processor time in seconds.
        runs: whether it runs, waits for a processor or a disk, or has just ended.
    """

    cpu_s: float
    runs: bool


def _activity(pid: int) -> _Activity | None:
    """Return the activity of a process, or None if it has ended or cannot be seen."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            status = file.read()
    except OSError:
        return None
    state, *fields = status[status.rindex(b")") + 2 :].split()
    ticks = int(fields[10]) + int(fields[11])  # user and system time
    return _Activity(ticks / os.sysconf("SC_CLK_TCK"), state in (b"R", b"D", b"Z"))


def end_children(patience: float) -> None:
    """Wait until this process has no children left, and reap them all.

    Args:
        patience: seconds in which the children may end by themselves before SIGTERM, and again
            before SIGKILL. For instance, a resource tracker needs some time to remove what its
            process has left. A child that survives even SIGKILL, since it waits for a disk, is
            given up after five more seconds.
    """
    end = Deadline(2 * patience + 5)
    signals = (Deadline(patience), signal.SIGTERM), (Deadline(2 * patience), signal.SIGKILL)
    while _reap() and not end.expired:
        due = [number for moment, number in signals if moment.expired]
        if due:
            for pid, parent in _parents().items():
                if parent == os.getpid():
                    with contextlib.suppress(PermissionError):  # the child changed its user
                        os.kill(pid, due[-1])
        # When a child dies, this process adopts its children, so continue until all have ended.
        time.sleep(0.005)


def _reap() -> bool:
    """Reap the children that have ended; return whether there are others."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def mpi_segments(pid: int) -> set[str]:
    """Return the files in /dev/shm through which ranks share memory in MPI.

    An MPI library removes these files when it is finalised. Ranks that are killed leave them
    behind.

    Args:
        pid: process id of a rank, or of an ancestor of ranks.
    """
    parents = _parents()
    segments: set[str] = set()
    generation = {pid}
    while generation:
        for process in generation:
            with contextlib.suppress(OSError), open(f"/proc/{process}/maps", "rb") as file:
                segments.update(map(os.fsdecode, _SEGMENT.findall(file.read())))
        generation = {child for child, parent in parents.items() if parent in generation}
    return segments


def remove_segments(files: Iterable[str]) -> None:
    """Remove files that :func:`mpi_segments` returned, once the ranks have ended."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    parents = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                status = file.read()
                parents[int(name)] = int(status[status.rindex(b")") + 2 :].split()[1])
    return parents


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
