"""Process between the launcher and the ranks: it starts the ranks, relays their output, stops them.

The supervisor is the parent of the ranks, and it adopts all their descendants. It has its own
session, so it survives if the launcher is killed together with its process group. It then sees
the end of a pipe, and ends all ranks. If the supervisor itself is killed, the launcher adopts its
children. Only the launcher receives signals; it sends them to the supervisor as bytes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from collective.contract.process import RankProcess
from collective.deadline import Deadline
from collective.errors import CollectiveError
from collective.platform import adopt_orphans

from .interrupt import sift, summary
from .processes import Ending, end_children, ended_children
from .rank import LocalRank, Rank, start_process
from .screen import RankOutput, Screen
from .tracebacks import split_traceback
from .verdict import (
    FailedRank,
    exit_code,
    first_in_cause,
    how_ended,
    loss,
    losses,
    report,
    shortfall,
)

__all__ = ["PIPE_READS", "Replacing", "Supervisor"]

# After the first failure, the other ranks have some time to notice and report it. Together with
# the time of end_children, it stays below the promised two seconds.
_AFTER_FAILURE = ((0.75, signal.SIGTERM), (1.25, signal.SIGKILL))
_ORPHANS_AFTER_FAILURE_S = 0.15
_ORPHANS_AFTER_SUCCESS_S = 0.5
# After Ctrl-C or another signal, the ranks have this much time to clean up.
_AFTER_SIGNAL = ((2.0, signal.SIGTERM), (2.5, signal.SIGKILL))
# If a replacement of a rank fails sooner than this, the next replacement would fail as well.
_QUICK_S = 10.0
# Unfinished lines (prompts, bars) appear on a terminal once the rank pauses for this long.
_PAUSE_S = 0.05
#: A pipe holds 1 MiB at most, and each read takes 64 KiB.
PIPE_READS = 16
# Number of bytes of standard error to keep. This is longer than a traceback, including tracebacks
# of peers that it may contain.
_TAIL = 256 * 1024


class Replacing(NamedTuple):
    """Rule by which lost ranks are replaced by processes that join the others.

    Attributes:
        environments: environment of each rank; its replacement gets it, too.
        admitted: function that returns the processes that the ranks have admitted.
    """

    environments: Sequence[Mapping[str, str]]
    admitted: Callable[[], Set[RankProcess]]

    def environment(self, number: int) -> Mapping[str, str]:
        """Return the environment for the replacement of a rank, which joins when ranks take it."""
        return {**self.environments[number], "COLLECTIVE_JOIN": "late"}

    def fits(self, rank: Rank) -> bool:
        """Return whether to replace a lost rank: not if it was a replacement that failed soon."""
        return not rank.joins or time.monotonic() - rank.began > _QUICK_S


class Supervisor:
    """Supervisor of one run: starts a process for each environment and waits until all have ended.

    Args:
        control: the read end of a pipe. Each byte is the number of a signal that the launcher
            received. End of file means that the launcher has ended.
        command: command that each rank executes.
        environments: environment variables of each rank, by rank.
        spare: number of ranks that may fail. After one more failure the other ranks are stopped,
            and the run has failed.
        replacing: rule by which lost ranks are replaced; None if they are not replaced.
        verbose: if true, tracebacks are shown as the ranks write them. Otherwise the report at
            the end shows them, one for all ranks with the same, without the package's frames.
        tell: function that tells the ranks which of them have ended, and how: ranks that have not
            met yet wait for each other.
        failing: function that returns a rank that says that its main thread has failed, and the
            exit code that it will have; other threads keep its process from ending. None if no
            rank says so.
    """

    def __init__(
        self,
        control: int,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        spare: int = 0,
        replacing: Replacing | None = None,
        verbose: bool = False,
        tell: Callable[[Mapping[int, str]], object] = lambda ended: None,
        failing: Callable[[], tuple[int, int] | None] = lambda: None,
    ) -> None:
        self._control = control
        self._verbose = verbose
        self._tell = tell
        self._failing = failing
        self._ends: dict[int, str] = {}
        self._told = 0
        self._replacing = replacing
        self._command = command
        self._environments = environments
        self._spare = spare
        self._ranks: list[Rank] = []
        # Pipes still open at the other end.
        self._pipes: dict[int, tuple[Rank, RankOutput]] = {}
        # Descriptors from which output of ranks comes, each with the function that reads it.
        self._sources: dict[int, Callable[[], object]] = {}
        self._failed: list[Rank] = []
        # While the run is ending, the schedule has the signals still to send, with their times.
        # The attribute _signal is the signal that ended the run, if any. The attribute _signalled
        # is true once ranks were sent a signal. From then on, their exit codes mean nothing.
        self._stopping = False
        self._schedule: list[tuple[Deadline, int]] = []
        self._signal: int | None = None
        self._signalled = False
        self._hurried = False
        # For each rank whose traceback is held back: whether the rank seems to end.
        self._endings: dict[Rank, Ending] = {}
        self._stopped: set[int] = set()  # ranks that still ran when the schedule sent a signal
        # Closes all descriptors of this run at its end, since another run may follow.
        self._open = contextlib.ExitStack()
        # Unlike epoll, poll also accepts regular files.
        self._selector = self._open.enter_context(selectors.PollSelector())
        self._out = self._error = Screen(1)
        if not os.path.samestat(os.fstat(1), os.fstat(2)):
            self._error = Screen(2)

    @property
    def failed(self) -> bool:
        """Whether too many ranks failed, and no signal from outside ended the run."""
        return self._left() < self._least and self._signal is None

    @property
    def _least(self) -> int:
        return len(self._environments) - self._spare

    def _left(self) -> int:
        """Return the number of ranks that have not failed, without those still waiting to join.

        If waiting ones counted, a run could stay above its floor by replacements that wait for
        ranks which have ended by ``PeerLostError``, and each of them would be replaced in turn.
        """
        lost = sum(not rank.joins for rank in self._failed)
        joined = [rank for rank in self._ranks if rank.joins and rank not in self._failed]
        if joined and self._replacing is not None:
            admitted = self._replacing.admitted()
            joined = [rank for rank in joined if rank.is_among(admitted)]
        return len(self._environments) - lost + len(joined)

    def run(self) -> int:
        """Start the ranks, wait until all have ended, and return the exit code of the run.

        When this method returns, all processes that the ranks started have ended, too.
        """
        adopt_orphans()
        # SIGCHLD arrives as a byte in a pipe, so that no signal is missed just before the wait.
        wake, wake_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_end, False)
        self._open.callback(os.close, wake)
        self._open.callback(os.close, wake_end)
        # The handler itself is empty, but without a handler Python writes no byte to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        self._watch(wake, lambda: self._reap(wake))
        self._watch(self._control, self._obey)
        self._begin()
        while any(rank.runs for rank in self._ranks):
            self._step()
        code = self._conclude()
        signal.set_wakeup_fd(-1)
        self._open.close()
        return code

    def _begin(self) -> None:
        """Start the ranks."""
        for number, environment in enumerate(self._environments):
            self._start(number, environment)

    # -- events --------------------------------------------------------------------

    def _watch(self, descriptor: int, react: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, react)

    def _step(self) -> None:
        """Wait for the next event and handle it."""
        screens = {self._out, self._error}
        writing = [screen for screen in screens if screen.waiting]
        for screen in writing:
            self._selector.register(screen.descriptor, selectors.EVENT_WRITE, screen.flush)
        # Back-pressure: while a screen's backlog is full, do not read from the ranks. Their pipes
        # fill up, so a slow reader slows the ranks down.
        full = any(screen.full for screen in screens) and not self._hurried
        held = list(self._sources.items()) if full else []
        for source, _ in held:
            self._selector.unregister(source)
        events = self._selector.select(self._time_left())
        for screen in writing:
            self._selector.unregister(screen.descriptor)
        for source, read in held:
            self._watch(source, read)
        for key, _ in events:
            key.data()
        self._tell_ends()
        if self._out.broken and not self._stopping:
            self._stop(signal.SIGPIPE, _AFTER_FAILURE)
        self._keep_schedule()

    def _tell_ends(self) -> None:
        """Tell the ranks which of them have ended in this step."""
        if len(self._ends) > self._told and any(rank.runs for rank in self._ranks):
            self._told = len(self._ends)
            # The directory of the ranks may be gone, or its disk full: they wait then.
            with contextlib.suppress(CollectiveError, OSError):
                self._tell(self._ends)

    def _time_left(self) -> float | None:
        due = [moment for moment, _ in self._schedule]
        due += [Deadline.since(since, _PAUSE_S) for since, _ in self._unfinished()]
        due += [ending.next_look for ending in self._endings.values() if not self._stopping]
        return min((moment.left() for moment in due), default=None)

    def _unfinished(self) -> list[tuple[float, RankOutput]]:
        streams = [stream for rank in self._ranks for stream in rank.streams]
        return [(s.silent_since, s) for s in streams if s.screen.terminal and s.silent_since]

    def _keep_schedule(self) -> None:
        while self._schedule and self._schedule[0][0].expired:
            _, number = self._schedule.pop(0)
            self._signalled = True
            self._stopped |= {rank.number for rank in self._ranks if rank.runs and rank.streams}
            for rank in self._ranks:
                rank.send(number, group=True)
                rank.send(signal.SIGCONT, group=True)  # a stopped process does not react to it
        for since, stream in self._unfinished():
            if Deadline.since(since, _PAUSE_S).expired:
                stream.show_unfinished()
        for rank, ending in list(self._endings.items()):
            # While the run is ending, all tracebacks wait for the report.
            if not self._stopping and ending.next_look.expired and ending.is_refuted():
                self._show_traceback(rank)

    # -- ranks ---------------------------------------------------------------------

    def _start(
        self,
        number: int,
        environment: Mapping[str, str],
        joins: bool = False,
    ) -> None:
        # Ranks cannot read a terminal from another session. Other standard input goes to rank 0.
        to_rank_0 = number == 0 and not joins and not os.isatty(0)
        stdin = None if to_rank_0 else subprocess.DEVNULL
        process = start_process(self._command, environment, stdin)
        assert process.stdout is not None
        assert process.stderr is not None
        self._open.callback(process.stdout.close)
        self._open.callback(process.stderr.close)
        rank = LocalRank(number, process, joins)
        self._attend(rank)
        for pipe, stream in zip((process.stdout, process.stderr), rank.streams, strict=True):
            self._read_from(pipe.fileno(), rank, stream)

    def _attend(self, rank: Rank) -> None:
        """Add ``rank`` to the ranks, with a stream for each of its two outputs."""
        self._ranks.append(rank)
        rank.streams = [
            RankOutput(rank.number, self._out, 0),
            RankOutput(rank.number, self._error, _TAIL, holds_tracebacks=not self._verbose),
        ]

    def _read_from(self, pipe: int, rank: Rank, stream: RankOutput) -> None:
        """Relay what ``rank`` writes to a pipe to one of its streams."""
        os.set_blocking(pipe, False)
        self._pipes[pipe] = rank, stream
        self._add_source(pipe, partial(self._relay, pipe))

    def _add_source(self, descriptor: int, read: Callable[[], object]) -> None:
        """Call ``read`` when output of ranks has come, unless the screen takes no more."""
        self._sources[descriptor] = read
        self._watch(descriptor, read)

    def _remove_source(self, descriptor: int) -> None:
        del self._sources[descriptor]
        self._selector.unregister(descriptor)

    def _relay(self, pipe: int) -> bool:
        """Pass on output of a rank; return whether there may be more to read at once."""
        if pipe not in self._pipes:  # an event of the same step, whose handling has read the pipe
            return False
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return False
        rank, stream = self._pipes[pipe]
        if not data:
            self._remove_source(pipe)
            del self._pipes[pipe]
            stream.finish()
            return False
        self._show(rank, stream, data)
        return True

    def _show(self, rank: Rank, stream: RankOutput, data: bytes) -> None:
        """Show output of a rank, or hold it back if a traceback may be the rank's last."""
        error = rank.streams[1]
        if stream is not error and error.in_traceback and not self._stopping:
            self._show_traceback(rank)  # the rank goes on
        stream.feed(data)
        if error.in_traceback and rank not in self._endings:
            self._endings[rank] = Ending(rank.activity)

    def _show_traceback(self, rank: Rank) -> None:
        """Show a traceback that was held back in the belief that the rank is about to end."""
        self._endings.pop(rank, None)
        rank.streams[1].release(ends=False)

    def _reap(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(wake, 4096):
                pass
        # The run may continue for long, so end all processes of a lost rank now.
        for pid, code in ended_children(self._end_group if self._spare else None):
            self._reaped(pid, code)
        self._look_for_failing()

    def _end_group(self, pid: int, status: int) -> None:
        """End the process group of a failed rank before the rank is reaped and its id reused."""
        for rank in self._ranks:
            if isinstance(rank, LocalRank) and rank.process.pid == pid and status:
                rank.send(signal.SIGKILL, group=True)

    def _reaped(self, pid: int, code: int) -> None:
        """Handle the end of a child: a rank, or an orphan that this process has adopted."""
        for rank in self._ranks:
            if isinstance(rank, LocalRank) and rank.process.pid == pid:
                rank.process.returncode = code
                self._ended(rank, code)

    def _ended(self, rank: Rank, code: int) -> None:
        rank.code = code
        if not rank.joins and not self._signalled:
            self._ends.setdefault(rank.number, how_ended(_failure(rank)))
        if code == 0 and not self._stopping:
            self._finish_output(rank)
        if code == 0 or self._signalled or rank in self._failed:
            return
        self._failed.append(rank)
        if self._stopping:
            return
        left = self._left()
        if left >= self._least:
            self._finish_output(rank)
            replaced = self._replacing is not None and self._replaces(self._replacing, rank)
            size = len(self._environments)
            text = loss(_failure(rank), left, size, self._least, replaced)
            self._error.fresh_line()
            self._error.write(text.encode())
            if self._replacing is not None and replaced:
                self._start(rank.number, self._replacing.environment(rank.number), joins=True)
            return
        self._stop_after_failure()

    def _look_for_failing(self) -> None:
        """End the run if the main thread of a rank has failed, and the run cannot go on without."""
        if self._stopping or self._left() > self._least:
            return
        with contextlib.suppress(CollectiveError, OSError):
            number, code = self._failing() or (-1, 0)
            for rank in self._ranks:
                if rank.number == number and rank.runs and not rank.joins:
                    rank.announced = code
                    self._failed.append(rank)
                    self._stop_after_failure()

    def _stop_after_failure(self) -> None:
        self._stopping = True
        self._schedule = [(Deadline(after), number) for after, number in _AFTER_FAILURE]

    def _replaces(self, replacing: Replacing, rank: Rank) -> bool:
        """Return whether a new process takes the place of a lost rank."""
        return replacing.fits(rank)

    def _finish_output(self, rank: Rank) -> None:
        """Show what a rank has written to standard error before it ended."""
        error = rank.streams[1]
        for pipe in [pipe for pipe, (_, stream) in self._pipes.items() if stream is error]:
            # Processes that the rank started may still write, so read no more than a pipe holds.
            for _ in range(PIPE_READS):
                if not self._relay(pipe):
                    break
        self._show_traceback(rank)

    # -- the end -------------------------------------------------------------------

    def _obey(self) -> None:
        try:
            numbers = os.read(self._control, 64)
        except BlockingIOError:
            return
        if not numbers:
            self._selector.unregister(self._control)
            self._stop(signal.SIGKILL, ())
        for number in numbers:
            if number == signal.SIGTSTP:
                for rank in self._ranks:
                    rank.send(signal.SIGSTOP, group=True)
            elif number == signal.SIGCONT:
                for rank in self._ranks:
                    rank.send(signal.SIGCONT, group=True)
            else:
                self._stop(number, _AFTER_SIGNAL)

    def _stop(self, number: int, schedule: Sequence[tuple[float, int]]) -> None:
        """End the run because of signal ``number``; at once if the run is already ending."""
        if self._stopping or not schedule:
            self._hurried = True
            self._schedule = [(Deadline(0.0), signal.SIGKILL)]
        else:
            self._signalled = True
            self._schedule = [(Deadline(after), later) for after, later in schedule]
            for rank in self._ranks:
                for stream in rank.streams[1:] if number == signal.SIGINT else ():
                    # Every rank will print a traceback, of which one line is worth reading.
                    stream.release()
                    stream.hold()
                # Signal only the rank itself: it knows best how to end the processes it started.
                rank.send(number, group=False)
                rank.send(signal.SIGCONT, group=True)
        if not self._stopping:
            self._signal = number
        self._stopping = True

    def _conclude(self) -> int:
        code = 0 if self._signal is None else 128 + self._signal
        patience = _ORPHANS_AFTER_FAILURE_S if self._stopping else _ORPHANS_AFTER_SUCCESS_S
        self._end_processes(0.0 if self._hurried else patience)
        self._drain()
        interrupted = self._explain_interrupt() if self._signal == signal.SIGINT else ""
        failures = [_failure(rank) for rank in self._failed]
        size = len(self._environments)
        if self._left() < self._least:
            first = first_in_cause(failures)
            others = self._take_tracebacks(besides=self._failed[failures.index(first)])
            text = shortfall(failures, size, self._least) if self._spare else ""
            text += report(first, others, verbose=self._verbose)
            self._error.write(text.encode(errors="replace"))
            code = exit_code(first)
        else:
            self._release_all()
            if failures:
                text = losses(failures, size, verbose=self._verbose)
                self._error.write(text.encode(errors="replace"))
            if self._out.reason:
                self._error.write(f"collective run: standard output: {self._out.reason}\n".encode())
        self._error.write(interrupted.encode(errors="replace"))
        # The reader of the output may be slow. Wait for it until another signal arrives.
        self._stopping = True
        while not self._hurried and (self._out.waiting or self._error.waiting):
            self._step()
        self._out.flush()
        self._error.flush()
        return code

    def _end_processes(self, patience: float) -> None:
        """End all processes that the ranks have left; ``patience`` as for end_children()."""
        end_children(patience)

    def _take_tracebacks(self, besides: Rank) -> list[FailedRank]:
        """Return the failures whose tracebacks are held back, in the order of the ranks.

        Show all output that is held back and precedes a traceback, or belongs to a rank that did
        not fail.
        """
        taken = []
        for rank in sorted(self._ranks, key=lambda rank: rank.number):
            for stream in rank.streams[1:]:
                if rank.code:
                    before, traceback = split_traceback(stream.held)
                    if traceback and rank is not besides:
                        taken.append(FailedRank(rank.number, rank.code, traceback, rank.fate))
                    stream.release(before)
                else:
                    stream.release()
        self._error.fresh_line()
        return taken

    def _explain_interrupt(self) -> str:
        """Show the held output without reports of the interrupt; return one line about it."""
        sites = {}
        for rank in self._ranks:
            for stream in rank.streams[1:]:
                output, site = sift(stream.held)
                stream.release(output)
                if site is not None:
                    sites[rank.number] = site
        self._error.restore()
        return summary(sites, sorted(self._stopped))

    def _release_all(self) -> None:
        """Show all output that is held back."""
        for rank in self._ranks:
            for stream in rank.streams:
                stream.release()
        self._error.fresh_line()

    def _drain(self) -> None:
        """Read the rest of the ranks' pipes, to which no process writes any more."""
        for pipe, (_, stream) in list(self._pipes.items()):
            while self._relay(pipe):
                pass
            stream.finish()
        self._out.restore()
        self._error.restore()


def _failure(rank: Rank) -> FailedRank:
    code = rank.announced or rank.code or 0
    return FailedRank(rank.number, code, rank.streams[1].tail, rank.fate)
