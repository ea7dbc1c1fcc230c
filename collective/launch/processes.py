"""Processes that must not outlive their launcher: the Linux calls behind that promise.

Elsewhere than on Linux these do what can be done there: ranks are still signalled by
process group, but orphans of a rank that was killed are not found.
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
from typing import Any

from collective.deadline import Deadline

__all__ = [
    "adopt_orphans",
    "die_with_parent",
    "end_children",
    "mpi_segments",
    "remove_segments",
]

# From <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# MPICH's, Intel MPI's and Open MPI's names, at the end of a line of /proc/PID/maps.
_SEGMENT = re.compile(
    rb" (/dev/shm/(?:mpich_shm_|Intel_MPI_|sm_segment\.|vader_segment\.)\S+)$", re.MULTILINE
)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent dies.

    So nothing that a rank started can leave the tree: it stays a child of ours, can be
    found and ended, and its process id cannot be reused before we have reaped it.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """Return what a child runs before exec so that the kernel kills it with this process."""
    if sys.platform != "linux":
        return lambda: None
    # Looked up here: between fork and exec a child should do as little as possible.
    prctl = _libc().prctl
    parent = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os.kill(os.getpid(), signal.SIGKILL)

    return prepare


def end_children(patience: float) -> None:
    """Return when this process has no children left; reap them all.

    Args:
        patience: seconds they have to leave on their own (a resource tracker that
            removes what its process left needs some) before SIGTERM, and again before
            SIGKILL. What ignores even that (waiting for a disk) is given up after five
            seconds more.
    """
    end = Deadline(2 * patience + 5)
    signals = (Deadline(patience), signal.SIGTERM), (Deadline(2 * patience), signal.SIGKILL)
    while _reap() and not end.expired:
        due = [number for moment, number in signals if moment.expired]
        if due:
            for pid, parent in _parents().items():
                if parent == os.getpid():
                    with contextlib.suppress(PermissionError):  # it took on another user's rights
                        os.kill(pid, due[-1])
        # A child that dies leaves us its own children, so go on until none is left.
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
    """Return the files in /dev/shm over which ranks share memory in MPI.

    An MPI library removes them at its end, to which ranks that are killed do not come.

    Args:
        pid: a rank, or a process that ranks descend from.
    """
    parents = _parents()
    found: set[str] = set()
    generation = {pid}
    while generation:
        for each in generation:
            with contextlib.suppress(OSError), open(f"/proc/{each}/maps", "rb") as file:
                found.update(map(os.fsdecode, _SEGMENT.findall(file.read())))
        generation = {child for child, parent in parents.items() if parent in generation}
    return found


def remove_segments(files: Iterable[str]) -> None:
    """Remove what :func:`mpi_segments` returned, once the ranks are gone."""
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


def _parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                status = file.read()
                found[int(name)] = int(status[status.rindex(b")") + 2 :].split()[1])
    return found


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
