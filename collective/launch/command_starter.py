"""Ranks as processes that a command such as ``mpiexec`` starts, and that call back."""

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

from collective import BackendUnavailableError
from collective.inner import Deadline, platform

from .mpiexec import Mpiexec, mpi_segments, remove_segments
from .outcome import Outcome, RankDiedError
from .process_starter import ProcessHandle, ProcessStarter
from .ranks import LOAD_S, RankHandle

#: Command to execute, and environment variables to add to those of this process.
Command = tuple[Sequence[str], Mapping[str, str]]

# How long the commands may take to end after the ranks, and after a signal.
_END_S = 3.0
# How often this module checks whether the commands still run.
_LOOK_S = 0.2
_SHOWN = 4000  # bytes of output in errors
# Time for the last output of a rank to arrive through the command that started it.
_PASSED_ON_S = 0.05
_RANK = "import sys; from collective.launch import rank_line; rank_line.main(sys.argv[1:])"


def under_mpiexec(
    size: int, mpiexec: Mpiexec, *, lasting: bool = True, session: bool = True
) -> CommandStarter:
    """Return a starter for ``size`` ranks of an MPI world.

    Args:
        size: number of ranks.
        mpiexec: program that starts the ranks.
        lasting: if true, the others continue when a rank dies. This needs MPICH or Open MPI 5.
        session: as in :class:`CommandStarter`.
    """

    def commands(address: str) -> list[Command]:
        home = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        start = mpiexec.command(size, lasting=lasting)
        return [([*start, mpiexec.python, "-c", _RANK, address], {"PYTHONPATH": path})]

    return CommandStarter(size, commands, session=session)


class CalledProcess(ProcessHandle):
    """Process of which this one is not the parent, such as one that has called back.

    Args:
        rank, line: as in :class:`ProcessHandle`.
        pid: number of the process.
        before_kill: function to call before the process is killed.
    """

    def __init__(
        self, rank: int, line: Connection, pid: int, before_kill: Callable[[], None] = lambda: None
    ) -> None:
        # The number alone may be reused, since this process does not reap the rank.
        self._process = platform.EndOfProcess(pid)
        super().__init__(rank, line, self._process.descriptor)
        self._before_kill = before_kill

    def _exit_code(self) -> int | None:
        return None

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._before_kill()
        self._process.kill()

    def end(self, deadline: Deadline) -> None:
        if not wait([self.death], deadline.left()):
            self.kill()
        self._process.close()
        self.line.close()


class CommandStarter(ProcessStarter):
    """Starter of ranks by commands; if one rank has ended, all are replaced.

    Each rank connects to a socket (:func:`collective.launch.rank_line.call_back`) and runs the jobs
    that arrive through this connection. The output of the commands and the ranks is kept for
    errors.

    Args:
        size: number of ranks that call back.
        commands: function that returns the commands. Its argument is the address where ranks call
            back.
        patience: seconds in which all ranks have to call back.
        session: if true, each command gets its own session. It is ended as a whole.
    """

    together, shares_main = True, False

    def __init__(
        self, size: int, commands: Callable[[str], Sequence[Command]], patience: float = LOAD_S, *,
        session: bool = True,
    ) -> None:  # fmt: skip
        self._size = size
        self._commands = commands
        self._patience = patience
        self._session = session
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output: IO[bytes] | None = None
        self._written = ""
        self._segments: set[str] = set()
        self._noted = False

    def wait(self, handles: Mapping[int, Any], deadline: Deadline) -> dict[int, Outcome | None]:
        answers = super().wait(handles, deadline)
        outcomes = [answer for answer in answers.values() if answer is not None]
        # MPI creates its shared memory in the first job and removes it when a rank ends normally.
        # Ranks that are killed leave it behind, so note its files while they run.
        if (outcomes and not self._noted) or any(done.error is not None for done in outcomes):
            self._note_segments()
        died = [done.error for done in outcomes if isinstance(done.error, RankDiedError)]
        if died:
            time.sleep(_PASSED_ON_S)
        for error in died:
            error.output = self.output()
        return answers

    def _note_segments(self) -> None:
        self._noted = True
        for process in self._processes:
            self._segments |= mpi_segments(process.pid)

    def start(self, ranks: Sequence[int]) -> dict[int, RankHandle]:
        directory = tempfile.mkdtemp(prefix="collective-ranks-")
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the ranks
        handles: dict[int, CalledProcess] = {}
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = f"{directory}/socket"
                with platform.short_path(address) as path:
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

    def _gather(self, listener: socket.socket, handles: dict[int, CalledProcess]) -> None:
        """Wait until all ranks have called back."""
        deadline = Deadline(self._patience)
        while len(handles) < self._size:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                ended = any(process.poll() is not None for process in self._processes)
                if not ended and not deadline.expired:
                    continue
                command = " ".join(map(str, self._processes[0].args))  # type: ignore[arg-type]
                raise BackendUnavailableError(
                    f"start: {len(handles)} of {self._size} ranks have started\n{command}\n"
                    f"{self.output()}"
                ) from None
            connection.setblocking(True)
            line = Connection(connection.detach())
            # A rank that ends before it has sent its number and process id has not started. A rank
            # that is stopped must not stop this process, too.
            with contextlib.suppress(EOFError, ConnectionError, ProcessLookupError):
                if not line.poll(deadline.left()):
                    continue
                rank, pid = line.recv()
                handles[rank] = CalledProcess(rank, line, pid, self._note_segments)

    def output(self) -> str:
        """Return the end of the output of the commands and the ranks."""
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
                # A command that still runs may have started more processes, in its group.
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
