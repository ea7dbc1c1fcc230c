"""Ranks of a pool that ``mpiexec`` starts, so that MPI knows of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import collective
from collective.errors import BackendUnavailableError

from . import worker
from .failed import Outcome
from .process_ranks import Member, ProcessRanks
from .seat import Job

__all__ = ["Mpiexec", "MpiexecRanks"]

# How long the ranks may take to start and to call back, and to leave by themselves.
_START_S = 60.0
_LEAVE_S = 3.0
# A rank that dies must take no others with it: the checks of failures are about what they
# hear. Open MPI also wants to be told of more ranks than cores, and if it is root who asks.
_OPEN_MPI = ("--oversubscribe", "--with-ft", "ulfm")
_ROOT = ("--allow-run-as-root",)
_HYDRA = ("-disable-auto-cleanup",)
_RANK = "import sys; from collective.testing import worker; worker.main(sys.argv[1:])"


@dataclass(frozen=True)
class Mpiexec:
    """With what the ranks of an MPI are started.

    Attributes:
        python: the interpreter of an environment with mpi4py and an MPI library; this one
            by default.
        program: the ``mpiexec`` of that library; by default the one beside ``python``, or
            else on the ``PATH``.
    """

    python: str = sys.executable
    program: str | None = None

    @cached_property
    def command(self) -> tuple[str, ...]:
        """What starts ranks, up to their number.

        Raises:
            BackendUnavailableError: there is no ``mpiexec``.
        """
        beside = Path(self.python).parent / "mpiexec"
        program = self.program or (str(beside) if beside.exists() else shutil.which("mpiexec"))
        try:
            if program is None:
                raise FileNotFoundError(f"no mpiexec beside {self.python} or on the PATH")
            told = subprocess.run(
                [program, "--version"], capture_output=True, text=True, timeout=_START_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendUnavailableError(
                f"mpiexec: {error}. Install an MPI library with its mpiexec into the environment: "
                "pip install mpi4py mpich"
            ) from error
        if "Open MPI" in told.stdout + told.stderr:
            return (program, *_OPEN_MPI, *(_ROOT if os.geteuid() == 0 else ()))
        return (program, *_HYDRA)


class _Called(Member):
    """A process that ``mpiexec`` started and that called back."""

    def __init__(self, jobs: Connection, control: Connection, pid: int) -> None:
        super().__init__(jobs, control)
        self._pid = pid
        self._process = os.pidfd_open(pid)

    def segments(self) -> set[str]:
        """Return the files of shared memory that the process has mapped."""
        try:
            maps = Path(f"/proc/{self._pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return set()
        return set(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))

    def kill(self) -> None:
        if self._process >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = -1
        super().kill()


class MpiexecRanks(ProcessRanks):
    """Runs jobs in processes of one ``mpiexec``; if one is gone, all are replaced."""

    def __init__(self, size: int, launch: Mpiexec) -> None:
        super().__init__(size)
        self._launch = launch
        self._mpiexec: subprocess.Popen[bytes] | None = None
        self._segments: set[str] = set()

    def run(self, job: Job, timeout: float) -> dict[int, Outcome]:
        """Run ``job`` as :meth:`ProcessRanks.run` does."""
        try:
            return super().run(job, timeout)
        finally:
            # MPI removes its shared memory at its end, which some ranks may not come to.
            for member in self._members.values():
                assert isinstance(member, _Called)
                self._segments |= member.segments()

    def _fill(self) -> None:
        if len(self._members) == self.size:
            return
        self._end()
        directory = tempfile.mkdtemp(prefix="collective-testing-")
        try:
            with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryFile() as output:
                listener.bind(f"{directory}/socket")
                listener.listen(len(worker.PIPES) * self.size)
                listener.settimeout(0.2)
                self._mpiexec = self._start(f"{directory}/socket", output)
                try:
                    self._gather(listener, output)
                except BaseException:
                    self._end()
                    raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _start(self, place: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
        root = str(Path(collective.__file__).parent.parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        ranks = [self._launch.python, "-c", _RANK, place]
        return subprocess.Popen(
            [*self._launch.command, "-n", str(self.size), *ranks],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _gather(self, listener: socket.socket, output: IO[bytes]) -> None:
        """Wait until all ranks have called back."""
        assert self._mpiexec is not None
        deadline = time.monotonic() + _START_S
        pipes: dict[tuple[int, str], Connection] = {}
        pids: dict[int, int] = {}
        while len(pipes) < len(worker.PIPES) * self.size:
            try:
                called, _ = listener.accept()
            except TimeoutError:
                if self._mpiexec.poll() is None and time.monotonic() < deadline:
                    continue
                output.seek(0)
                told = output.read()[-2000:].decode(errors="replace")
                raise BackendUnavailableError(
                    f"mpiexec: {len(pids)} of {self.size} ranks have started with "
                    f"{' '.join(map(str, self._mpiexec.args))}\n{told}"  # type: ignore[arg-type]
                ) from None
            called.setblocking(True)
            pipe = Connection(called.detach())
            rank, pid, which = pipe.recv()
            pipes[rank, which] = pipe
            pids[rank] = pid
        for rank, pid in pids.items():
            jobs, control = (pipes[rank, which] for which in worker.PIPES)
            self._members[rank] = _Called(jobs, control, pid)

    def close(self) -> None:
        """Let the ranks leave together: MPI waits for all of them at its end."""
        for member in self._members.values():
            member.jobs.close()
        if self._mpiexec is not None and len(self._members) == self.size:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._mpiexec.wait(_LEAVE_S)
        self._end()

    def _end(self) -> None:
        """End what is left."""
        members, self._members = self._members, {}
        for member in members.values():
            member.kill()
        mpiexec, self._mpiexec = self._mpiexec, None
        if mpiexec is not None:
            try:
                mpiexec.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                mpiexec.terminate()
                try:
                    mpiexec.wait(_LEAVE_S)
                except subprocess.TimeoutExpired:
                    mpiexec.kill()
                    mpiexec.wait()
        for segment in self._segments:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(segment)
        self._segments.clear()
