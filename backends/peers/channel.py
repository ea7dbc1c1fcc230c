"""One communicator as the monitor sees it."""

# Which failure wins: each rank keeps the first one that it learns of, its own or one that the hub
# passes on, and raises it in all later calls. A rank sends its failure before its other threads see
# it, because the call that raises it may be the rank's last, and close the link. The engine often
# notices the end of a connection before the hub has told the reason. So explain() waits for the
# reason before it breaks the communicator with the engine's own text.
#
# abort() waits for nobody: the monitor's thread calls it, and the same thread receives the
# acknowledgements. Only await_heard() waits. A fixed pause in its place was tried: 0.1 s was not
# enough on a busy machine, and each failed send would pay a longer one.
#
# close() breaks the communicator only if another thread is in a call (end_waits). It must not do so
# always: peers may still be in a call that has returned here.

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any, NoReturn

from collective.contract.backend import Note
from collective.contract.failure import LONGER, Failure
from collective.contract.process import RankProcess
from collective.contract.recorder import Recorder
from collective.contract.waits import (
    CLOSED,
    DROPPED,
    Caller,
    MessageCall,
    Waiting,
    caller,
    departed,
    explain,
    printable,
)
from collective.control.link import Link, Message
from collective.control.secret import Secret
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    RendezvousError,
)
from collective.platform import usable_cores

from .messages import last_call, last_call_of, make_report, waits_of
from .wait import SLICE_S, Running, Wait, asks_at

if TYPE_CHECKING:
    from .monitor import Monitor

#: The name of the communicator of all ranks.
WORLD = "world"
# Grace period after a rank has left: it may have sent the awaited message before it left.
_GRACE_S = 0.5
# How long a call that gives up waits for the hub's last answer, after its deadline. A call that has
# waited long enough has an earlier answer, too: see Wait.check(). A call that gives up before its
# deadline, since a level has found other calls, has more time.
_LAST_S, _REPORT_S = 0.05, 1.0
# Part of the time until the deadline in which the hub must answer an earlier question.
_ANSWER_SHARE = 0.8
# How long a rank that gives up waits for its peers to acknowledge that. A peer that is stopped does
# not acknowledge it.
_HEARD_S = 2.0
# How long the peers may take to notice by themselves that the hub has gone.
_ALONE_S = 0.1
# How long a call waits for the monitor's explanation when the engine fails: the hub reports a death
# within milliseconds.
_EXPLAIN_S = 1.0
_UNREACHABLE = "rank {} cannot be reached: its host does not answer"
# Longest text of a peer's last call, in characters.
_CALL = 200


#: The communicators that a process has not closed, by name: their members, and their calls.
Unclosed = dict[str, tuple[Sequence[int], Sequence[Recorder]]]


class Channel:
    """One communicator, as the monitor sees it. Ranks are numbered as in the communicator.

    Attributes:
        name: name of the communicator: the same on all members, and unique in the job.
        members: the ranks' numbers in the world.
        rank, size: this rank's number, and the number of ranks.
        failure: reason why the communicator is broken; None as long as it is not broken.
        left: ranks that have closed the communicator.
        unfinished: function that returns the number of the oldest call that has returned to the
            program but still runs on a device; None if there is none. The attribute is None if the
            transport has no such calls.
        on_failure: functions that are called, in any thread, when ``failure`` has been set. The
            calling thread holds the monitor's lock, so these functions must not wait for a thread
            that might ask the monitor.
        inside: calls of this rank that wait in another transport, of which this channel would know
            nothing; by any object that identifies the call.
        silent: function that returns the ranks whose hosts do not answer any more, as far as the
            kernel has noticed on the transport's connections to them; None if the transport cannot
            tell.
        answers: number of the hub's answers so far to :meth:`ask`.
        compares_on_arrival: whether the transport itself finds calls that differ, once all ranks
            have come. If true, a stall reports no properties in which the calls may legitimately
            differ.
    """

    def __init__(self, monitor: Monitor, name: str, members: tuple[int, ...]) -> None:
        self.name = name
        self.members = members
        self.rank = members.index(monitor.rank)
        self.size = len(members)
        self.failure: Failure | None = None
        self.left: set[int] = set()
        # A list apart from this object: the finalizer, which must not hold this object, holds it.
        self._calls: list[Recorder] = []
        self.unfinished: Callable[[], int | None] | None = None
        self.on_failure: list[Callable[[], None]] = []
        self.inside: dict[object, Running] = {}
        self.silent: Callable[[], set[int]] | None = None
        self.answers = 0
        # Deadline before which a call of a level has asked, and the number of answers then.
        self._asked: tuple[Deadline, int] | None = None
        self.compares_on_arrival = False
        self._monitor = monitor
        self._groups: dict[tuple[int, ...], int] = {}
        self._left_at: dict[int, tuple[float, int, str, str]] = {}
        # Number of calls that the rank that broke the communicator had finished; None if that does
        # not matter.
        self._failed_after: int | None = None
        self._raised: weakref.ref[Exception] | None = None  # the first error for the failure
        self._closed = False
        self._shown: weakref.WeakSet[Running] = weakref.WeakSet()
        self._reported = threading.Condition()
        self._late_ranks: dict[int, Message | None] = {}
        self._offers: dict[str, dict[int, str]] = {}
        # Ranks that have acknowledged that the communicator is broken.
        self._acknowledged: set[int] = set()
        monitor._enter(self)
        monitor._unclosed[name] = list(members), self._calls
        weakref.finalize(
            self, tell_dropped, monitor._link, monitor._unclosed, [name], os.getpid()
        ).atexit = False

    @property
    def recorder(self) -> Recorder | None:
        """Flight recorder of the communicator's calls; the communicator sets it."""
        return self._calls[0] if self._calls else None

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self._calls[:] = [recorder]

    @property
    def closed(self) -> bool:
        """Whether this rank has left the communicator."""
        return self._closed

    @property
    def broken_by_connected(self) -> bool:
        """Whether the communicator was broken by a rank that had finished connecting.

        Such a rank has gone on to the next generation, or its program has failed.
        """
        return self.failure is not None and self.failure.kind in ("shrink", "failed")

    def group(self, ranks: Sequence[int]) -> Channel:
        """Return the channel of a communicator among ``ranks``; only these ranks call this."""
        members = tuple(self.members[rank] for rank in ranks)
        # All members make groups of these members in one order, so they agree on this number.
        self._groups[members] = nth = self._groups.get(members, 0) + 1
        text = f"{self.name} {members} {nth}"
        name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return Channel(self._monitor, f"group-{name}", members)

    def cores(self) -> int:
        """Return the number of cores on which this host's ranks of the world may run."""
        own = RankProcess.own()
        every = [process for process in self._monitor.processes if process is not None]
        return usable_cores(*(other.pid for other in every if own and other.host == own.host))

    # -- checks of a call -----------------------------------------------------------------

    def check(
        self,
        where: object,
        awaited: Sequence[int] | None = None,
        any_of: bool = False,
        sequence: int | None = None,
    ) -> None:
        """Raise if the communicator is broken, or if an awaited rank has left for good.

        Args:
            where: operation, for the error.
            awaited: ranks that the call waits for; None for all other ranks.
            any_of: whether one of ``awaited`` is enough. If true, the call fails only once all of
                them have left.
            sequence: number of the collective call, if it need not be the last call.

        Raises:
            PeerLostError, PeerFailedError, MismatchError, CommunicatorAbortedError,
            CollectiveTimeoutError: the error that belongs to the failure.
        """
        # A call that waits for nobody does not pay for a look, unless the hub is gone.
        if self.failure is None and (awaited != () or self._monitor.hub_gone):
            self._monitor.look_around()
        if self.failure is not None:
            raise self._error(where)
        if self._left_at:
            self._check_left(where, awaited, any_of, sequence)

    def refuse_closed(self, where: object) -> None:
        """Raise if another thread has closed the communicator since the call began."""
        if self._closed:
            raise self.closed_error(where)

    def closed_error(self, where: object) -> Exception:
        """Return the error of a call that waited while another thread closed the communicator."""
        return Failure.closed(self.rank).error(str(where), self.rank)

    def refuse_unfinished(self, where: object) -> None:
        """Raise if a rank broke the communicator before it had finished the running call."""
        if self.failure is not None:
            after = self._failed_after
            if after is not None and after < self._running(None):
                raise self._error(where)

    def _error(self, where: object) -> Exception:
        assert self.failure is not None
        error = self.failure.error(str(where), self.rank)
        if self.failure.kind == "mismatch" and self._raised:
            # An earlier call has raised the mismatch; this is a later call on the communicator
            # that the mismatch has broken.
            text = f"{where}: broken by an earlier mismatch: {self.failure.text}"
            return CommunicatorAbortedError(f"{text} [rank {self.rank}]")
        self._raised = weakref.ref(error)
        return error

    def has_raised(self, error: BaseException) -> bool:
        """Return whether an error is the first one that this channel has made for its failure."""
        return self._raised is not None and self._raised() is error

    def _check_left(
        self,
        where: object,
        awaited: Sequence[int] | None,
        any_of: bool,
        sequence: int | None,
    ) -> None:
        now = time.monotonic()
        collective = awaited is None
        running = self._running(sequence)
        gone = []
        for rank, (since, finished, _, _) in sorted(self._left_at.items()):
            if (awaited is not None and rank not in awaited) or now - since < _GRACE_S:
                continue
            # A rank that finished this very call before it left owes nothing more to the call. For
            # messages between two ranks nobody can tell that; they have only the grace period.
            if collective and finished >= running > 0:
                continue
            gone.append(rank)
        if any_of and awaited is not None and len(gone) < len(awaited):
            return
        if gone:
            text = departed({rank: self._left_at[rank][2:] for rank in gone}, where)
            self.abort(Failure("lost", self.rank, text, tuple(gone)))
            raise self._error(where)

    def _running(self, sequence: int | None) -> int:
        """Return ``sequence``, or the number of the last call if ``sequence`` is None."""
        if sequence is not None:
            return sequence
        return self.recorder.started if self.recorder is not None else 0

    def _finished(self) -> int:
        """Return the number of the last call that is over, also on the devices."""
        if self.recorder is None:
            return 0
        finished = self.recorder.finished
        oldest = self.unfinished() if self.unfinished is not None else None
        return finished if oldest is None else min(finished, oldest - 1)

    def wait(
        self,
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None = None,
        any_of: bool = False,
        sequence: int | None = None,
    ) -> Wait:
        """Return the wait of one call; see :class:`Wait` and :meth:`check`.

        Args:
            where, deadline, awaited, any_of, sequence: as in :meth:`check`.
        """
        return Wait(self, where, deadline, awaited, any_of, sequence, caller())

    def explain(
        self,
        where: object,
        error: BaseException,
        awaited: Sequence[int] | None = None,
        any_of: bool = False,
    ) -> Exception:
        """Return the error to raise for the engine's ``error``, and break the communicator.

        The engine notices the end of a connection before the monitor knows the reason. So this
        waits a moment for the monitor. ``awaited`` and ``any_of`` are as in :meth:`check`.
        """
        if silent := self._silent():
            # The kernel has ended a connection because nothing came from that host for seconds. The
            # monitor's connections may end a second later.
            self.abort(self._loss(silent))
        deadline = Deadline(_EXPLAIN_S)
        while not deadline.expired:
            try:
                self.check(where, awaited, any_of)
                self.refuse_closed(where)
            except Exception as known:
                return known
            time.sleep(0.005)
        text = f"rank {self.rank}: {type(error).__name__}: {error}"
        self.abort(Failure("aborted", self.rank, text))
        return BackendError(f"{where}: {error} [rank {self.rank}]", code=None)

    def lost(self) -> set[int]:
        """Return the ranks that have left, ended or are cut off, as far as this rank knows."""
        gone = self._monitor.gone()
        lost = {rank for rank, member in enumerate(self.members) if member in gone}
        return (lost | self.left) - {self.rank}

    def lasting(self, store: Store) -> Store:
        """Return the world's store, made to outlive rank 0 if rank 0 serves it."""
        standby = self._monitor.standby
        return store if standby is None else standby.lasting(store)

    def when_broken(self, method: Callable[[], None]) -> None:
        """Add a method to ``on_failure`` without keeping the method's object alive."""
        reference = weakref.WeakMethod(method)

        def call() -> None:
            bound = reference()
            if bound is not None:
                bound()

        self.on_failure.append(call)

    # -- messages to the peers ------------------------------------------------------------

    def abort(self, failure: Failure) -> None:
        """Break the communicator for every rank; the first failure counts."""
        with self._monitor._lock:
            if self.failure is not None:
                return
            # Send the failure before other threads see it here: the call that raises it may be
            # this rank's last, and close the link.
            finished = self._finished()
            self._say({"kind": "failure", "failure": _packed(failure), "finished": finished})
            self._failed_after = finished
            self._break(failure)

    def await_heard(self, ranks: Sequence[int]) -> None:
        """Return when ``ranks`` have acknowledged that the communicator is broken, or time is up.

        A rank calls this before it gives memory back to its caller that a peer's engine may still
        read: MPI cannot take back a long message. A fixed pause would not do. A loaded peer may
        hear of the failure later than any pause that every failed send could pay. It would return
        data that the sender has overwritten since.

        A peer that has received the data checks ``failure`` afterwards, and discards the
        data. A peer that has closed the communicator receives nothing any more, and does not
        acknowledge, either.
        """
        failure = self.failure
        awaited = set(ranks) - {self.rank}
        awaited -= self._acknowledged | self.lost()
        if failure is None or not awaited:
            return
        self._monitor._say({
            "kind": "failure", "channel": self.name,
            "members": sorted(self.members[rank] for rank in awaited),
            "failure": _packed(failure), "finished": self._failed_after, "acknowledge": True,
        })  # fmt: skip
        deadline = Deadline(_HEARD_S)
        while not deadline.expired:
            if self._monitor.hub_gone:
                time.sleep(_ALONE_S)
                return
            # Outside of _reported's lock: lost() takes the monitor's lock, and no thread may take
            # that one while it holds the other.
            lost = self.lost()
            with self._reported:
                if awaited <= self._acknowledged | lost:
                    return
                self._reported.wait(deadline.at_most(SLICE_S))

    def post(self, note: Note) -> None:
        """Tell the hub which call this rank waits in; the hub searches for circles."""
        self._say({"kind": "waits", "note": note})

    def end_waits(self) -> bool:
        """Break the communicator if another thread is in a call; return whether that was so.

        A transport calls this before :meth:`close`, which would leave that call waiting, and its
        peers in the middle of it.
        """
        calls = self.recorder
        running = calls is not None and calls.started > max(calls.finished, calls.failed)
        if self._closed or self.failure is not None or not (running or self._shown or self.inside):
            return False
        self.abort(Failure.closed(self.rank))
        return True

    def close(self) -> None:
        """Leave this communicator; with the world's communicator also leave the monitor.

        Closing twice is harmless.
        """
        if not self._closed:
            self._closed = True
            self._monitor._unclosed.pop(self.name, None)
            left = {"finished": self._finished(), "dropped": False}
            self._say({"kind": "left", **left, "last": last_call_of(self.recorder)})
            if self.name == WORLD:
                self._monitor._leave()

    # -- set-up ---------------------------------------------------------------------------

    @property
    def secret(self) -> Secret:
        """Secret that only the members know, derived for this communicator alone."""
        return self._monitor.secret.within(self.name)

    def offer(self, name: str, text: str) -> None:
        """Offer ``text`` to all members, which offer their texts under the same name.

        Args:
            name: a name that this communicator uses only once.
            text: any text.
        """
        self._say({"kind": "offer", "name": name, "text": text})

    def offered(self, name: str) -> dict[int, str]:
        """Return the texts that members have offered so far, by rank.

        There are none before this rank has offered its own text.

        Raises:
            RendezvousError: the world's rank 0 has ended, whose process passes on the texts. If it
                is a member, this raises nothing: the loss of a member ends the caller's wait.
        """
        if self._monitor.hub_gone and 0 not in self.members:
            raise RendezvousError(
                "rendezvous: the world's rank 0 has ended, and ranks connect through its process; "
                f"keep rank 0 running while other ranks make groups [rank {self.rank}]"
            )
        return self._offers.get(name, {})

    def withdraw(self, name: str) -> None:
        """Forget the texts that were offered under ``name``."""
        self._offers.pop(name, None)

    def _say(self, message: Message) -> None:
        self._monitor._say({**message, "channel": self.name, "members": list(self.members)})

    def _break(self, failure: Failure) -> None:
        with self._monitor._lock:
            if self.failure is not None:
                return
            self.failure = failure
        for function in list(self.on_failure):
            function()

    # -- messages from the hub ------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "failure":
            failure = message["failure"]
            if self.failure is None:
                self._failed_after = message["finished"]
            self._break(
                Failure(failure["kind"], failure["rank"], failure["text"], tuple(failure["ranks"]))
            )
            if message.get("acknowledge"):
                about = {"channel": self.name, "members": [message["rank"]]}
                self._monitor._say({"kind": "heard", **about})
        elif kind == "heard":
            with self._reported:
                self._acknowledged.add(self.members.index(message["rank"]))
                self._reported.notify_all()
        elif kind == "left":
            rank = self.members.index(message["rank"])
            self.left.add(rank)
            how = DROPPED if message["dropped"] else CLOSED
            last = printable(message["last"])[:_CALL]
            self._left_at[rank] = time.monotonic(), message["finished"], how, last
            with self._reported:
                self._reported.notify_all()
        elif kind == "report":
            about = make_report(
                self.recorder, self._finished(), self.compares_on_arrival, self._messages()
            )
            self._monitor._say({"kind": "report", "channel": self.name, **about})
        elif kind == "offers":
            texts = {self.members.index(int(r)): text for r, text in message["texts"].items()}
            # Make a new dictionary: another thread may be reading the old one.
            self._offers[message["name"]] = {**self._offers.get(message["name"], {}), **texts}
        else:
            with self._reported:
                late = message["late"].items()
                self._late_ranks = {self.members.index(int(rank)): report for rank, report in late}
                self.answers += 1
                self._reported.notify_all()

    def _messages(self) -> list[Waiting]:
        """Return the messages in which threads of the program wait."""
        try:
            calls = [*self._shown, *self.inside.values()]
        except RuntimeError:  # another thread begins to wait right now
            return []
        # Negative tags are those of collective calls, which the recorder has.
        return [
            Waiting.of(call.where, call.who, call.awaited or ())
            for call in calls
            if isinstance(call.where, MessageCall) and call.where.tag >= 0
        ]

    def _lose(self, world_rank: int, why: str = "") -> None:
        # A rank whose own host is cut off learns first that it has lost the hub, but it has lost
        # all ranks of other hosts.
        self._break(self._loss({self.members.index(world_rank), *self._silent()}, why))

    def _loss(self, ranks: Set[int], why: str = "") -> Failure:
        """Return the failure of a rank that has lost ``ranks``.

        Args:
            ranks: the lost ranks.
            why: what is wrong with a message of theirs; empty if they are gone.
        """
        lost = sorted(ranks)
        hosts = (self._monitor.hosts[self.members[rank]] for rank in lost)
        names = ", ".join(f"{rank} (on {host})" for rank, host in zip(lost, hosts))
        if why:
            text = f"rank {names} is gone: it sent a malformed message: {why}"
        elif len(lost) == 1:
            text = f"rank {names} is gone: its process ended or its host is cut off"
        else:
            text = (
                f"ranks {names} are gone: their processes ended, or their hosts or the one of rank "
                f"{self.rank} are cut off"
            )
        return Failure("lost", self.rank, text, tuple(lost))

    def _silent(self) -> set[int]:
        """Return the ranks whose hosts do not answer, as far as the transport can tell."""
        return set() if self.silent is None else self.silent() - self.left

    # -- stalls ---------------------------------------------------------------------------

    def compare(self) -> None:
        """Have the hub compare the recorders: ranks with different calls get ``MismatchError``."""
        self._say({"kind": "stall", "asks": None, "within": None})

    def ask(self, awaited: Sequence[int] | None, within: float) -> None:
        """Compare, and ask the hub for the reports of the late ranks and of ``awaited``.

        The answer counts in :attr:`answers`, and is used by :meth:`give_up`.

        Args:
            awaited: as in :meth:`wait`.
            within: seconds until the answer is needed. A little earlier the hub answers without the
                reports that have not come.
        """
        asks = [self.members[rank] for rank in awaited or ()]
        self._say({"kind": "stall", "asks": asks, "within": _ANSWER_SHARE * within})

    def ask_in_time(self, deadline: Deadline) -> None:
        """Ask who is late, once, when the deadline of a call that waits in a level is near.

        Each wait of a level calls this again and again.
        """
        left, asked = deadline.left(), self._asked
        if left <= asks_at(deadline.seconds) and (asked is None or asked[0] is not deadline):
            self._asked = deadline, self.answers
            awaited = {rank for call in [*self.inside.values()] for rank in call.awaited or ()}
            self.ask(sorted(awaited), left)

    def give_up(
        self,
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None,
        sequence: int | None = None,
        who: Caller | None = None,
        asked: int | None = None,
    ) -> NoReturn:
        """Break the communicator because ``deadline`` has passed, or might as well have passed.

        Args:
            where, deadline, awaited, sequence, who: as in :meth:`wait`.
            asked: value of :attr:`answers` when the call asked the hub before its deadline; None if
                it did not ask, or if it waits in a level (:meth:`ask_in_time`).

        Raises:
            CollectiveTimeoutError: always, unless the communicator has been broken before.
        """
        if asked is None and self._asked is not None and self._asked[0] is deadline:
            asked = self._asked[1]
        seconds = max(_LAST_S, deadline.at_most(_REPORT_S))
        late = self._asked_reports(awaited, asked, seconds)
        if self.failure is not None:
            raise self._error(where)
        running = self._running(sequence)
        answered, late = late is not None, late or {}
        silent = self._silent()
        absent = list(awaited or ())
        if awaited is None:
            behind = (
                r for r, report in late.items() if report is None or report["started"] < running
            )
            absent = sorted(behind)
        if not answered:
            # This rank's host may be cut off: then it has lost all ranks of other hosts.
            absent = sorted(silent.union(absent))
        remedy = LONGER
        if absent:
            waits = waits_of(late)
            who = caller() if who is None else who
            waits[self.rank] = [Waiting.of(where, who, absent)]

            def last(rank: int) -> str:
                return _UNREACHABLE.format(rank) if rank in silent else last_call(rank, late)

            missing, remedy = explain(self.rank, absent, waits, last)
        elif answered and sequence is not None:
            missing = (
                "the devices: all ranks have made this call, but it has not ended on some device"
            )
        elif answered:
            missing = "the transport: every rank is in this call, but it has not ended"
        else:
            missing = (
                "its peers, and the monitor in the process of the world's rank 0 does not answer"
            )
            absent = [self.members.index(0)] if 0 in self.members else []
        failure = Failure.timed_out(self.rank, deadline.seconds, missing, absent, remedy)
        self.abort(failure)
        raise CollectiveTimeoutError(f"{where}: {failure.text} [rank {self.rank}]", failure.ranks)

    def _asked_reports(
        self, awaited: Sequence[int] | None, asked: int | None, seconds: float
    ) -> dict[int, Message | None] | None:
        """Return the reports of the late ranks; None if the hub has answered no question.

        The last question has little time if the call's deadline has passed. A rank that lives may
        not report in that time. Then its earlier report counts.

        Args:
            awaited, asked: as in :meth:`give_up`.
            seconds: how long to wait for the last answer.
        """
        with self._reported:
            # Count the answers, because the answer to an earlier question may still be in flight.
            before = self.answers
            earlier = self._late_ranks if asked is not None and before > asked else None
        self.ask(awaited, seconds)
        with self._reported:
            answered = self._reported.wait_for(
                lambda: self.answers > before or self.failure is not None, seconds
            )
            last = self._late_ranks
        if not answered or earlier is None:
            return last if answered else earlier
        reports = {rank: report or earlier.get(rank) for rank, report in last.items()}
        return {r: report for r, report in reports.items() if report or r in earlier} or reports


def _packed(failure: Failure) -> dict[str, Any]:
    return {
        "kind": failure.kind, "rank": failure.rank, "text": failure.text,
        "ranks": list(failure.ranks),
    }  # fmt: skip


def tell_dropped(link: Link | None, unclosed: Unclosed, names: Sequence[str], owner: int) -> None:
    """Tell the peers that this rank has dropped communicators without closing them.

    Args:
        link: link to the hub; if None, no message is sent.
        unclosed: communicators that this process has not closed.
        names: names of the dropped communicators.
        owner: id of the process that made the communicators. A forked child of that process sends
            no message.
    """
    if link is None or os.getpid() != owner:
        return
    for name in names:
        members, calls = unclosed.pop(name, ((), ()))
        if members:
            finished = calls[0].finished if calls else 0
            last = last_call_of(calls[0] if calls else None)
            left = {"kind": "left", "finished": finished, "dropped": True, "last": last}
            # The garbage collector may run this in a thread that is sending. There send() would
            # wait for a lock that the same thread holds.
            with contextlib.suppress(OSError):
                link.send_when_free({**left, "channel": name, "members": members})
