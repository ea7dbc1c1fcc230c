"""What the system tells about another process."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ProcessStatus"]


class ProcessStatus(NamedTuple):
    """Status of a process, as in ``/proc/PID/stat`` (proc(5)).

    Attributes:
        name: name of the program, of at most 15 characters.
        state: letter such as ``R`` (runs), ``S`` (sleeps), ``T`` (stopped) or ``Z`` (zombie).
        parent: process id of its parent.
        started: when the process began, in clock ticks since the host's boot.
        cpu_s: processor time that it has used, in seconds.
    """

    name: str
    state: str
    parent: int
    started: int
    cpu_s: float
