"""Start of ranks through mpiexec, since only its processes are an MPI world.

For each rank, ``mpiexec`` starts a small helper process (:mod:`collective.launch.mpi_rank`). The
helper starts the rank, connects it to pipes of the supervisor, passes on the supervisor's signals
and reports the rank's end. So output, exit codes, the report of the first failure and Ctrl-C are
the same as without mpiexec. They do not depend on how any mpiexec treats its processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from collective.inner import Deadline

from .agent import Host, LocalHost
from .agent_line import AgentLine, Message, StreamBytes
from .loop import Loop
from .mpi_rank import PIPES
from .mpiexec import mpi_segments, remove_segments
from .supervisor import MeetingStore, Place, Rank, Supervisor
from .variables import Run

# If mpiexec has killed a helper, mpiexec itself should end within this time after it.
_MOMENT_S = 0.5
# How long mpiexec may take to end after all helpers got the order to end.
_PATIENCE_S = 10.0
# A helper runs without the modules of these packages themselves: they import NumPy and much more,
# which it does not need, and which would take longer than its own start.
_HELPER = """
import sys, types
home, directory = sys.argv[1:]
for name in ("collective", "collective.launch"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [home + "/" + name.replace(".", "/")]
from collective.launch.mpi_rank import main
sys.exit(main(directory))
"""


def helper(directory: Path) -> list[str]:
    """Return the command of the helpers, whose pipes are in ``directory``."""
    home = Path(__file__).parents[2]
    return [sys.executable, "-I", "-S", "-c", _HELPER, str(home), str(directory)]


class _Helper(Host):
    """The helper of a rank: an agent on this host, with its pipes.

    Args:
        prefix: path of the pipes, without their kinds.
        shares: as in :class:`Host`.
    """

    def __init__(self, prefix: str, shares: Sequence[Sequence[int]]) -> None:
        super().__init__("", 1, "", local=True)
        self.shares = shares
        self._prefix = prefix

    def attend(self, loop: Loop, heard: Callable[[Message | StreamBytes], object]) -> None:
        self._loop, self._heard = loop, heard
        # O_RDWR makes this process a writer of the first three pipes, so that there is no end
        # of file before the helper has opened them. The pipe "reports" has no writer here: its
        # end of file tells that the helper has ended.
        *self._outputs, orders = (self._pipe(kind, os.O_RDWR) for kind in PIPES[:3])
        reports = self._pipe(PIPES[3], os.O_RDONLY)
        self.line = AgentLine(reports, orders, greeted=False)
        loop.watch(reports, self.hear)

    def _pipe(self, kind: str, flags: int) -> int:
        """Make a named pipe of the rank, and return its end here."""
        path = f"{self._prefix}.{kind}"
        os.mkfifo(path, 0o600)
        pipe = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop.open.callback(os.close, pipe)
        return pipe

    def post(self, frame: Message | StreamBytes) -> None:
        self.line.post(frame)
        if not isinstance(frame, StreamBytes) and frame["kind"] == "start":
            for stream, pipe in enumerate(self._outputs, 1):
                self._loop.relay(pipe, partial(self._relay, frame["process"], stream))

    def _relay(self, process: int, stream: int, data: bytes) -> None:
        self._heard(StreamBytes(process, stream, data))

    def hear(self) -> None:
        """Pass on what the helper has reported, and what its rank has written before its end."""
        reports = self.line.incoming
        if not self._loop.watches(reports):
            return  # all has been read
        try:
            frames = self.line.receive()
        except EOFError:
            self._loop.forget(reports)
            frames = [{"kind": "vanished"}]
        for frame in frames:
            for pipe in self._outputs:
                self._loop.drain(pipe)
            self._heard(frame)


class _MpiexecProcess(Rank):
    """mpiexec itself, which ends with its ranks; only SIGKILL is sent to it."""

    def send(self, number: int, *, group: bool) -> None:
        if number == signal.SIGKILL:
            super().send(number, group=True)


class MpiSupervisor(Supervisor):
    """Supervisor of one run as an MPI world, with one process for each environment.

    Args:
        control, run, environments, meeting: as in :class:`Supervisor`.
        host: this host.
        start: command of :class:`collective.launch.mpiexec.Mpiexec` for this number of ranks.
        directory: a private directory, in which the supervisor creates a folder ``mpi``.
    """

    def __init__(
        self, control: int, run: Run, environments: Sequence[Mapping[str, str]],
        meeting: MeetingStore, host: LocalHost, start: Sequence[str], directory: Path,
    ) -> None:  # fmt: skip
        self._start_with = start
        self._directory = directory / "mpi"
        self._helpers = [
            _Helper(f"{self._directory}/{number}", host.shares) for number in range(run.size)
        ]
        host.shares = ()  # mpiexec itself is not bound
        places = [Place(helper, number, run.size) for number, helper in enumerate(self._helpers)]
        super().__init__(control, run, environments, meeting, [host], places)
        self._mpiexec = _MpiexecProcess(-1, Place(host, 0, 1), [])
        self._vanished: list[tuple[Deadline, Rank]] = []
        self._own_failure = 0
        self._segments: set[str] = set()

    @property
    def failed(self) -> bool:
        return super().failed or bool(self._own_failure)

    def _begin(self) -> None:
        self._directory.mkdir(mode=0o700)
        for place in self._places:
            place.host.attend(self._loop, partial(self._heard, place.host))
        self._outlets |= {helper.line for helper in self._helpers}
        # Variables that all ranks share go through mpiexec, which may add some. The secret does
        # not, since mpiexec might send it over a network or put it on a command line.
        shared = dict(
            set.intersection(*(set(variables.items()) for variables in self._environments))
        )
        shared.pop("COLLECTIVE_SECRET", None)
        self._environments = [
            {name: value for name, value in variables.items() if name not in shared}
            for variables in self._environments
        ]
        super()._begin()
        self._by_process[self._mpiexec.process] = self._mpiexec
        self._ranks.append(self._mpiexec)
        command = [*self._start_with, *helper(self._directory)]
        self._order(self._mpiexec, command, shared)

    def _heard(self, host: Host, frame: Message | StreamBytes) -> None:
        if isinstance(frame, StreamBytes) or frame["kind"] != "vanished":
            super()._heard(host, frame)
            return
        rank = next(rank for rank in self._ranks if rank.place.host is host)
        if rank.runs:
            # The helper ended without a report. If mpiexec has killed it, mpiexec is about to end,
            # and its exit code explains more. So wait a moment before the rank counts as killed.
            self._vanished.append((Deadline(_MOMENT_S), rank))

    def _wrote(self, rank: Rank, stream: int, data: bytes) -> None:
        if rank is not self._mpiexec:
            super()._wrote(rank, stream, data)
            return
        # Show the output of mpiexec itself, unless the run is already known to fail or end.
        self._hear_all()
        if data and not self._failed and not self._signalled:
            self._error.fresh_line()
            self._error.write(data)

    def _hear_all(self) -> None:
        for helper in self._helpers:
            helper.hear()

    def _stop(self, number: int, schedule: Sequence[tuple[float, int]]) -> None:
        self._segments |= mpi_segments(os.getpid())  # while the ranks still run
        super()._stop(number, schedule)

    def _ended(self, rank: Rank, code: int) -> None:
        if rank is self._mpiexec:
            self._give_up(code)
            return
        if code:
            self._segments |= mpi_segments(os.getpid())
        super()._ended(rank, code)
        if code and self._run.least < self._run.size:
            # Open MPI reports a helper to the other ranks if it is killed, but not if it exits
            # with a nonzero code. So the helper has to kill itself.
            rank.place.host.post({"kind": "die"})
        if not any(other.runs for other in self._ranks if other is not self._mpiexec):
            self._let_go()

    def _time_left(self) -> float | None:
        left = super()._time_left()
        due = [moment.left() for moment, rank in self._vanished if rank.runs]
        return min([left, *due] if left is not None else due, default=None)

    def _keep_schedule(self) -> None:
        super()._keep_schedule()
        for moment, rank in self._vanished:
            if rank.runs and moment.expired:
                self._ended(rank, -signal.SIGKILL)

    def _let_go(self) -> None:
        """Order the helpers to end, and mpiexec ends with them."""
        for helper in self._helpers:
            helper.post({"kind": "finish"})
        if not self._schedule:
            self._schedule = [(Deadline(_PATIENCE_S), signal.SIGKILL)]

    def _give_up(self, code: int) -> None:
        """Handle the end of mpiexec."""
        self._hear_all()
        running = [rank for rank in self._ranks if rank.runs and rank is not self._mpiexec]
        for rank in self._ranks:
            if rank.runs:
                rank.code = code
        # mpiexec gave up by itself: it could not start the ranks, or a rank called MPI_Abort.
        if running and not self._failed and not self._signalled:
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
