"""Ranks as processes that commands start, and that call back: under ``mpiexec``, among others."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from collective.deadline import Deadline
from collective.errors import BackendUnavailableError

from .control import short_path
from .mpiexec import Mpiexec
from .outcome import Outcome, RankDiedError
from .process_starter import ProcessHandle, encoded, wait_for_answers
from .processes import mpi_segments, remove_segments
from .ranks import LOAD_S, Handle, Job, Starter

__all__ = ["Command", "CommandStarter", "under_mpiexec"]

#: What is executed, and the environment variables that are added to this process's.
Command = tuple[Sequence[str], Mapping[str, str]]

# How long what has started the ranks may take to end after them, and after a signal.
_END_S = 3.0
# How often it is looked at whether what starts the ranks still runs.
_LOOK_S = 0.2
_SHOWN = 4000  # bytes of output in errors
# Until what a rank wrote before its end has come through what started it.
_PASSED_ON_S = 0.05
_RANK = "import sys; from collective.launch import control; control.main(sys.argv[1:])"


def under_mpiexec(
    size: int, mpiexec: Mpiexec, *, lasting: bool = True, session: bool = True
) -> CommandStarter:
    """Return what starts ``size`` ranks of an MPI world.

    Args:
        size: how many.
        mpiexec: with what.
        lasting: whether one that dies leaves the others; that takes MPICH or Open MPI 5.
        session: as of :class:`CommandStarter`.
    """

    def commands(address: str) -> list[Command]:
        home = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        start = mpiexec.command(size, lasting=lasting)
        return [([*start, mpiexec.python, "-c", _RANK, address], {"PYTHONPATH": path})]

    return CommandStarter(size, commands, session=session)


class _Called(ProcessHandle):
    """A process that has called back."""

    def __init__(
        self, rank: int, line: Connection, pid: int, before_kill: Callable[[], None]
    ) -> None:
        # Not the number alone: nobody here reaps the process, so that another may get it.
        super().__init__(rank, line, os.pidfd_open(pid))
        self._before_kill = before_kill

    def _exit_code(self) -> int | None:
        return None

    def end(self, deadline: Deadline) -> None:
        if not wait([self.death], deadline.left()):
            self._before_kill()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.death, signal.SIGKILL)
        os.close(self.death)
        self.line.close()


class CommandStarter(Starter):
    """Makes ranks that commands start; if one is gone, all are replaced.

    Each rank connects to a socket (:func:`collective.launch.control.call_back`) and serves what
    comes through that connection. What the commands and the ranks write is kept for errors.

    Args:
        size: how many ranks call back.
        commands: given the address where they call back, returns what is to be executed.
        patience: seconds until all have called.
        session: whether what is executed gets a session of its own, which is ended as a whole.
    """

    together = True

    def __init__(
        self,
        size: int,
        commands: Callable[[str], Sequence[Command]],
        patience: float = LOAD_S,
        *,
        session: bool = True,
    ) -> None:
        self._size = size
        self._commands = commands
        self._patience = patience
        self._session = session
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output: IO[bytes] | None = None
        self._written = ""
        self._segments: set[str] = set()
        self._noted = False

    def encode(self, job: Job) -> bytes:
        return encoded(job)

    def wait(self, handles: Mapping[int, Any], deadline: Deadline) -> dict[int, Outcome | None]:
        answers = wait_for_answers(handles, deadline)
        outcomes = [answer for answer in answers.values() if answer is not None]
        # MPI makes its shared memory in the first job, and removes it at its end, which ranks
        # that are killed do not come to.
        if (outcomes and not self._noted) or any(one.error is not None for one in outcomes):
            self._note_segments()
        died = [one.error for one in outcomes if isinstance(one.error, RankDiedError)]
        if died:
            time.sleep(_PASSED_ON_S)
        for error in died:
            error.output = self.output()
        return answers

    def _note_segments(self) -> None:
        self._noted = True
        for process in self._processes:
            self._segments |= mpi_segments(process.pid)

    def start(self, ranks: Sequence[int]) -> dict[int, Handle]:
        directory = tempfile.mkdtemp(prefix="collective-ranks-")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it is there as long as the ranks
        handles: dict[int, _Called] = {}
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = f"{directory}/socket"
                with short_path(address) as path:
                    listener.bind(path)
                listener.listen(self._size)
                listener.settimeout(_LOOK_S)
                for command, variables in self._commands(address):
                    self._execute(command, variables)
                self._gather(listener, handles)
        except BaseException:
            for handle in handles.values():
                handle.end(Deadline(0.0))
            self.end()
            raise
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return dict(handles)

    def _execute(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=self._session,
            )
        )

    def _gather(self, listener: socket.socket, handles: dict[int, _Called]) -> None:
        """Wait until all ranks have called back."""
        deadline = Deadline(self._patience)
        while len(handles) < self._size:
            try:
                called, _ = listener.accept()
            except TimeoutError:
                ended = any(process.poll() is not None for process in self._processes)
                if not ended and not deadline.expired:
                    continue
                what = " ".join(map(str, self._processes[0].args))  # type: ignore[arg-type]
                raise BackendUnavailableError(
                    f"start: {len(handles)} of {self._size} ranks have started\n{what}\n"
                    f"{self.output()}"
                ) from None
            called.setblocking(True)
            line = Connection(called.detach())
            # One that is gone before it has said who it is has not started.
            with contextlib.suppress(EOFError, ConnectionError, ProcessLookupError):
                rank, pid = line.recv()
                handles[rank] = _Called(rank, line, pid, self._note_segments)

    def output(self) -> str:
        """Return the end of what the commands and the ranks have written."""
        if self._output is None:
            return self._written
        file = self._output.fileno()
        start = max(0, os.fstat(file).st_size - _SHOWN)
        return os.pread(file, _SHOWN, start).decode(errors="replace").strip()

    def end(self) -> None:
        processes, self._processes = self._processes, []
        _wait(processes)
        self._noted = False
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                # What is still there may have started more, in its group.
                if process.poll() is None:
                    self._segments |= mpi_segments(process.pid)
                    with contextlib.suppress(ProcessLookupError):
                        (os.killpg if self._session else os.kill)(process.pid, number)
            _wait(processes)
        remove_segments(self._segments)
        self._segments.clear()
        if self._output is not None:
            self._written = self.output()
            self._output.close()
            self._output = None


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = Deadline(_END_S)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadline.left())
