"""A rank as its supervisor sees it: its process, its end, its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set

from collective.contract.process import RankProcess
from collective.platform import die_with_parent

from .processes import Activity, activity
from .screen import RankOutput

__all__ = ["LocalRank", "Rank", "send_signal", "start_process"]


class Rank(ABC):
    """State of a rank in the supervisor.

    Attributes:
        number: number of the rank.
        joins: whether the rank was started in place of a lost rank.
        began: when the rank was started, on the clock of ``time.monotonic()``.
        code: exit code in the form of ``subprocess``. None while the rank runs.
        announced: exit code that the rank has announced, since its main thread has failed; else 0.
        fate: how the rank ended, in words, if its code does not tell; else empty.
        streams: standard output and standard error.
    """

    def __init__(self, number: int, joins: bool = False) -> None:
        self.number = number
        self.joins = joins
        self.began = time.monotonic()
        self.code: int | None = None
        self.announced = 0
        self.fate = ""
        self.streams: list[RankOutput] = []

    @property
    def runs(self) -> bool:
        """Whether the rank has not ended."""
        return self.code is None

    @abstractmethod
    def send(self, number: int, *, group: bool) -> None:
        """Send a signal to the rank; with ``group``, also to the processes that it started."""

    @abstractmethod
    def activity(self) -> Activity | None:
        """Return the activity of the rank's process so far; None if it has ended."""

    @abstractmethod
    def is_among(self, processes: Set[RankProcess]) -> bool:
        """Return whether the rank's process is one of ``processes``."""


class LocalRank(Rank):
    """Rank whose process is a child of this process.

    Attributes:
        process: process of the rank itself. Under mpiexec, the process of mpiexec.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes], joins: bool = False) -> None:
        super().__init__(number, joins)
        self.process = process

    @property
    def pid(self) -> int:
        """Process id of the rank itself; 0 if it is unknown."""
        return self.process.pid

    def send(self, number: int, *, group: bool) -> None:
        if self.runs:
            send_signal(self.process.pid, number, group=group)

    def activity(self) -> Activity | None:
        return activity(self.pid)

    def is_among(self, processes: Set[RankProcess]) -> bool:
        return self.pid in {process.pid for process in processes}


def send_signal(pid: int, number: int, *, group: bool) -> None:
    """Send a signal to a child that is not reaped yet, so that no other process has its id.

    Args:
        pid: process id of the child, which leads a process group.
        number: number of the signal.
        group: whether to send the signal to the whole group.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        (os.killpg if group else os.kill)(pid, signal.Signals(number))


def start_process(
    command: Sequence[str], environment: Mapping[str, str], stdin: int | None
) -> subprocess.Popen[bytes]:
    """Start the process of a rank; it dies with this process.

    Args:
        command: command of the rank.
        environment: all environment variables of the rank.
        stdin: as for ``subprocess.Popen``.
    """
    return subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        # Each rank has its own process group, so that the processes that it started can be ended
        # with it. And Ctrl-C in a terminal only reaches the launcher, which passes it on.
        start_new_session=True,
        preexec_fn=die_with_parent(),  # safe: this process has one thread
    )
