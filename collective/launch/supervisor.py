"""The process between the launcher and the ranks: starts them, relays, stops them.

It is the ranks' parent and the adoptive parent of all they start, in a session of its
own. So it outlives a launcher that is killed together with its process group, learns of
that from a pipe, and ends everything; and should it be killed itself, the launcher
adopts what it leaves. Only the launcher gets signals; they arrive here as bytes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from collective.deadline import Deadline

from .interrupt import sift, summary
from .processes import adopt_orphans, die_with_parent, end_children
from .screen import RankOutput, Screen
from .verdict import FailedRank, exit_code, first_in_cause, loss, losses, report, shortfall

__all__ = ["Rank", "Replacing", "Supervisor"]

# After the first failure the others have a moment to notice and to say so. Together
# with what end_children allows it stays below the two seconds that are promised.
_AFTER_FAILURE = ((0.75, signal.SIGTERM), (1.25, signal.SIGKILL))
_ORPHANS_AFTER_FAILURE_S = 0.15
_ORPHANS_AFTER_SUCCESS_S = 0.5
# After Ctrl-C or a signal they have as long to clean up.
_AFTER_SIGNAL = ((2.0, signal.SIGTERM), (2.5, signal.SIGKILL))
# A process that stands in for a rank and fails sooner would fail again.
_QUICK_S = 10.0
# Unfinished lines (prompts, bars) appear on a terminal once the rank pauses.
_PAUSE_S = 0.05
# Longer than a traceback gets, with the peer's tracebacks that it may carry.
_TAIL = 256 * 1024


class Rank:
    """A rank, as the supervisor sees it.

    Attributes:
        number: which.
        joins: whether it was started in place of one that was lost.
        began: when it was started, on the clock of ``time.monotonic()``.
        process: that of the rank itself, or of whoever started it for us.
        code: as ``subprocess`` gives it; None while the rank runs.
        streams: its output and its error output.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes], joins: bool = False) -> None:
        self.number = number
        self.joins = joins
        self.began = time.monotonic()
        self.process = process
        self.code: int | None = None
        self.streams: list[RankOutput] = []

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    def send(self, number: int, *, group: bool) -> None:
        """Send it a signal, and with ``group`` what it has started, too."""
        # Not reaped yet, so neither its process id nor its group can be another's.
        if self.runs:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.process.pid, number)


class Replacing(NamedTuple):
    """How lost ranks are replaced by processes that join the others.

    Attributes:
        environment: returns the environment of the process in place of a rank.
        admitted: returns the process ids of those that the ranks have let in.
    """

    environment: Callable[[int], Mapping[str, str]]
    admitted: Callable[[], Set[int]]

    def fits(self, rank: Rank) -> bool:
        """Tell whether a lost rank is replaced: not one that failed as soon as it stood in."""
        return not rank.joins or time.monotonic() - rank.began > _QUICK_S


class Supervisor:
    """Runs one process per environment to the end of all of them, once.

    Args:
        control: the read end of a pipe: each byte is the number of a signal that the
            launcher got, and its end means that the launcher is gone.
        command: what each rank executes.
        environments: each rank's environment variables, by rank.
        spare: how many ranks may fail before the others are stopped, and the run is a failure.
        replacing: how lost ranks are replaced; None if they are not.
    """

    def __init__(
        self,
        control: int,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        spare: int = 0,
        replacing: Replacing | None = None,
    ) -> None:
        self._control = control
        self._replacing = replacing
        self._command = command
        self._environments = environments
        self._spare = spare
        self._ranks: list[Rank] = []
        self._pipes: dict[int, RankOutput] = {}  # those still open at the other end
        self._failed: list[Rank] = []
        # What is to be sent when, once the run is ending; the signal that ended it, if
        # one did; and whether ranks were signalled, so that how they end tells nothing.
        self._stopping = False
        self._schedule: list[tuple[Deadline, int]] = []
        self._signal: int | None = None
        self._signalled = False
        self._hurried = False
        self._stopped: set[int] = set()  # the ranks that a signal had to end which they can't heed
        # All that is open for this run alone: there may be another after it.
        self._open = contextlib.ExitStack()
        # Unlike epoll it takes regular files.
        self._selector = self._open.enter_context(selectors.PollSelector())
        self._out = self._error = Screen(1)
        if not os.path.samestat(os.fstat(1), os.fstat(2)):
            self._error = Screen(2)

    @property
    def failed(self) -> bool:
        """Whether more ranks failed than may, and nobody ended the run from outside."""
        return self._left() < self._least and self._signal is None

    @property
    def _least(self) -> int:
        return len(self._environments) - self._spare

    def _left(self) -> int:
        """Return how many ranks there are that have not failed; who waits to join is none."""
        lost = sum(not rank.joins for rank in self._failed)
        joined = [rank for rank in self._ranks if rank.joins and rank not in self._failed]
        if joined and self._replacing is not None:
            admitted = self._replacing.admitted()
            joined = [rank for rank in joined if rank.process.pid in admitted]
        return len(self._environments) - lost + len(joined)

    def run(self) -> int:
        """Start the ranks, see them to their end, and return the exit code of the whole.

        Whatever the ranks have started has ended then, too.
        """
        adopt_orphans()
        # Waited for as a descriptor, so that no signal slips in before the wait.
        wake, wake_end = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wake_end, False)
        self._open.callback(os.close, wake)
        self._open.callback(os.close, wake_end)
        # A handler in Python, of no account: without one no byte is written to the pipe.
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
        """Wait for something to happen, and do what follows from it."""
        screens = {self._out, self._error}
        writing = [screen for screen in screens if screen.waiting]
        for screen in writing:
            self._selector.register(screen.descriptor, selectors.EVENT_WRITE, screen.flush)
        # A reader who is slower than the ranks slows them down.
        held = list(self._pipes) if any(screen.full for screen in screens) else []
        for pipe in held:
            self._selector.unregister(pipe)
        events = self._selector.select(self._time_left())
        for screen in writing:
            self._selector.unregister(screen.descriptor)
        for pipe in held:
            self._watch(pipe, partial(self._relay, pipe))
        for key, _ in events:
            key.data()
        if self._out.broken and not self._stopping:
            self._stop(signal.SIGPIPE, _AFTER_FAILURE)
        self._keep_schedule()

    def _time_left(self) -> float | None:
        due = [moment for moment, _ in self._schedule]
        due += [Deadline.since(since, _PAUSE_S) for since, _ in self._unfinished()]
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
                rank.send(signal.SIGCONT, group=True)  # a stopped one cannot heed it
        for since, stream in self._unfinished():
            if Deadline.since(since, _PAUSE_S).expired:
                stream.show_unfinished()

    # -- ranks ---------------------------------------------------------------------

    def _start(
        self,
        number: int,
        environment: Mapping[str, str],
        joins: bool = False,
    ) -> None:
        # A terminal cannot be read from another session; a pipe or file goes to rank 0.
        to_rank_0 = number == 0 and not joins and not os.isatty(0)
        process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=None if to_rank_0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A process group a rank, so that what it has started can be ended with it; and Ctrl-C
            # in a terminal comes to the launcher alone, which passes it on.
            start_new_session=True,
            preexec_fn=die_with_parent(),  # safe: this process has one thread
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._open.callback(process.stdout.close)
        self._open.callback(process.stderr.close)
        rank = Rank(number, process, joins)
        self._attend(rank, process.stdout.fileno(), process.stderr.fileno())

    def _attend(self, rank: Rank, out: int, error: int) -> None:
        """Take ``rank`` among the ranks, and relay what it writes to the two pipes."""
        self._ranks.append(rank)
        for pipe, screen, keep in ((out, self._out, 0), (error, self._error, _TAIL)):
            os.set_blocking(pipe, False)
            stream = RankOutput(rank.number, screen, keep)
            rank.streams.append(stream)
            self._pipes[pipe] = stream
            self._watch(pipe, partial(self._relay, pipe))

    def _relay(self, pipe: int) -> bool:
        """Pass on what a rank wrote; return whether there may be more at once."""
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return False
        if data:
            self._pipes[pipe].feed(data)
        else:
            self._selector.unregister(pipe)
            self._pipes.pop(pipe).finish()
        return bool(data)

    def _reap(self, wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(wake, 4096):
                pass
        while True:
            which = -1
            try:
                if self._spare and sys.platform == "linux":
                    # The run may go on for long: what a lost rank has started ends now.
                    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    if ended is not None:
                        which = ended.si_pid
                        self._end_group(which, ended.si_status)
                pid, status = os.waitpid(which, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._reaped(pid, os.waitstatus_to_exitcode(status))

    def _end_group(self, pid: int, status: int) -> None:
        """End what a lost rank has started, while its process id cannot be another's."""
        for rank in self._ranks:
            if rank.process.pid == pid and status:
                rank.send(signal.SIGKILL, group=True)

    def _reaped(self, pid: int, code: int) -> None:
        """Take note of the end of a child: a rank, or an orphan that we adopted."""
        for rank in self._ranks:
            if rank.process.pid == pid:
                rank.process.returncode = code
                self._ended(rank, code)

    def _ended(self, rank: Rank, code: int) -> None:
        rank.code = code
        if code == 0 or self._signalled:
            return
        self._failed.append(rank)
        if self._stopping:
            return
        left = self._left()
        if left >= self._least:
            replaced = self._replacing is not None and self._replacing.fits(rank)
            size = len(self._environments)
            text = loss(rank.number, code, left, size, self._least, replaced)
            self._error.fresh_line()
            self._error.write(text.encode())
            if self._replacing is not None and replaced:
                self._start(rank.number, self._replacing.environment(rank.number), joins=True)
            return
        self._stopping = True
        self._schedule = [(Deadline(after), number) for after, number in _AFTER_FAILURE]

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
        """End the run because of signal ``number``; at once if it is ending already."""
        if self._stopping or not schedule:
            self._hurried = True
            self._schedule = [(Deadline(0.0), signal.SIGKILL)]
        else:
            self._signalled = True
            self._schedule = [(Deadline(after), later) for after, later in schedule]
            for rank in self._ranks:
                for stream in rank.streams[1:] if number == signal.SIGINT else ():
                    stream.hold()  # a traceback a rank, of which one line is worth reading
                # The rank alone: it knows best how to end what it has started.
                rank.send(number, group=False)
                rank.send(signal.SIGCONT, group=True)
        if not self._stopping:
            self._signal = number
        self._stopping = True

    def _conclude(self) -> int:
        code = 0 if self._signal is None else 128 + self._signal
        patience = _ORPHANS_AFTER_FAILURE_S if self._stopping else _ORPHANS_AFTER_SUCCESS_S
        end_children(0.0 if self._hurried else patience)
        self._drain()
        interrupted = self._explain_interrupt() if self._signal == signal.SIGINT else ""
        failures = [
            FailedRank(rank.number, rank.code or 0, rank.streams[1].tail) for rank in self._failed
        ]
        size = len(self._environments)
        if self._left() < self._least:
            first = first_in_cause(failures)
            text = shortfall(failures, size, self._least) if self._spare else ""
            self._error.write((text + report(first)).encode(errors="replace"))
            code = exit_code(first)
        else:
            if failures:
                self._error.write(losses(failures, size).encode(errors="replace"))
            if self._out.reason:
                self._error.write(f"collective run: standard output: {self._out.reason}\n".encode())
        self._error.write(interrupted.encode(errors="replace"))
        # Whoever reads our output may be slow; a signal ends our patience with that.
        self._stopping = True
        while not self._hurried and (self._out.waiting or self._error.waiting):
            self._step()
        self._out.flush()
        self._error.flush()
        return code

    def _explain_interrupt(self) -> str:
        """Show what the ranks wrote but for their being interrupted; return a line about that."""
        sites = {}
        for rank in self._ranks:
            for stream in rank.streams[1:]:
                output, site = sift(stream.held)
                stream.release(output)
                if site is not None:
                    sites[rank.number] = site
        self._error.restore()
        return summary(sites, sorted(self._stopped))

    def _drain(self) -> None:
        """Take what is left in the ranks' pipes; nobody writes to them any more."""
        for pipe, stream in list(self._pipes.items()):
            while self._relay(pipe):
                pass
            stream.finish()
        self._out.restore()
        self._error.restore()
