"""Which process a rank is, as others of its host can tell later: whether it has ended.

The hub knows who has died, until it dies itself with rank 0. Processes of one host can be looked at
by whoever is left. A number of a process may be another's by then, so when it began goes with it
(``/proc/PID/stat``, proc(5)); and both mean something only to who sees the same processes. Where
there is no such file nothing is known, which is no harm.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["RankProcess"]

# Fields of /proc/PID/stat behind the name, which may hold anything, in parentheses.
_STATE, _STARTED = 0, 19


class RankProcess(NamedTuple):
    """A process of some host.

    Attributes:
        host: what those have in common that see each other's processes.
        pid: its number there.
        started: when it began, in ticks since that host's start.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> RankProcess | None:
        """Return this process; None where nobody could look at it."""
        try:
            found = _state_of(os.getpid())
        except OSError:
            return None
        return None if found is None else cls(_host(), os.getpid(), found[1])

    @classmethod
    def parse(cls, text: object) -> RankProcess | None:
        """Return the process that ``str`` has written; None if that is no such text."""
        host, _, numbers = str(text).rpartition(" ")
        pid, _, started = numbers.partition("-")
        if not host or not pid.isdecimal() or not started.isdecimal():
            return None
        return cls(host, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.host} {self.pid}-{self.started}"

    def has_ended(self) -> bool:
        """Tell whether it has ended; False if that cannot be known here.

        One whose parent has not looked yet has ended, too.
        """
        if self.host != _host():
            return False
        try:
            found = _state_of(self.pid)
        except OSError:  # no file descriptor is left, say, which tells nothing of that process
            return False
        return found is None or found[1] != self.started or found[0] in "ZX"


def _host() -> str:
    """Return what processes have in common that see each other."""
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
    except OSError:
        return "unknown"


def _state_of(pid: int) -> tuple[str, int] | None:
    """Return how a process is and when it began; None if there is none.

    Raises:
        OSError: the system does not tell.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # the latter once the file is open
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[_STATE].decode(), int(fields[_STARTED])
