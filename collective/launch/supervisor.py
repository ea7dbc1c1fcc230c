"""Process between the launcher and the ranks: it decides which ranks start, end and are replaced.

The supervisor orders the agents of its hosts (:mod:`.agent`) to start, signal and end processes.
The agent of its own host is an object of the same process, which then is the parent of the ranks,
and adopts all their descendants. The supervisor has its own session, so it survives if the launcher
is killed together with its process group. It then sees the end of a pipe, and ends all ranks. If
the supervisor itself is killed, the launcher adopts its children. Only the launcher receives
signals; it sends them to the supervisor as bytes.

A run ends by signals that grow stronger. After a failure the other ranks get none at first: an
error of their own says more than a death by a signal. After Ctrl-C the signal goes to the rank
alone, which knows best how to end what it has started. Then SIGTERM and SIGKILL go to its whole
group, each with SIGCONT, since a stopped process reacts to no other signal but SIGKILL.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple

from collective import CollectiveError
from collective.contract.process import RankProcess
from collective.control.store import Store
from collective.generations.arrivals import Arrivals
from collective.inner import Deadline, platform
from collective.start.connecting import failing, tell_ended

from .agent import Host
from .agent_line import BEAT_S, Message, Outlet, StreamBytes
from .loop import Loop
from .screen import RankOutput, Screen
from .tracebacks import sift, split_traceback, summary
from .variables import Run, cores_for_each
from .verdict import FailedRank, first_in_cause, loss, losses, report

# After the first failure, the other ranks have some time to notice and report it. Together with
# the time of end_children, it stays below the promised two seconds.
_AFTER_FAILURE = ((0.75, signal.SIGTERM), (1.25, signal.SIGKILL))
_ORPHANS_AFTER_FAILURE_S = 0.15
_ORPHANS_AFTER_SUCCESS_S = 0.5
# After Ctrl-C or another signal, the ranks have this much time to clean up.
_AFTER_SIGNAL = ((2.0, signal.SIGTERM), (2.5, signal.SIGKILL))
# If a replacement of a rank fails sooner than this, the next replacement would fail as well.
_QUICK_S = 10.0
# A rank whose traceback is not followed by its end or by other output within this time goes on.
_ENDING_S = 2.0
# Unfinished lines (prompts, bars) appear on a terminal once the rank pauses for this long.
_PAUSE_S = 0.05
# Number of bytes of standard error to keep. This is longer than a traceback, including tracebacks
# of peers that it may contain.
_TAIL = 256 * 1024
# How long an agent may take to end what the ranks have left, beside its patience with them.
_FINISH_S = 8.0
_READ = 1 << 16

# Numbers of processes, also of several attempts: a host may still report an earlier attempt.
_numbers = itertools.count()


class Place(NamedTuple):
    """Place of a rank.

    Attributes:
        host: host of the rank.
        local_rank: number of the rank among those of the host.
        local_size: number of ranks on the host.
    """

    host: Host
    local_rank: int
    local_size: int

    @property
    def processors(self) -> Sequence[int]:
        """Numbers of the processors to which the rank is bound; empty if it is not."""
        return self.host.shares[self.local_rank] if self.host.shares else ()

    def seat(self) -> tuple[int, int, int]:
        """Return the place as :meth:`Run.environments` takes it."""
        cores = len(self.processors) or cores_for_each(self.local_size, len(self.host.processors))
        return self.local_rank, self.local_size, cores

    def for_join(self, size: int) -> dict[str, str]:
        """Return the variables that differ for a process which joins ``size`` ranks here."""
        if self.host.pulse is None:
            return {}  # all ranks are on one host, so it takes the place of the lost one
        # A process whose host has all ranks would not listen on a network.
        most = max(1, size - 1)
        local_size = min(self.local_size, most)
        local = str(min(self.local_rank, local_size - 1))
        return {
            "COLLECTIVE_LOCAL_RANK": local,
            "COLLECTIVE_LOCAL_SIZE": str(local_size),
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": str(local_size),
        }


def bind(run: Run, hosts: Iterable[Host], number: int) -> None:
    """Bind the ranks of an attempt to processors, if the run says so; the first one may warn.

    Args:
        run: what each rank executes.
        hosts: hosts on which ranks may start.
        number: number of the attempt, from 0.
    """
    for host in hosts if run.bind else ():
        unbound = host.bind()
        if unbound and number == 0:
            print(f"collective run: {unbound}", file=sys.stderr, flush=True)


class Rank:
    """State of a rank in the supervisor.

    Attributes:
        number: number of the rank.
        place: place of the rank.
        joins: whether the rank was started in place of a lost rank.
        process: number of the rank's process, which differs from those of all other processes.
        pid: process id on its host; 0 while it is unknown.
        began: when the rank was started, on the clock of ``time.monotonic()``.
        code: exit code in the form of ``subprocess``. None while the rank runs.
        announced: exit code that the rank has announced, since its main thread has failed; else 0.
        fate: how the rank ended, in words, if its code does not tell; else empty.
        streams: standard output and standard error.
    """

    def __init__(
        self, number: int, place: Place, streams: Sequence[RankOutput], joins: bool = False
    ) -> None:
        self.number = number
        self.place = place
        self.streams = streams
        self.joins = joins
        self.process = next(_numbers)
        self.pid = 0
        self.began = time.monotonic()
        self.code: int | None = None
        self.announced = 0
        self.fate = ""

    @property
    def runs(self) -> bool:
        """Whether the rank has not ended."""
        return self.code is None

    def send(self, number: int, *, group: bool) -> None:
        """Send a signal to the rank; with ``group``, also to the processes that it started."""
        if self.runs:
            order = {"kind": "signal", "process": self.process, "number": int(number)}
            self.place.host.post({**order, "group": group})


class MeetingStore(NamedTuple):
    """Store where the ranks of an attempt meet, and what launcher and ranks tell each other there.

    Attributes:
        store: the store.
        hosts: number of the host of each rank.
        least: number of ranks that must be left.
        tell_lost: function that tells the ranks which processes are lost: host and number of each.
    """

    store: Store
    hosts: Sequence[int]
    least: int
    tell_lost: Callable[[Sequence[tuple[str, int]]], object] = lambda lost: None

    def tell_ended(self, ended: Mapping[int, str]) -> None:
        """Tell the ranks which of them have ended, and how, since they may wait for each other."""
        tell_ended(self.store, ended, self.hosts, self.least)

    def failing(self) -> tuple[int, int] | None:
        """Return a rank that says that its main thread has failed, and the exit code it will have.

        Other threads keep its process from ending. None if no rank says so.
        """
        return failing(self.store)

    def admitted(self) -> Set[RankProcess]:
        """Return the processes that the ranks have admitted."""
        return Arrivals(self.store, "").admitted()


class Supervisor:
    """Supervisor of one run: starts a process for each environment and waits until all have ended.

    Args:
        control: the read end of a pipe. Each byte is the number of a signal that the launcher
            received. End of file means that the launcher has ended.
        run: what each rank executes, and the rules for lost ranks. When fewer ranks are left than
            must be, the other ranks are stopped, and the run has failed.
        environments: environment variables of each rank, by rank, beside those of its host.
        meeting: where the ranks meet.
        hosts: the hosts, with the spare ones.
        places: place of each rank.
    """

    def __init__(
        self, control: int, run: Run, environments: Sequence[Mapping[str, str]],
        meeting: MeetingStore, hosts: Sequence[Host], places: Sequence[Place],
    ) -> None:  # fmt: skip
        self._control = control
        self._run = run
        self._meeting = meeting
        self._hosts = hosts
        self._places = places
        self._ends: dict[int, str] = {}
        self._told = 0
        self._environments = environments
        self._ranks: list[Rank] = []
        self._by_process: dict[int, Rank] = {}
        # Closes all descriptors of this run at its end, since another run may follow.
        self._loop = Loop()
        self._failed: list[Rank] = []
        # While the run is ending, the schedule has the signals still to send, with their times.
        # The attribute _signal is the signal that ended the run, if any. The attribute _signalled
        # is true once ranks were sent a signal. From then on, their exit codes mean nothing.
        self._stopping = False
        self._schedule: list[tuple[Deadline, int]] = []
        self._signal: int | None = None
        self._signalled = False
        self._hurried = False
        # For each rank whose traceback is held back: until when the rank is believed to end.
        self._endings: dict[Rank, Deadline] = {}
        self._stopped: set[int] = set()  # ranks that still ran when the schedule sent a signal
        self._out = self._error = Screen(1)
        if not os.path.samestat(os.fstat(1), os.fstat(2)):
            self._error = Screen(2)
        self._outlets: set[Outlet] = {self._out, self._error}
        # When to look at the hosts again, if they show signs of life, and when that was last.
        self._beat = Deadline(0.0) if any(host.pulse for host in hosts) else Deadline.never()
        self._looked = time.monotonic()
        self._finished: set[Host] = set()  # hosts on which nothing runs any more

    @property
    def failed(self) -> bool:
        """Whether too many ranks failed, and no signal from outside ended the run."""
        return self._left() < self._run.least and self._signal is None

    @property
    def _living(self) -> list[Host]:
        """The hosts that are not lost."""
        return [host for host in self._hosts if not host.lost]

    def _left(self) -> int:
        """Return the number of ranks that have not failed, without those still waiting to join.

        If waiting ones counted, a run could stay above its floor by replacements that wait for
        ranks which have ended by ``PeerLostError``, and each of them would be replaced in turn.
        """
        to_start = self._run.size - sum(not rank.joins for rank in self._ranks)
        return to_start + len(self._members())

    def _members(self) -> list[Rank]:
        """Return the ranks that have been started and are left; see :meth:`_left`."""
        members = [rank for rank in self._ranks if rank not in self._failed]
        if any(rank.joins for rank in members):
            admitted = {(process.host, process.pid) for process in self._meeting.admitted()}
            members = [rank for rank in members if not rank.joins or _identity(rank) in admitted]
        return members

    def run(self) -> int:
        """Start the ranks, wait until all have ended, and return the exit code of the run.

        When this method returns, all processes that the ranks started have ended, too.
        """
        self._loop.watch(self._control, self._obey)
        self._begin()
        while any(rank.runs for rank in self._ranks):
            self._step()
        code = self._conclude()
        self._loop.open.close()
        return code

    def _begin(self) -> None:
        """Start the ranks."""
        for host in self._living:
            host.attend(self._loop, partial(self._heard, host))
        for number, environment in enumerate(self._environments):
            self._start(number, self._places[number], environment)

    # -- events --------------------------------------------------------------------

    def _step(self) -> None:
        """Wait for the next event and handle it."""
        self._loop.step(self._outlets, self._time_left(), hurried=self._hurried)
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
                self._meeting.tell_ended(self._ends)

    def _time_left(self) -> float | None:
        due = [moment for moment, _ in self._schedule]
        due += [Deadline.since(since, _PAUSE_S) for since, _ in self._unfinished()]
        due += [] if self._stopping else self._endings.values()
        due += [self._beat] if self._beat.seconds < math.inf else []
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
            if not self._stopping and ending.expired:
                self._show_traceback(rank)
        if self._beat.expired:
            self._look_at_hosts()

    # -- ranks ---------------------------------------------------------------------

    def _start(
        self, number: int, place: Place, environment: Mapping[str, str], joins: bool = False
    ) -> None:
        rank = self._attend(number, place, joins)
        if place.host.lost:  # since another rank was started
            self._lose_rank(rank)
            return
        self._order(rank, self._run.command, environment)

    def _order(self, rank: Rank, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Order the agent of a rank to start its process."""
        to_rank_0 = rank.number == 0 and not rank.joins
        rank.place.host.post(
            {
                "kind": "start",
                "process": rank.process,
                "command": command,
                "environment": dict(environment),
                "stdin": platform.descriptor_path(0) if to_rank_0 else "",
                "lasting": self._run.least < self._run.size,
                "processors": list(rank.place.processors),
            }
        )

    def _attend(self, number: int, place: Place, joins: bool = False) -> Rank:
        """Add a rank to the ranks, with a stream for each of its two outputs."""
        streams = [
            RankOutput(number, self._out, 0),
            RankOutput(number, self._error, _TAIL, holds_tracebacks=not self._run.verbose),
        ]
        rank = Rank(number, place, streams, joins)
        self._ranks.append(rank)
        self._by_process[rank.process] = rank
        return rank

    def _heard(self, host: Host, frame: Message | StreamBytes) -> None:
        """Handle a report of the agent of a host."""
        if isinstance(frame, StreamBytes):
            writer = self._by_process.get(frame.process)
            if writer is not None:  # and not of an earlier attempt
                self._wrote(writer, frame.stream, frame.data)
            return
        kind, rank = frame["kind"], self._by_process.get(frame.get("process", -1))
        if kind == "stirred":
            self._look_for_failing()
        elif kind == "complaint":
            self._say(f"host {host.name}: {frame['text']}")
        elif kind == "leaving":
            host.leaving = True
            self._say(f"host {host.name} goes down; its ranks leave")
        elif kind == "lost":
            self._lose_host(host)
        elif kind == "finished":
            self._finished.add(host)
        elif rank is not None:
            if kind == "started":
                rank.pid = frame["pid"]
            if kind == "ended" and rank.runs:
                self._ended(rank, frame["code"])
            elif kind in ("started", "fed"):
                self._pour(rank)

    def _say(self, text: str) -> None:
        self._error.fresh_line()
        self._error.write(f"collective run: {text}\n".encode(errors="surrogateescape"))

    def _wrote(self, rank: Rank, stream: int, data: bytes) -> None:
        """Handle output of a rank; no bytes are its end."""
        if data:
            self._show(rank, rank.streams[stream - 1], data)
        else:
            rank.streams[stream - 1].finish()

    def _show(self, rank: Rank, stream: RankOutput, data: bytes) -> None:
        """Show output of a rank, or hold it back if a traceback may be the rank's last."""
        error = rank.streams[1]
        if stream is not error and error.in_traceback and not self._stopping:
            self._show_traceback(rank)  # the rank goes on
        stream.feed(data)
        if error.in_traceback and rank not in self._endings:
            self._endings[rank] = Deadline(_ENDING_S)

    def _show_traceback(self, rank: Rank) -> None:
        """Show a traceback that was held back in the belief that the rank is about to end."""
        self._endings.pop(rank, None)
        rank.streams[1].release(ends=False)

    def _ended(self, rank: Rank, code: int) -> None:
        self._stop_input(rank)
        rank.code = code
        if not rank.joins and not self._signalled:
            self._ends.setdefault(rank.number, _failure(rank).how)
        if code == 0 and not self._stopping:
            self._show_traceback(rank)
        if code == 0 or self._signalled or rank in self._failed:
            return
        self._failed.append(rank)
        if self._stopping:
            return
        left = self._left()
        if left >= self._run.least:
            self._show_traceback(rank)
            place = self._place_for_next(rank)
            replaced = place is not None
            text = loss(self._run, _failure(rank), left, replaced)
            self._error.fresh_line()
            self._error.write(text.encode())
            if place is not None:
                # The replacement joins when the other ranks take it.
                environment = {**self._environments[rank.number], "COLLECTIVE_JOIN": "late"}
                environment.update(place.for_join(self._run.size))
                self._start(rank.number, place, environment, joins=True)
            return
        self._stop_after_failure()

    def _look_for_failing(self) -> None:
        """End the run if the main thread of a rank has failed, and the run cannot go on without."""
        if self._stopping or self._left() > self._run.least:
            return
        with contextlib.suppress(CollectiveError, OSError):
            number, code = self._meeting.failing() or (-1, 0)
            for rank in self._ranks:
                if rank.number == number and rank.runs and not rank.joins:
                    rank.announced = code
                    self._failed.append(rank)
                    self._stop_after_failure()

    def _stop_after_failure(self) -> None:
        self._stopping = True
        self._schedule = [(Deadline(after), number) for after, number in _AFTER_FAILURE]

    def _place_for_next(self, rank: Rank) -> Place | None:
        """Return where to replace a lost rank: on its host if that lives.

        None for nowhere, also if it was itself a replacement that failed soon, or if the ranks that
        are left have finished: a replacement that cannot reach the store would not learn that.
        """
        if self._left() == sum(rank.code == 0 for rank in self._members()):
            return None
        if not self._run.replace or (rank.joins and time.monotonic() - rank.began <= _QUICK_S):
            return None
        own = self._places[rank.number].host
        for host in sorted(self._living, key=lambda host: host is not own):
            taken = {rank.place.local_rank for rank in self._ranks_on(host)}
            if len(taken) < host.slots and not host.leaving:
                local = min(set(range(host.slots)) - taken)
                return Place(host, local, max(taken | {local}) + 1)
        return None

    # -- standard input, for ranks that do not inherit it ----------------------------

    def _pour(self, rank: Rank) -> None:
        """Read standard input for rank 0, which has read all so far."""
        if self._takes_input(rank) and not os.isatty(0) and not self._loop.watches(0):
            self._loop.watch(0, partial(self._pass_input, rank))

    def _pass_input(self, rank: Rank) -> None:
        self._stop_input(rank)
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(0, _READ)
        if not rank.place.host.lost:
            rank.place.host.post(StreamBytes(rank.process, 0, data))

    def _stop_input(self, rank: Rank) -> None:
        if self._takes_input(rank):
            self._loop.forget(0)

    def _takes_input(self, rank: Rank) -> bool:
        return rank is self._ranks[0] and rank.place.host.pulse is not None

    # -- hosts ---------------------------------------------------------------------

    def _ranks_on(self, *hosts: Host) -> list[Rank]:
        """Return the ranks that run on any of ``hosts``."""
        return [rank for rank in self._ranks if rank.runs and rank.place.host in hosts]

    def _lose_host(self, host: Host) -> None:
        """End the ranks of a host that is lost, and tell the other ranks."""
        ranks = self._ranks_on(host)
        self._meeting.tell_lost([_identity(rank) for rank in ranks])
        for rank in ranks:
            self._lose_rank(rank)

    def _lose_rank(self, rank: Rank) -> None:
        host = rank.place.host
        rank.fate = f"host {host.name} is lost: {host.lost}"
        self._ended(rank, -signal.SIGKILL)

    def _look_at_hosts(self) -> None:
        """Exchange signs of life with the hosts, and give up those that are silent."""
        self._look_for_failing()
        # If the screen was full, or this process was stopped, nobody has listened to the hosts.
        now = time.monotonic()
        deaf = now - self._looked > 4 * BEAT_S or self._out.full or self._error.full
        self._looked, self._beat = now, Deadline(BEAT_S)
        pulses = [(host, host.pulse) for host in self._living if host.pulse is not None]
        for host, pulse in pulses:
            host.beat()
            if deaf:
                pulse.hear()
        if deaf:
            return
        lost = {*(host for host, pulse in pulses if pulse.is_silent()), *self._cut_off()}
        for host in lost:
            host.lose("it is silent")
        for host in lost:
            self._lose_host(host)

    def _cut_off(self) -> list[Host]:
        """Return the hosts to give up early, because the other ranks can go on without them."""
        remote = [host for host in self._living if not host.local]
        found = [host for host in remote if host.pulse and host.pulse.is_cut_off()]
        if len(remote) > 1 and found == remote:
            return []  # rather this host's own network is gone, perhaps for a moment
        left = self._left() - len(self._ranks_on(*found))
        return found if left >= self._run.least else []

    # -- the end -------------------------------------------------------------------

    def _obey(self) -> None:
        try:
            numbers = os.read(self._control, 64)
        except BlockingIOError:
            return
        if not numbers:
            self._loop.forget(self._control)
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
        if self._left() < self._run.least:
            first = first_in_cause(failures)
            others = self._take_tracebacks(besides=self._failed[failures.index(first)])
            text = report(self._run, failures, first, others)
            self._error.write(text.encode(errors="replace"))
            code = first.exit_code
        else:
            self._release_all()
            if failures:
                text = losses(self._run, failures)
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
        self._finished.clear()
        for host in self._living:
            host.post({"kind": "finish", "patience": patience})
        deadline = Deadline(2 * patience + _FINISH_S)
        while set(self._living) - self._finished and not deadline.expired:
            self._step()
        for host in set(self._living) - self._finished:
            host.lose("it did not end what the ranks have left")
            self._lose_host(host)

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
        """Show the rest of the ranks' output, to which no process adds any more."""
        for rank in self._ranks:
            for stream in rank.streams:
                stream.finish()
        self._out.restore()
        self._error.restore()


def _failure(rank: Rank) -> FailedRank:
    code = rank.announced or rank.code or 0
    return FailedRank(rank.number, code, rank.streams[1].tail, rank.fate)


def _identity(rank: Rank) -> tuple[str, int]:
    """Return the process table and the number of a rank's process, as other ranks name it."""
    return rank.place.host.processes, rank.pid
