"""Start of ranks through mpiexec, since only its processes are an MPI world.

For each rank, ``mpiexec`` starts a small helper process (:mod:`collective.launch.mpi_rank`). The
helper starts the rank, connects it to pipes of the supervisor, passes on the supervisor's signals
and reports the rank's end. So output, exit codes, the report of the first failure and Ctrl-C are
the same as without mpiexec. They do not depend on how any mpiexec treats its processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from collective.deadline import Deadline
from collective.platform import descriptor_path, die_with_parent

from .processes import mpi_segments, remove_segments
from .rank import LocalRank
from .supervisor import Supervisor

__all__ = ["MpiSupervisor"]

# Order for a rank's helper process to end, once all ranks have reported. Other orders are signals.
_GO = 0
_GROUP = 0x80
# If mpiexec has killed a helper, mpiexec itself should end within this time after it.
_MOMENT_S = 0.5
# How long mpiexec may take to end after all helpers got the order to end.
_PATIENCE_S = 10.0
_STARTER = Path(__file__).with_name("mpi_rank.py")


class _Remote(LocalRank):
    """Rank whose helper process mpiexec has started."""

    def __init__(
        self,
        number: int,
        process: subprocess.Popen[bytes],
        orders: int,
        end: int,
        directory: Path,
    ) -> None:
        super().__init__(number, process)
        self._pid_file = directory / f"{number}.pid"
        self.orders = orders
        self.end = end

    @property
    def pid(self) -> int:
        try:
            return int(self._pid_file.read_text() or "0")
        except FileNotFoundError:
            return 0

    def send(self, number: int, *, group: bool) -> None:
        if self.runs:
            self.order(number | (_GROUP if group else 0))

    def order(self, byte: int) -> None:
        with contextlib.suppress(BlockingIOError):  # the helper has not read the last 65536 orders
            os.write(self.orders, bytes([byte]))


class _MpiexecProcess(LocalRank):
    """mpiexec itself, which ends with its ranks; only SIGKILL is sent to it."""

    def send(self, number: int, *, group: bool) -> None:
        if number == signal.SIGKILL:
            super().send(number, group=True)


class MpiSupervisor(Supervisor):
    """Supervisor of one run as an MPI world, with one process for each environment.

    Args:
        control, command, environments, spare, verbose, tell: as in :class:`Supervisor`.
        start: command of :class:`collective.launch.mpiexec.Mpiexec` for this number of ranks.
        directory: a private directory, in which the supervisor creates a folder ``mpi``.
    """

    def __init__(
        self,
        control: int,
        start: Sequence[str],
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        directory: Path,
        spare: int = 0,
        verbose: bool = False,
        tell: Callable[[Mapping[int, str]], object] = lambda ended: None,
    ) -> None:
        super().__init__(control, command, environments, spare, None, verbose, tell)
        self._start_with = start
        self._directory = directory / "mpi"
        self._remotes: list[_Remote] = []
        self._vanished: list[tuple[Deadline, _Remote]] = []
        self._own_failure = 0
        self._segments: set[str] = set()

    @property
    def failed(self) -> bool:
        return super().failed or bool(self._own_failure)

    def _begin(self) -> None:
        self._directory.mkdir(mode=0o700)
        # Variables that all ranks share go through mpiexec, which may add some. The secret does
        # not, since mpiexec might send it over a network or put it on a command line.
        shared = dict(
            set.intersection(*(set(variables.items()) for variables in self._environments))
        )
        shared.pop("COLLECTIVE_SECRET", None)
        pipes = []
        for number, environment in enumerate(self._environments):
            own = [f"{name}={environment[name]}" for name in environment.keys() - shared.keys()]
            prefix = self._directory / str(number)
            Path(f"{prefix}.environment").write_bytes(os.fsencode("\0".join(own)))
            # O_RDWR makes this process a writer of the first three pipes, so that there is no end
            # of file before the helper has opened them. The pipe "end" has no writer here: its
            # end of file tells that the helper has ended.
            ends = {"out": os.O_RDWR, "error": os.O_RDWR, "orders": os.O_RDWR, "end": os.O_RDONLY}
            pipes.append([_pipe(f"{prefix}.{kind}", flags) for kind, flags in ends.items()])
            for pipe in pipes[-1]:
                self._open.callback(os.close, pipe)
        # Ranks cannot read a terminal from another session. Other standard input goes to rank 0.
        path = descriptor_path(0)
        if path is not None and not os.isatty(0):
            (self._directory / "0.in").symlink_to(path)
        starter = [sys.executable, "-I", "-S", str(_STARTER), str(self._directory)]
        process = subprocess.Popen(
            [*self._start_with, *starter, *self._command],
            env=shared,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent(),  # safe: this process has one thread
        )
        for number, (out, error, orders, end) in enumerate(pipes):
            rank = _Remote(number, process, orders, end, self._directory)
            self._remotes.append(rank)
            self._attend(rank)
            for pipe, stream in zip((out, error), rank.streams, strict=True):
                self._read_from(pipe, rank, stream)
            self._watch(end, partial(self._learn, rank))
        self._ranks.append(_MpiexecProcess(-1, process))
        self._mpiexec = process
        assert process.stdout is not None
        self._open.callback(process.stdout.close)
        os.set_blocking(process.stdout.fileno(), False)
        self._own = process.stdout.fileno()
        self._watch(self._own, self._relay_own)

    def _relay_own(self) -> None:
        """Show the output of mpiexec itself, unless the run is already known to fail or end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._own, 65536)
            if not data:
                if self._own in self._selector.get_map():
                    self._selector.unregister(self._own)
            elif not self._failed and not self._signalled:
                self._error.fresh_line()
                self._error.write(data)

    def _learn(self, rank: _Remote) -> None:
        """Read the report of a rank's end."""
        if rank.end not in self._selector.get_map():
            return  # all of the report has been read
        try:
            data = os.read(rank.end, 64)
        except BlockingIOError:
            return
        if data:
            self._gone(rank, int(data))
        else:
            self._selector.unregister(rank.end)
            if rank.runs:
                # The helper ended without a report. If mpiexec has killed it, mpiexec is about to
                # end, and its exit code explains more. So wait a moment before the rank counts as
                # killed.
                self._vanished.append((Deadline(_MOMENT_S), rank))

    def _stop(self, number: int, schedule: Sequence[tuple[float, int]]) -> None:
        self._segments |= mpi_segments(os.getpid())  # while the ranks still run
        super()._stop(number, schedule)

    def _gone(self, rank: _Remote, code: int) -> None:
        if code:
            self._segments |= mpi_segments(os.getpid())
        self._ended(rank, code)
        if code and self._spare:
            # Open MPI reports a helper to the other ranks if it is killed, but not if it exits
            # with a nonzero code. So the helper has to kill itself.
            rank.order(signal.SIGKILL)
        if not any(remote.runs for remote in self._remotes):
            self._let_go()

    def _time_left(self) -> float | None:
        left = super()._time_left()
        due = [moment.left() for moment, rank in self._vanished if rank.runs]
        return min([left, *due] if left is not None else due, default=None)

    def _keep_schedule(self) -> None:
        super()._keep_schedule()
        for moment, rank in self._vanished:
            if rank.runs and moment.expired:
                self._gone(rank, -signal.SIGKILL)

    def _let_go(self) -> None:
        """Order the helpers to end, and mpiexec ends with them."""
        for rank in self._remotes:
            rank.order(_GO)
        if not self._schedule:
            self._schedule = [(Deadline(_PATIENCE_S), signal.SIGKILL)]

    def _reaped(self, pid: int, code: int) -> None:
        process = self._mpiexec
        if pid != process.pid:
            return
        process.returncode = code
        for remote in self._remotes:
            self._learn(remote)
        running = [rank for rank in self._remotes if rank.runs]
        for rank in self._ranks:
            if rank.runs:
                rank.code = code
        # mpiexec gave up by itself: it could not start the ranks, or a rank called MPI_Abort.
        if running and not self._failed and not self._signalled:
            self._relay_own()
            self._own_failure = code or 1

    def _conclude(self) -> int:
        code = super()._conclude()
        remove_segments(self._segments)
        if self._own_failure and not code:
            code = self._own_failure if self._own_failure > 0 else 128 - self._own_failure
            print(
                f"collective run: mpiexec ended before the ranks did (exit code {code}); its "
                "output is above.",
                file=sys.stderr,
            )
        return code


def _pipe(path: str, flags: int) -> int:
    os.mkfifo(path, 0o600)
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
