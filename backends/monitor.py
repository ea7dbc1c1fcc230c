"""What transports know of their peers apart from the transport.

Engines like MPI and Gloo cannot tell a rank that died from one that is late, a rank that
left from one that failed, or who called something else. Beside the engine every rank keeps a
link to a hub in rank 0's process (:mod:`collective.backends.hub`): a thread that sleeps until
something goes wrong. A :class:`Channel` is one communicator's view of it, a :class:`Wait` one
waiting call's.

When a call has waited for a second, the ranks' flight recorders are compared: ranks that made
different calls get ``MismatchError``, and a deadline that passes can say who did not come and
what that rank did last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from collective.backend import Backend, Failure
from collective.call import describe
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    PeerLostError,
    RendezvousError,
)
from collective.recorder import Recorder

from .hub import Hub
from .link import Link, Message, connect, proof

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.world import World

__all__ = ["Channel", "Monitor", "Monitored", "Wait"]

# Where rank 0 tells the others how to reach the hub.
_KEY = "monitor"
# The name of the communicator of all ranks.
_WORLD = "world"
# How long a call waits until the ranks' recorders are compared, and compared again.
_STALL_S = 1.0
# A rank that has left may have sent what is awaited before it went.
_GRACE_S = 0.5
# How long the hub may take to conclude the roll call after its deadline, and a comparison.
_ANSWER_S = 2.0
_RETRY_S = 0.01
_REPORT_S = 1.0
# What the monitor may know when the engine fails: a death is told within milliseconds.
_EXPLAIN_S = 1.0
# Calls told in a comparison: ranks that are further apart have made different calls.
_REPORTED = 8
# Polls in a row before a wait gives its core away, and before it sleeps.
_SPINS, _YIELDS = 16, 2000
_SLEEP_FIRST_S, _SLEEP_LAST_S = 20e-6, 1e-3
_SLICE_S = 0.1


class Monitor:
    """This rank's link to the hub; made by :meth:`start`.

    Attributes:
        rank, size: of the world.
        hosts: the name of every rank's host.
        channel: of the communicator of all ranks.
    """

    def __init__(self, world: World, link: Link, hosts: list[str]) -> None:
        self.rank = world.rank
        self.size = world.size
        self.hosts = hosts
        self._link: Link | None = link
        self._channels: weakref.WeakValueDictionary[str, Channel] = weakref.WeakValueDictionary()
        # What was said of communicators that this rank has not made yet.
        self._early: dict[str, list[Message]] = {}
        self._lost: set[int] = set()
        self._lock = threading.RLock()
        # A communicator that is dropped without being closed looks to its peers like a death.
        weakref.finalize(self, link.close).atexit = False
        self.channel = Channel(self, _WORLD, tuple(range(world.size)))
        threading.Thread(
            target=_watch, args=(weakref.ref(self), link), name="collective-monitor", daemon=True
        ).start()

    @classmethod
    def start(cls, world: World, timeout: float) -> Self:
        """Link this rank to the others' and return when all of them have come.

        Raises:
            RendezvousError: some did not arrive within ``timeout`` seconds, or disagree about
                how many there are, or two claim one rank; the text says who.
        """
        deadline = time.monotonic() + timeout
        if world.rank == 0:
            alone = world.local_size == world.size
            hub = Hub(world.size, None if alone else world.address, timeout)
            told = json.dumps({"place": hub.place, "key": hub.key}).encode()
            world.store.set(_KEY, told)
            try:
                link, hosts = _join(world, hub.place, hub.key, deadline)
            finally:
                world.store.delete(_KEY)
        else:
            link, hosts = _find(world, timeout, deadline)
        return cls(world, link, hosts)

    # -- for the channels -----------------------------------------------------------------

    def _say(self, message: Message) -> None:
        link = self._link
        if link is not None:
            # If the hub is gone the watcher thread knows it as well.
            with contextlib.suppress(OSError):
                link.send(message)

    def _leave(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.send({"kind": "bye"})
            link.close()

    def _enter(self, channel: Channel) -> None:
        with self._lock:
            self._channels[channel.name] = channel
            for message in self._early.pop(channel.name, ()):
                channel._hear(message)
            for rank in self._lost.intersection(channel.members):
                channel._lose(rank)

    # -- the watcher thread ---------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        with self._lock:
            if message["kind"] == "lost":
                self._lose(message["rank"])
                return
            channel = self._channels.get(message["channel"])
            if channel is not None:
                channel._hear(message)
            elif message["kind"] == "report":
                # Not made here yet: nothing was called.
                self._say({**message, "entries": [], "finished": 0, "started": 0})
            elif message["kind"] in ("failure", "left"):
                self._early.setdefault(message["channel"], []).append(message)

    def _lose(self, rank: int) -> None:
        self._lost.add(rank)
        for channel in list(self._channels.values()):
            if rank in channel.members:
                channel._lose(rank)

    def _hub_gone(self) -> None:
        """The hub's process has ended: by its end, or after it has left."""
        with self._lock:
            if self._link is not None and 0 not in self.channel.left:
                self._lose(0)


def _find(world: World, timeout: float, deadline: float) -> tuple[Link, list[str]]:
    """Look for rank 0's hub and take part in its roll call."""
    while True:
        try:
            told = json.loads(world.store.get(_KEY, deadline))
        except RendezvousError as error:
            raise RendezvousError(
                f"rendezvous: rank 0 of {world.size} did not arrive within {timeout:g} s [rank "
                f"{world.rank}]: {error}"
            ) from error
        try:
            return _join(world, told["place"], told["key"], deadline)
        except (EOFError, OSError) as error:
            # It may be the hub of an earlier roll call, which the store has not forgotten yet.
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rendezvous: rank {world.rank} of {world.size} cannot reach rank 0 at "
                    f"{told['place'].replace(' ', ':')}: {error!r}. Is it an address of the right "
                    "interface of that host (COLLECTIVE_INTERFACE), and open to this one?"
                ) from error
            time.sleep(_RETRY_S)


def _join(world: World, place: str, key: str, deadline: float) -> tuple[Link, list[str]]:
    """Take part in the roll call; return the link and the ranks' hosts.

    Raises:
        RendezvousError: the hub refuses this rank, or has given up.
        EOFError, OSError: it is not there, or gone before it was complete.
    """
    link = connect(place, max(0.001, deadline - time.monotonic()))
    try:
        nonce = secrets.token_hex(16)
        challenge = link.expect(deadline - time.monotonic())["challenge"]
        me = {"rank": world.rank, "size": world.size, "host": world.host}
        link.send({**me, "proof": proof(key, challenge), "challenge": nonce})
        answer = link.expect(deadline - time.monotonic() + _ANSWER_S)
        if answer.get("proof") != proof(key, nonce):
            raise EOFError("it does not know this job's key")
        link.trusted = True
        answer = link.expect(deadline - time.monotonic() + _ANSWER_S)
        if "refused" in answer:
            raise RendezvousError(f"rendezvous: {answer['refused']} [rank {world.rank}].")
        hosts: list[str] = answer["hosts"]
    except BaseException:
        link.close()
        raise
    return link, hosts


def _watch(reference: weakref.ref[Monitor], link: Link) -> None:
    """Listen to the hub until it or this rank goes; holds no monitor alive."""
    while True:
        try:
            messages = link.receive()
        except (EOFError, OSError, ValueError):
            monitor = reference()
            if monitor is not None:
                monitor._hub_gone()
            return
        monitor = reference()
        if monitor is None:
            link.close()
            return
        for message in messages:
            monitor._hear(message)
        del monitor


class Channel:
    """One communicator, as the monitor sees it. Ranks are the communicator's.

    Attributes:
        name: the same on all members, and no other communicator's of the job.
        members: the ranks' numbers in the world.
        rank, size: this rank among how many.
        failure: why the communicator is broken, None as long as it is not.
        left: the ranks that have closed it.
        recorder: the communicator's calls; the communicator sets it.
        on_failure: called, in whatever thread, when ``failure`` has been set.
    """

    def __init__(self, monitor: Monitor, name: str, members: tuple[int, ...]) -> None:
        self.name = name
        self.members = members
        self.rank = members.index(monitor.rank)
        self.size = len(members)
        self.failure: Failure | None = None
        self.left: set[int] = set()
        self.recorder: Recorder | None = None
        self.on_failure: list[Callable[[], None]] = []
        self._monitor = monitor
        self._groups: dict[tuple[int, ...], int] = {}
        self._left_at: dict[int, tuple[float, int]] = {}
        self._told = False
        self._closed = False
        self._reported = threading.Condition()
        self._reports: dict[int, Message] | None = None
        self._rounds = 0
        monitor._enter(self)

    def group(self, ranks: Sequence[int]) -> Channel:
        """Return the channel of a communicator among ``ranks``; they alone call this."""
        members = tuple(self.members[rank] for rank in ranks)
        # The n-th group of the same members is the n-th on each of them.
        self._groups[members] = nth = self._groups.get(members, 0) + 1
        text = f"{self.name} {members} {nth}"
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return Channel(self._monitor, f"group-{name}", members)

    # -- what a call asks -----------------------------------------------------------------

    def check(self, where: object, awaited: Sequence[int] | None = None) -> None:
        """Raise if the communicator is broken, or if an awaited rank has left for good.

        Args:
            where: the operation, for the error.
            awaited: ranks; None for all others.

        Raises:
            PeerLostError, PeerFailedError, MismatchError, CommunicatorAbortedError,
            CollectiveTimeoutError: what the failure asks for.
        """
        if self.failure is not None:
            raise self._error(where)
        if self._left_at:
            self._check_left(where, awaited)

    def _error(self, where: object) -> Exception:
        assert self.failure is not None
        error = self.failure.error(str(where), self.rank)
        if self.failure.kind == "mismatch" and self._told:
            # The mismatch was one call's; this is another, on what it left behind.
            return CommunicatorAbortedError(f"{where}: broken by an earlier mismatch: {error}")
        self._told = True
        return error

    def _check_left(self, where: object, awaited: Sequence[int] | None) -> None:
        now = time.monotonic()
        collective = awaited is None
        running = self.recorder.started if self.recorder is not None else 0
        gone = []
        for rank, (since, finished) in sorted(self._left_at.items()):
            if (awaited is not None and rank not in awaited) or now - since < _GRACE_S:
                continue
            if collective and finished >= running > 0:
                continue  # it has done its part of the running call
            gone.append(rank)
        if gone:
            text = "; ".join(f"rank {rank} has closed its communicator" for rank in gone)
            raise PeerLostError(f"{where}: {text} [rank {self.rank}]", tuple(gone))

    def wait(self, where: object, timeout: float, awaited: Sequence[int] | None = None) -> Wait:
        """Return what one waiting call needs; see :class:`Wait`."""
        return Wait(self, where, timeout, awaited)

    def explain(self, where: object, error: BaseException) -> Exception:
        """Return the error to raise for ``error`` of the engine, and break the communicator.

        The engine notices the end of a connection before the monitor knows why.
        """
        end = time.monotonic() + _EXPLAIN_S
        while time.monotonic() < end:
            try:
                self.check(where)
            except Exception as known:
                return known
            time.sleep(0.005)
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        self.abort(Failure("aborted", self.rank, text))
        return BackendError(f"{where}: {error} [rank {self.rank}]", code=None)

    # -- what a rank tells ----------------------------------------------------------------

    def abort(self, failure: Failure) -> None:
        """Break the communicator for every rank; the first failure counts."""
        if self._break(failure):
            self._say({"kind": "failure", "failure": _packed(failure)})

    def close(self) -> None:
        """Leave this communicator, with that of all ranks the monitor; twice does nothing."""
        if not self._closed:
            self._closed = True
            finished = self.recorder.finished if self.recorder is not None else 0
            self._say({"kind": "left", "finished": finished})
            if self.name == _WORLD:
                self._monitor._leave()

    def _say(self, message: Message) -> None:
        self._monitor._say({**message, "channel": self.name, "members": list(self.members)})

    def _break(self, failure: Failure) -> bool:
        with self._monitor._lock:
            if self.failure is not None:
                return False
            self.failure = failure
        for function in list(self.on_failure):
            function()
        return True

    # -- what the monitor hears -----------------------------------------------------------

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "failure":
            told = message["failure"]
            self._break(Failure(told["kind"], told["rank"], told["text"], tuple(told["ranks"])))
        elif kind == "left":
            rank = self.members.index(message["rank"])
            self.left.add(rank)
            self._left_at[rank] = time.monotonic(), message["finished"]
        elif kind == "report":
            self._report()
        else:
            with self._reported:
                reports = message["reports"].items()
                self._reports = {self.members.index(int(rank)): said for rank, said in reports}
                self._rounds += 1
                self._reported.notify_all()

    def _report(self) -> None:
        recorder = self.recorder
        entries, finished, started = [], 0, 0
        if recorder is not None:
            finished, started = recorder.finished, recorder.started
            for entry in recorder.entries(_REPORTED):
                header = json.loads(entry.call.header(entry.site))
                entries.append([entry.sequence, entry.call.digest, entry.compares, header])
        report = {"kind": "report", "entries": entries, "finished": finished, "started": started}
        self._monitor._say({**report, "channel": self.name})

    def _lose(self, world_rank: int) -> None:
        rank = self.members.index(world_rank)
        host = self._monitor.hosts[world_rank]
        text = f"rank {rank} (on {host}) is gone: its process ended or its host is cut off"
        self._break(Failure("lost", self.rank, text, (rank,)))

    # -- stalls ---------------------------------------------------------------------------

    def _compare(self) -> int:
        """Ask for a comparison of the recorders; return how many there were before."""
        rounds = self._rounds
        self._say({"kind": "stall"})
        return rounds

    def _late(self, where: object, seconds: float, awaited: Sequence[int] | None) -> NoReturn:
        """Break the communicator because a deadline has passed."""
        before = self._compare()
        with self._reported:
            self._reported.wait_for(
                lambda: self._rounds > before or self.failure is not None, _REPORT_S
            )
        if self.failure is not None:
            raise self._error(where)
        reports = self._reports or {}
        absent = self._absent(reports) if awaited is None else list(awaited)
        text = f"waited {seconds:g} s for " + (
            f"rank {', '.join(map(str, absent))}: "
            + "; ".join(_last(rank, reports.get(rank)) for rank in absent)
            if absent
            else "the transport: every rank is in the same call, which has not ended"
        )
        self.abort(Failure("timeout", self.rank, text, tuple(absent)))
        raise CollectiveTimeoutError(f"{where}: {text} [rank {self.rank}]", tuple(absent))

    def _absent(self, reports: dict[int, Message]) -> list[int]:
        """Return the ranks that have not begun this rank's call, or do not answer."""
        mine = self.recorder.started if self.recorder is not None else 0
        return [
            rank
            for rank in range(self.size)
            if rank != self.rank and (rank not in reports or reports[rank]["started"] < mine)
        ]


class Wait:
    """One call that waits. Made when its first polls were in vain.

    Engines that are polled call :meth:`turn` between polls; engines that block with a
    timeout block for :meth:`slice` seconds and then call :meth:`check`. Both raise what
    :meth:`Channel.check` raises, and ``CollectiveTimeoutError`` when the deadline passes.
    """

    __slots__ = ("_awaited", "_channel", "_compare_at", "_end", "_pause", "_turns", "_where",
                 "timeout")  # fmt: skip

    def __init__(
        self, channel: Channel, where: object, timeout: float, awaited: Sequence[int] | None
    ) -> None:
        self.timeout = timeout
        self._channel = channel
        self._where = where
        self._awaited = awaited
        now = time.monotonic()
        self._end = now + timeout
        self._compare_at = now + _STALL_S
        self._turns = 0
        self._pause = _SLEEP_FIRST_S

    def turn(self) -> None:
        """Give others a chance to run: the core first, then, in a longer wait, some time."""
        self._turns = turns = self._turns + 1
        if turns < _YIELDS:
            if turns & _SPINS - 1 == 0:
                self.check()
            os.sched_yield()
            return
        self.check()
        time.sleep(self._pause)
        self._pause = min(1.1 * self._pause, _SLEEP_LAST_S)

    def slice(self) -> float:
        """Return the seconds to block until the next :meth:`check`."""
        return max(0.001, min(_SLICE_S, self._end - time.monotonic()))

    def check(self) -> None:
        """Raise if there is a reason to; have the recorders compared once a second."""
        channel = self._channel
        channel.check(self._where, self._awaited)
        now = time.monotonic()
        if now >= self._end:
            channel._late(self._where, self.timeout, self._awaited)
        if now >= self._compare_at:
            self._compare_at = now + _STALL_S
            channel._compare()


class Monitored(Backend):
    """A transport whose peers are watched by a monitor.

    Attributes:
        channel: this communicator's.
    """

    channel: Channel

    def observe(self, recorder: Recorder) -> None:
        self.channel.recorder = recorder

    def abort(self, failure: Failure) -> None:
        self.channel.abort(failure)


def _packed(failure: Failure) -> dict[str, Any]:
    return {
        "kind": failure.kind, "rank": failure.rank, "text": failure.text,
        "ranks": list(failure.ranks),
    }  # fmt: skip


def _last(rank: int, report: Message | None) -> str:
    """Tell what a rank did last."""
    if report is None:
        return f"rank {rank} does not answer"
    if not report["entries"]:
        return f"rank {rank} has made no collective call"
    sequence, _, _, header = report["entries"][-1]
    site = f" at {header['site']}" if header["site"] else ""
    state = "last did" if report["finished"] >= sequence else "is in"
    return f"rank {rank} {state} its call {sequence}, {describe(header)}{site}"
