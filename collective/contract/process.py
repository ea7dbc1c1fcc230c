"""Identity of a rank's process, by which other ranks of the host can see that it has ended.

The hub knows which ranks have died, until rank 0 dies and the hub with it. After that, a remaining
rank can look at the processes of its own host. The system may have given a process's number to
another process by then. So the identity includes the time when the process began
(``/proc/PID/stat``, proc(5)). Both numbers are valid only for processes that see the same process
table. A system without ``/proc/PID/stat`` gives no information about a process, which is harmless.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["RankProcess"]

# Positions in /proc/PID/stat, counted after the name. The name is in parentheses and may contain
# any character.
_STATE, _STARTED = 0, 19


class RankProcess(NamedTuple):
    """A process of some host.

    Attributes:
        host: text that is equal for processes that see each other in the process table.
        pid: number of the process on that host.
        started: when the process began, in clock ticks since the host's boot.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> RankProcess | None:
        """Return this process; None where the system has no such information."""
        try:
            state = _state_of(os.getpid())
        except OSError:
            return None
        return None if state is None else cls(_host(), os.getpid(), state[1])

    @classmethod
    def parse(cls, text: object) -> RankProcess | None:
        """Return the process whose ``str()`` is ``text``; None if no process has such a text."""
        host, _, numbers = str(text).rpartition(" ")
        pid, _, started = numbers.partition("-")
        if not host or not pid.isdecimal() or not started.isdecimal():
            return None
        return cls(host, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.host} {self.pid}-{self.started}"

    def has_ended(self) -> bool:
        """Tell whether the process has ended; False if this process cannot find out.

        A zombie, whose parent has not waited for it yet, counts as ended.
        """
        if self.host != _host():
            return False
        try:
            state = _state_of(self.pid)
        except OSError:  # such as a lack of file descriptors: says nothing about that process
            return False
        return state is None or state[1] != self.started or state[0] in "ZX"


def _host() -> str:
    """Return a text that is equal for processes that see the same process table."""
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
    except OSError:
        return "unknown"


def _state_of(pid: int) -> tuple[str, int] | None:
    """Return the state letter of a process and when it began; None if there is no such process.

    Raises:
        OSError: the system does not provide the information.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends after open()
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[_STATE].decode(), int(fields[_STARTED])
