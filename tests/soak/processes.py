"""The processes of a launch: found by a mark in their environment, wherever they are."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

__all__ = ["Marked"]


class Marked:
    """The processes that have a mark of their own in their environment.

    Attributes:
        variable, value: the mark, for the environment of the first of them.
    """

    variable = "COLLECTIVETEST_MARK"

    def __init__(self) -> None:
        self.value = secrets.token_hex(8)
        self._bytes = f"{self.variable}={self.value}".encode()

    def living(self) -> dict[int, bytes]:
        """Return their environments, by process id, in the order in which they were started."""
        found: dict[int, bytes] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes()
                if self._bytes in environment:
                    found[int(entry.name)] = environment
        return dict(sorted(found.items()))

    def left(self, seconds: float) -> dict[int, str]:
        """Return what runs after so many seconds, or nothing as soon as nothing does.

        Returns:
            Process id -> its command, and where in the kernel it is.
        """
        end = time.monotonic() + seconds
        while (found := self.living()) and time.monotonic() < end:
            time.sleep(0.02)
        running = {}
        for pid in found:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                running[pid] = f"{command}({Path(f'/proc/{pid}/wchan').read_text()})"
        return running

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.living():
            kill(pid)


def kill(pid: int) -> None:
    """Kill a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
