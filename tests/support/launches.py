"""Real launches for tests of `collective run`: start them, and check their leftovers.

Use the fixture :func:`launches` in a test, and :func:`launched` elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, run_python

__all__ = [
    "DEADLINE_S",
    "NOISE_S",
    "PROMISED_S",
    "ROOT",
    "Launches",
    "Marked",
    "Terminal",
    "finish",
    "kill",
    "launched",
    "launches",
]

# The promised time, and the delay that a busy machine may add before a test fails. Without the
# promise the tests would wait for ten minutes.
PROMISED_S = 2.0
NOISE_S = 60.0
DEADLINE_S = 90.0


PRELUDE = """
import os, signal, subprocess, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def arrive():
    with open(f"arriving-{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"arriving-{rank}", f"arrived-{rank}")

def await_all():
    arrive()
    while not all(os.path.exists(f"arrived-{r}") for r in range(size)):
        time.sleep(0.01)

def die(error):
    with open("died.tmp", "w") as file:
        file.write(str(time.monotonic()))
    os.rename("died.tmp", "died")
    raise error
"""


class Marked:
    """Processes with a unique mark in their environment.

    Attributes:
        variable, value: the mark, for the environment of the first process; others inherit it.
    """

    variable = "COLLECTIVETEST_MARK"

    def __init__(self) -> None:
        self.value = secrets.token_hex(8)
        self._bytes = f"{self.variable}={self.value}".encode()

    def living(self) -> dict[int, bytes]:
        """Return the environments of the living processes by process id, in ascending order."""
        environments: dict[int, bytes] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes()
                if self._bytes in environment:
                    environments[int(entry.name)] = environment
        return dict(sorted(environments.items()))

    def left(self, seconds: float) -> dict[int, str]:
        """Return the processes that still run after ``seconds``; return early if none does.

        Returns:
            Process id -> the command of the process, and its place in the kernel.
        """
        end = time.monotonic() + seconds
        while (living := self.living()) and time.monotonic() < end:
            time.sleep(0.02)
        running = {}
        for pid in living:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                running[pid] = f"{command}({Path(f'/proc/{pid}/wchan').read_text()})"
        return running

    def end(self) -> None:
        """Kill the processes that still run."""
        for pid in self.living():
            kill(pid)


def kill(pid: int) -> None:
    """Kill a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Launches:
    """Launchers in a separate directory, and checks of the processes and files that they leave.

    Args:
        directory: directory of the launchers and their scripts.
        python: interpreter of launchers and ranks.
    """

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        self.directory = directory
        self.python = python
        self.marked = Marked()
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.started: list[subprocess.Popen[str]] = []

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the variables of a launcher, with the mark and with ``changes``."""
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("COLLECTIVE_", "OMP_"))
        }
        base = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)}
        return {**inherited, **base, self.marked.variable: self.marked.value, **changes}

    def script(self, body: str, name: str = "script.py") -> str:
        """Write a program that begins with PRELUDE; return its name."""
        (self.directory / name).write_text(PRELUDE + textwrap.dedent(body))
        return name

    def start(self, *arguments: str, leads: bool = False, **changes: str) -> subprocess.Popen[str]:
        """Start a launcher; if ``leads``, it leads a process group, as under a shell."""
        process = subprocess.Popen(
            [self.python, "-m", "collective", "run", *arguments],
            cwd=self.directory,
            env=self.environment(**changes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=leads,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Start a launcher, wait for its end, and return its outputs."""
        process = self.start(*arguments, **changes)
        return finish(process)

    def execute(
        self, *words: str, stdin: str = "", **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python itself in the directory of these launches."""
        return run_python(
            *words, python=self.python, cwd=self.directory, stdin=stdin, timeout=DEADLINE_S,
            env=self.environment(OMP_NUM_THREADS="1", **changes),
        )  # fmt: skip

    def living(self) -> list[int]:
        """Return the running processes of these launches, anywhere in the process tree."""
        return list(self.marked.living())

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition()`` is true, or fail the test."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, "the condition did not become true"
            time.sleep(0.01)

    def until_arrived(self, size: int) -> None:
        """Wait until all ``size`` ranks have called ``arrive()`` or ``await_all()``."""
        self.until(lambda: all((self.directory / f"arrived-{r}").exists() for r in range(size)))

    def assert_nothing_left(self) -> None:
        """Check that no process runs and that no run directory exists."""
        assert self.living() == []
        assert self.run_directories() == []

    def run_directories(self) -> list[str]:
        """Return the names of the run directories that exist."""
        found = self.temporary.glob("collective-*/*")
        return [path.name for path in found if path.is_dir()]  # and no file of places


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a launcher, and return its outputs."""
    out, err = process.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Terminal:
    """A pseudo-terminal of 60 columns that is the controlling terminal of a launcher."""

    TAKE = """
        import fcntl, os, sys, termios
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.execv(sys.executable, [sys.executable, "-m", "collective", "run", *sys.argv[1:]])
        """

    def __init__(self, launches: Launches, *arguments: str, **changes: str) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self.TAKE), *arguments],
            cwd=launches.directory,
            env=launches.environment(TERM="xterm", **changes),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            text=True,
        )
        launches.started.append(self.process)
        os.close(slave)

    def read(self, until: bytes | None = None) -> bytes:
        """Return the output up to ``until``, or up to the end of the launcher."""
        text = b""
        with contextlib.suppress(OSError):  # EIO: the last process has closed the terminal.
            while data := os.read(self.master, 4096):
                text += data
                if until is not None and until in text:
                    break
        return text


@contextlib.contextmanager
def launched(directory: Path, python: str = sys.executable) -> Iterator[Launches]:
    """Yield launches in ``directory``; at the end kill all their processes."""
    launches = Launches(directory, python)
    yield launches
    for process in launches.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    launches.marked.end()


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    """Yield launches in the test's directory."""
    with launched(tmp_path) as launches:
        yield launches
