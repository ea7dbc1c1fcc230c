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
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from .processes import adopt_orphans, die_with_parent, end_children
from .screen import RankOutput, Screen
from .verdict import FailedRank, exit_code, first_in_cause, loss, losses, report, shortfall

__all__ = ["Rank", "Supervisor"]

# After the first failure the others have a moment to notice and to say so. Together
# with what end_children allows it stays below the two seconds that are promised.
_AFTER_FAILURE = ((0.75, signal.SIGTERM), (1.25, signal.SIGKILL))
_ORPHANS_AFTER_FAILURE_S = 0.15
_ORPHANS_AFTER_SUCCESS_S = 0.5
# After Ctrl-C or a signal they have as long to clean up.
_AFTER_SIGNAL = ((2.0, signal.SIGTERM), (2.5, signal.SIGKILL))
# Unfinished lines (prompts, bars) appear on a terminal once the rank pauses.
_PAUSE_S = 0.05
# Longer than a traceback gets, with the peer's tracebacks that it may carry.
_TAIL = 256 * 1024


class Rank:
    """A rank, as the supervisor sees it.

    Attributes:
        number: which.
        process: that of the rank itself, or of whoever started it for us.
        code: as ``subprocess`` gives it; None while the rank runs.
        streams: its output and its error output.
    """

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
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


class Supervisor:
    """Runs one process per environment to the end of all of them, once.

    Args:
        control: the read end of a pipe: each byte is the number of a signal that the
            launcher got, and its end means that the launcher is gone.
        command: what each rank executes.
        environments: each rank's environment variables, by rank.
        spare: how many ranks may fail before the others are stopped, and the run is a failure.
    """

    def __init__(
        self,
        control: int,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        spare: int = 0,
    ) -> None:
        self._control = control
        self._command = command
        self._environments = environments
        self._spare = spare
        self._ranks: list[Rank] = []
        self._pipes: dict[int, RankOutput] = {}  # those still open at the other end
        self._failed: list[Rank] = []
        # What is to be sent when, once the run is ending; the signal that ended it, if
        # one did; and whether ranks were signalled, so that how they end tells nothing.
        self._stopping = False
        self._schedule: list[tuple[float, int]] = []
        self._signal: int | None = None
        self._signalled = False
        self._hurried = False
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
        return len(self._failed) > self._spare and self._signal is None

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
        prepare = die_with_parent()
        for number, environment in enumerate(self._environments):
            self._start(number, environment, prepare)

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
        due = [at for at, _ in self._schedule]
        due += [since + _PAUSE_S for since, _ in self._unfinished()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _unfinished(self) -> list[tuple[float, RankOutput]]:
        streams = [stream for rank in self._ranks for stream in rank.streams]
        return [(s.silent_since, s) for s in streams if s.screen.terminal and s.silent_since]

    def _keep_schedule(self) -> None:
        now = time.monotonic()
        while self._schedule and self._schedule[0][0] <= now:
            _, number = self._schedule.pop(0)
            self._signalled = True
            for rank in self._ranks:
                rank.send(number, group=True)
                rank.send(signal.SIGCONT, group=True)  # a stopped one cannot heed it
        for since, stream in self._unfinished():
            if since + _PAUSE_S <= now:
                stream.show_unfinished()

    # -- ranks ---------------------------------------------------------------------

    def _start(
        self,
        number: int,
        environment: Mapping[str, str],
        prepare: Callable[[], None],
    ) -> None:
        # A terminal cannot be read from another session; a pipe or file goes to rank 0.
        to_rank_0 = number == 0 and not os.isatty(0)
        process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=None if to_rank_0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=prepare,  # safe: this process has one thread
        )
        assert process.stdout is not None
        assert process.stderr is not None
        self._open.callback(process.stdout.close)
        self._open.callback(process.stderr.close)
        self._attend(Rank(number, process), process.stdout.fileno(), process.stderr.fileno())

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
        size = len(self._environments)
        if len(self._failed) <= self._spare:
            text = loss(rank.number, code, size - len(self._failed), size, size - self._spare)
            self._error.fresh_line()
            self._error.write(text.encode())
            return
        self._stopping = True
        now = time.monotonic()
        self._schedule = [(now + after, number) for after, number in _AFTER_FAILURE]

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
        now = time.monotonic()
        if self._stopping or not schedule:
            self._hurried = True
            self._schedule = [(now, signal.SIGKILL)]
        else:
            self._signalled = True
            self._schedule = [(now + after, later) for after, later in schedule]
            for rank in self._ranks:
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
        failures = [
            FailedRank(rank.number, rank.code or 0, rank.streams[1].tail) for rank in self._failed
        ]
        size = len(self._environments)
        if len(failures) > self._spare:
            first = first_in_cause(failures)
            text = shortfall(failures, size, size - self._spare) if self._spare else ""
            self._error.write((text + report(first)).encode(errors="replace"))
            code = exit_code(first)
        else:
            if failures:
                self._error.write(losses(failures, size).encode(errors="replace"))
            if self._out.reason:
                self._error.write(f"collective run: standard output: {self._out.reason}\n".encode())
        # Whoever reads our output may be slow; a signal ends our patience with that.
        self._stopping = True
        while not self._hurried and (self._out.waiting or self._error.waiting):
            self._step()
        return code

    def _drain(self) -> None:
        """Take what is left in the ranks' pipes; nobody writes to them any more."""
        for pipe, stream in list(self._pipes.items()):
            while self._relay(pipe):
                pass
            stream.finish()
        self._out.restore()
        self._error.restore()
