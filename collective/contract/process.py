"""Identity of a rank's process, by which other ranks of the host can see that it has ended.

The hub knows which ranks have died, until rank 0 dies and the hub with it. After that, a remaining
rank can look at the processes of its own host. The system may have given a process's number to
another process by then. So the identity includes the time when the process began
(:func:`~collective.platform.process_status`). Both numbers are valid only for processes that see
the same process table. Some systems do not tell when a process began, which is harmless.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from collective.platform import boot_id, process_namespace, process_status

__all__ = ["RankProcess"]


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
            status = process_status(os.getpid())
        except OSError:
            return None
        return None if status is None else cls(_host(), os.getpid(), status.started)

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
            status = process_status(self.pid)
        except OSError:  # such as a lack of file descriptors: says nothing about that process
            return False
        return status is None or status.started != self.started or status.state in "ZX"


def _host() -> str:
    """Return a text that is equal for processes that see the same process table."""
    boot, namespace = boot_id(), process_namespace()
    return f"{boot} {namespace}" if boot and namespace else "unknown"
