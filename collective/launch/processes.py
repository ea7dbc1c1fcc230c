"""Functions which ensure that no process outlives the launcher.

On other systems than Linux they do less: ranks still get signals by process group, but orphans of
a killed rank are not found.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from collective.deadline import Deadline
from collective.platform import (
    SHARED_MEMORY,
    ended_child,
    mapped_files,
    process_ids,
    process_status,
)

__all__ = [
    "Activity",
    "Ending",
    "activity",
    "end_children",
    "ended_children",
    "mpi_segments",
    "remove_segments",
]

# Names of shared memory of MPICH, Intel MPI and Open MPI, at the end of a line of a memory map.
_NAMES = rb"(?:mpich_shm_|Intel_MPI_|sm_segment\.|vader_segment\.)\S+"
_SEGMENT = re.compile(rb" (%s/%s)$" % (os.fsencode(SHARED_MEMORY), _NAMES), re.MULTILINE)
# A process that has written its last traceback needs less processor time than this to end.
_ENDING_CPU_S = 1.0
_ENDING_S = 1.0
_LOOK_S = 0.25
# A process that uses a smaller share of a processor waits for something.
_IDLE = 0.25


class Activity(NamedTuple):
    """Activity of a process so far.

    Attributes:
        cpu_s: processor time in seconds.
        runs: whether it runs, waits for a processor or a disk, or has just ended.
    """

    cpu_s: float
    runs: bool


# Activity of a process of which the system tells nothing.
_UNKNOWN = Activity(math.nan, False)


def activity(pid: int) -> Activity | None:
    """Return the activity of a process, or None if it has ended."""
    try:
        status = process_status(pid)
    except OSError:
        return _UNKNOWN
    if status is None:
        return None if pid and process_ids() else _UNKNOWN
    return Activity(status.cpu_s, status.state in "RDZ")


class Ending:
    """Assumption that a process is about to end, as after the traceback of its last exception.

    The assumption is refuted if the process waits for something, or uses more processor time than
    an interpreter needs to end. A process that gets no processor, on a busy machine, does neither.

    Args:
        look: function that returns the activity of the process; None if the process has ended.

    Attributes:
        next_look: when to call :meth:`is_refuted`.
    """

    def __init__(self, look: Callable[[], Activity | None]) -> None:
        self.next_look = Deadline(_ENDING_S)
        self._look = look
        self._looked = time.monotonic()
        self._activity = self._first = look()
        self._was_idle = False

    def is_refuted(self) -> bool:
        """Return whether the process does not end soon; ask again at :attr:`next_look`."""
        self.next_look = Deadline(_LOOK_S)
        before, self._activity = self._activity, self._look()
        since, self._looked = self._looked, time.monotonic()
        if before is None or self._first is None or self._activity is None:
            return False  # the process has ended
        if any(math.isnan(look.cpu_s) for look in (before, self._first, self._activity)):
            return True  # the system does not tell
        share = (self._activity.cpu_s - before.cpu_s) / (self._looked - since)
        is_idle = share < _IDLE and not self._activity.runs
        # One look may hit the moment in which an ending process waits for one of its threads.
        was_idle, self._was_idle = self._was_idle, is_idle
        used = self._activity.cpu_s - self._first.cpu_s
        return (is_idle and was_idle) or used > _ENDING_CPU_S


def ended_children(look: Callable[[int, int], None] | None = None) -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, and yield the id and the code of each.

    Args:
        look: function of a child's id and status, called before the child is reaped, when no other
            process or group can have its id.
    """
    while True:
        which = -1
        try:
            if look is not None and (ended := ended_child()):
                which = ended[0]
                look(*ended)
            pid, status = os.waitpid(which, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


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
    """Return the files of shared memory through which ranks communicate in MPI.

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
            segments.update(map(os.fsdecode, _SEGMENT.findall(mapped_files(process))))
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
    for pid in process_ids():
        with contextlib.suppress(OSError):
            status = process_status(pid)
            if status is not None:
                parents[pid] = status.parent
    return parents
