"""Where the contestants wait for their turns.

MPI libraries cannot live in one process, nor under one launcher. So each contestant is a
job of its own, started once, and its ranks connect to a socket here. Whose turn it is
gets a request, works, and answers; all others are blocked in a read meanwhile and take
no processor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from collective.errors import CollectiveError
from collective.launch.processes import die_with_parent, mpi_segments, remove_segments

from .contestants import Contestant
from .startline import StartLine

__all__ = ["Arena", "ArenaError"]

_START_S, _END_S = 90.0, 10.0
# How long an answer may take: a library may leave some ranks waiting for one that refuses.
_ANSWER_S = {"attempt": 60.0}
_LONGEST_S = 300.0
_RANK, _ERROR = re.compile(r"^\[\d+\] "), re.compile(r"[\w.]*Error\b")


class ArenaError(Exception):
    """A contestant did not start, or failed.

    Args:
        name: whose.
        what: what happened to it.
        said: the end of what it has written.
    """

    def __init__(self, name: str, what: str, said: str = "") -> None:
        super().__init__(f"{name}: {what}" + (f"; its output:\n{said}" if said else ""))
        self._what, self._said = what, said

    @property
    def brief(self) -> str:
        """What happened in a line, with the line of the output that tells most: an error's."""
        what, *traceback = self._what.splitlines()
        output = [_RANK.sub("", line).strip() for line in self._said.splitlines()] + traceback
        output = [line for line in output if line]
        errors = [line for line in output if _ERROR.match(line)]
        return ": ".join([what.removesuffix(":"), *(errors or output)[-1:]])


class _Rank:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self.connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")

    def tell(self, request: dict[str, Any]) -> None:
        # Whether it is still there is seen when its answer is read.
        with contextlib.suppress(ConnectionError):
            self.connection.sendall(json.dumps(request).encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """Return what it says next, or None if it is gone."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self.connection.close()


class _Job:
    """A running contestant."""

    def __init__(self, contestant: Contestant, folder: Path) -> None:
        self.name = contestant.name
        self.size = contestant.ranks
        self.version = ""
        self.ranks: dict[int, _Rank] = {}
        folder.mkdir()
        StartLine.create(folder / "startline", self.size)
        self._output = folder / "output"
        self._processes: list[subprocess.Popen[bytes]] = []
        with open(self._output, "wb") as output:
            for command, variables in contestant.commands(folder):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        env={**os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                        preexec_fn=die_with_parent(),
                    )
                )

    def meet(self, server: socket.socket) -> None:
        """Wait until all ranks have connected."""
        deadline = time.monotonic() + _START_S
        while len(self.ranks) < self.size:
            with contextlib.suppress(TimeoutError):
                rank = _Rank(server.accept()[0])
                hello = rank.hear() or {}
                self.ranks[hello["rank"]], self.version = rank, hello["version"]
            if not self.running or time.monotonic() > deadline:
                raise self.error(f"{len(self.ranks)} of {self.size} ranks have started")

    @property
    def running(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def error(self, what: str) -> ArenaError:
        """Return an error with the end of what the job has written."""
        said = self._output.read_text(errors="replace")[-4000:].strip()
        return ArenaError(self.name, what, said)

    def end(self, patience: float = _END_S) -> None:
        """Hang up, which ends the ranks, and see to it that they are gone."""
        segments = {
            file for process in self._processes for file in mpi_segments(process.pid)
        }  # as long as the ranks are there
        for rank in self.ranks.values():
            rank.close()
        deadline = time.monotonic() + (patience if self.ranks else 0.0)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for number, left in ((signal.SIGTERM, 3.0), (signal.SIGKILL, None)):
            for process in self._processes:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
            for process in self._processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(left)
        remove_segments(segments)


class Arena:
    """All contestants' jobs, started. A context manager that ends them.

    Args:
        contestants: who takes part.

    Attributes:
        failed: those that did not start or that have failed since, and why. They take no
            further part.
    """

    def __init__(self, contestants: Sequence[Contestant]) -> None:
        self.failed: dict[str, ArenaError] = {}
        self._all = list(contestants)
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
            for number, contestant in enumerate(self._all):
                # One after the other: they would be in each other's way.
                name = contestant.name
                try:
                    self._jobs[name] = _Job(contestant, folder / str(number))
                    self._jobs[name].meet(server)
                except ArenaError as error:
                    self._drop(name, error)
                except (CollectiveError, OSError) as error:
                    self._drop(name, ArenaError(name, str(error)))

    def _drop(self, name: str, error: ArenaError) -> None:
        self.failed[name] = error
        if name in self._jobs:
            self._jobs.pop(name).end(0.0)

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
    def contestants(self) -> list[Contestant]:
        """Those that are there."""
        return [contestant for contestant in self._all if contestant.name in self._jobs]

    @property
    def versions(self) -> dict[str, str]:
        """What each contestant says it is."""
        return {name: job.version for name, job in self._jobs.items()}

    def ask(self, name: str, do: str, **request: Any) -> list[dict[str, Any]] | str:
        """Have all ranks of a contestant do something.

        Returns:
            The answers in rank order; or why the library cannot.

        Raises:
            ArenaError: a rank raised, or has ended, or takes too long; or did so before. The
                contestant takes no further part.
        """
        if name in self.failed:
            raise self.failed[name]
        try:
            return self._ask(self._jobs[name], do, request)
        except ArenaError as error:
            self._drop(name, error)
            raise

    def _ask(self, job: _Job, do: str, request: dict[str, Any]) -> list[dict[str, Any]] | str:
        for rank in job.ranks.values():
            rank.tell({"do": do, **request})
        answers: dict[int, dict[str, Any]] = {}
        patience = _ANSWER_S.get(do, _LONGEST_S)
        deadline = time.monotonic() + patience
        with selectors.DefaultSelector() as waiting:
            for number, rank in job.ranks.items():
                waiting.register(rank.connection, selectors.EVENT_READ, number)
            while len(answers) < job.size:
                events = waiting.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise job.error(f"{do}: no answer within {patience:g} s")
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
        return [answers[number] for number in range(job.size)]
