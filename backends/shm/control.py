"""The control segment: arrival, waiting, comparison of calls, and reports of failures."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from collective import native
from collective.contract.failure import Failure
from collective.contract.mail import progress_all
from collective.contract.recorder import Recorder
from collective.contract.stalls import look
from collective.contract.waits import (
    CLOSED,
    DROPPED,
    NO_CALL,
    MessageCall,
    Waiting,
    caller,
    departed,
    explain,
    from_wire,
    last_done,
    publish_after,
    to_wire,
)
from collective.deadline import Deadline
from collective.errors import BackendError, RendezvousError, UnsupportedError
from collective.platform import read_process
from collective.request import Disagreement, Request

from .board import Board
from .failures import cause, report
from .fence import ORDERED, fence
from .layout import (
    CALL_BYTES,
    CALLS,
    FAILURE_BYTES,
    LINE,
    NOTICE_BYTES,
    PAYLOAD_BYTES,
    WAITS_BYTES,
    Layout,
)
from .segment import Segment

Array = np.ndarray[Any, Any]

# Words of a rank's line. A fast peer may be one step ahead, and write while this rank still reads
# the words of the step before. So digest and location have two places, for even and odd steps.
# C writes some of these words, too: those before the state, and the numbers of the last call and of
# the descriptions. collective/native/shared.h names them, and three counters of C behind the words
# here. Each of these counters has a cache line by itself.
_STEP = 0
_DIGEST = 1  # + parity
_ASLEEP = 3
_LOCATION = 8  # + 8 * parity: of src: segment, offset, address; the same of dst
_WAITING = 24
_STATE, _PID, _LAST_CALL, _PAYLOAD_LENGTH = range(32, 36)
_FAILURE, _NOTICE, _DESCRIBED = 36, 38, 39
#: The first word of the segment: not 0 when some rank has failed.
BROKEN = 0
# The second word: a random number that rank 0 draws for the ranks of this segment.
_TOKEN = 1
# The number of ranks that nap, in a cache line by itself; see collective/native/sleeping.h.
_SLEEPERS = 8

_JOINED, _LEFT, _DROPPED = 1, 2, 3
# For error texts: the states of ranks that no longer take part.
_GONE = {_LEFT: CLOSED, _DROPPED: DROPPED}

# A wait polls, then yields the processor, then sleeps ever longer. Polling suits a peer on another
# core.
_POLLS = 200
#: Number of polls of a wait if there are more ranks than cores: polling would keep the peer from
#: running, so the wait yields the processor almost at once.
POLLS_CROWDED = 20
_YIELD_S = 0.002
# A nap lasts a twentieth of the wait so far, so a late wake-up costs no more than that. A rank that
# announces something wakes the ranks that nap. A rank sleeps until the end of its nap if there is
# no native core, or if the other rank sees too late that it naps.
_NAP_SHARE, _NAP_LAST_S = 0.05, 5e-3
# Time between two looks at the peers' locks, which take a system call for each peer.
_CHECK_PEERS_S = 0.05
# A process that ends loses its memory before its lock. These are the time to wait for the loss of
# the lock, and the time between two looks at it.
_ENDING_S, _ENDING_LOOK_S = 1.0, 0.005
# Time that a wait lasts before its first look for a deadlock, and before each further look.
_STALL_S = 1.0
# A payload is a path, a vote, a text or a call's header. A length above this is a sign of damage.
_LONGEST_PAYLOAD = 1 << 30


def address_of(array: Array) -> int:
    """Return the address of the first element of ``array``."""
    return int(array.__array_interface__["data"][0])


class Control:
    """Control segment as one rank sees it.

    Attributes:
        request: the call that began last.
        recorder: recorder of the communicator's calls, once it has one.
        meeting: number common to the ranks that joined this segment; see :attr:`Backend.meeting`.
        notices: board on which the ranks describe the calls in which they wait.
        words: the segment as 64-bit words.
        polls: number of polls of a wait before it yields the processor.
        yield_s: seconds for which a wait then yields the processor, before it sleeps.
        while_waiting: function of the deadline that each longer wait calls again and again.
    """

    def __init__(self, segment: Segment, layout: Layout, rank: int) -> None:
        self.rank = rank
        self.size = size = layout.size
        self.segment = segment
        self.layout = layout
        self.meeting = ""
        self.words = memoryview(segment.map).cast("q")
        self._core: Any = native.chosen.extension
        self._line = (1 + rank) * LINE
        self._peers = [(1 + r) * LINE for r in range(size) if r != rank]
        self._asleep = [8 * (line + _ASLEEP) for line in self._peers]
        self.request: Request | str = "connect"
        self.recorder: Recorder | None = None
        # Numbers of the descriptions that this rank has published.
        self._described: dict[Request, int] = {}
        self._pids = [0] * size
        self._left = False
        # The waits of this rank that its peers can read, and the board where they read them.
        self.waits: dict[object, Waiting] = {}
        self._waits_lock = threading.Lock()
        self._board = Board(segment.map, rank, layout.waits, WAITS_BYTES, _WAITING)
        self.notices = Board(segment.map, rank, layout.notices, NOTICE_BYTES, _NOTICE)
        self._failures = Board(segment.map, rank, layout.failures, FAILURE_BYTES, _FAILURE)
        self._has_failed = False
        # A signal handler may abort the communicator while its thread holds this lock.
        self._failing = threading.RLock()
        # Dropping the communicator does not mean that the process died. The descriptor of the
        # segment, and with it the lock, stays until the peers can read that it was dropped.
        drop = weakref.finalize(self, _drop, segment, self._line + _STATE, os.getpid())
        drop.atexit = False
        self.yield_s = _YIELD_S
        self.while_waiting: Callable[[Deadline], object] = lambda deadline: None
        self.polls = _POLLS

    # -- life ---------------------------------------------------------------------------

    def join(
        self,
        deadline: Deadline,
        watch: Callable[[Sequence[int]], None] = lambda missing: None,
        last: Callable[[], object] = lambda: None,
    ) -> None:
        """Announce this process and wait for the others. Rank 0 announces itself last.

        Args:
            deadline: for the whole call.
            watch: called from time to time with the missing ranks; it may raise.
            last: rank 0 calls it before it announces itself. At that moment all ranks have arrived,
                and no rank has gone on.

        Raises:
            RendezvousError: some ranks did not arrive; the error names them.
        """
        self.words[self._line + _PID] = os.getpid()
        if self.rank == 0:
            self.words[_TOKEN] = secrets.randbits(63)
            self._wait_joined(range(1, self.size), deadline, watch)
            last()
        # Write the process number before the state: a peer that sees the state may use the number
        # at once. It may test the lock, too, which this process has held since it opened the
        # segment.
        fence()
        self.words[self._line + _STATE] = _JOINED
        if self.rank != 0:
            self._wait_joined(range(self.size), deadline, watch)
        # The processor must not read the numbers and the token before it reads the states.
        fence()
        self.meeting = f"{self.words[_TOKEN]:016x}"
        # Read the numbers once. A peer that writes another number later must not make this rank
        # read the memory of another process.
        self._pids = pids = [int(self.words[(1 + r) * LINE + _PID]) for r in range(self.size)]
        if len(set(pids)) < self.size:
            # A process's own locks never block it, so ranks in one process would take each other
            # for dead.
            raise UnsupportedError(
                f"shm: {self.size} ranks in {len(set(pids))} processes, but each rank must be a "
                f"separate process [rank {self.rank}]. For ranks that are threads use "
                "backend='threads'."
            )

    def _wait_joined(
        self,
        ranks: Sequence[int],
        deadline: Deadline,
        watch: Callable[[Sequence[int]], None],
    ) -> None:
        pause = 50e-6  # the members of a group arrive at once
        while missing := [r for r in ranks if not self.words[(1 + r) * LINE + _STATE]]:
            watch(missing)
            if deadline.expired:
                raise RendezvousError(
                    f"shm: after {deadline.seconds:g} s ranks {missing} of {self.size} have not "
                    f"arrived [rank {self.rank}]. Were all of them started, on this host?"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    def leave(self) -> None:
        """Tell the peers that this rank has left for good."""
        self._left = True  # a call of another thread ends its wait
        # A peer that sees the state looks once more for what this rank has announced before it.
        fence()
        self.words[self._line + _STATE] = _LEFT
        # Closing the descriptor releases the lock. Peers look at the state before the lock.
        self.segment.close_descriptor()

    def pid(self, rank: int) -> int:
        """Return the number of the process that joined as ``rank``."""
        return self._pids[rank]

    # -- steps --------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps that this rank has made; equal on ranks between operations."""
        return int(self.words[self._line])

    def arrive(self, request: Request, deadline: Deadline) -> None:
        """Make the first step of ``request``: wait for all ranks and compare their calls.

        The caller must check :data:`BROKEN` before it writes data that peers may read. If the
        communicator is broken, a late peer may still be in the last call but one, and read the old
        data there.

        Raises:
            Disagreement: on every rank, if two digests differ.
        """
        words, line = self.words, self._line
        self.request = request
        words[line + _LAST_CALL] = self.publish_call(request)
        step = words[line] + 1
        slot = _DIGEST + (step & 1)
        digest = request.digest
        # Write the digest before the step: a peer that sees the step reads the digest. It goes to
        # the word of the step's parity, since a peer may still compare the digest of the step
        # before. No peer is two steps behind.
        words[line + slot] = digest
        self._step(step, deadline)
        for peer in self._peers:
            if words[peer + slot] != digest:
                raise self.disagreement(request, deadline)

    def disagreement(self, request: Request, deadline: Deadline) -> Disagreement:
        """Return the error for digests that differ; all ranks call this together."""
        headers = self.share(request.header(), deadline)
        for rank, header in enumerate(headers):
            try:
                json.loads(header)
            except ValueError:
                self.refuse(rank, "the description of its call is not JSON")
        return Disagreement(headers)

    def sync(self, deadline: Deadline) -> None:
        """Make a further step of the same operation.

        No other rank can finish the operation before this rank makes this step. A rank that has
        failed since the last step has left the operation all the same, and its memory may be in
        use again. Data that was read from there is not valid, so this raises the failure.
        """
        words = self.words
        if not ORDERED:
            fence()  # all reads from peers come before the look at the flag
        if words[BROKEN]:
            raise self.failure(self.request)
        self._step(words[self._line] + 1, deadline)

    def _step(self, step: int, deadline: Deadline) -> None:
        """Announce that this rank has reached ``step``, and wait until all ranks have done so."""
        words = self.words
        if not ORDERED:
            fence()
        words[self._line] = step
        # There is no fence between the step and this look, since a fence would cost every call. A
        # rank that begins to nap at this very moment is not woken, and sleeps until its nap ends,
        # 5 ms at most.
        if words[_SLEEPERS]:
            self._wake()
        for peer in self._peers:
            if not step <= words[peer] <= step + 1:
                self._wait_for(peer, step, deadline)
        if not ORDERED:
            fence()

    def share(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """Share a payload of any length; return those of all ranks. A round moves some pages."""
        words, where = self.words, self.layout.payloads
        words[self._line + _PAYLOAD_LENGTH] = len(payload)
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        lengths: list[int] = []
        start, longest = 0, 1
        while start < longest:
            piece = payload[start : start + PAYLOAD_BYTES]
            self.segment.map[where[self.rank] : where[self.rank] + len(piece)] = piece
            self.sync(deadline)
            # All ranks have written their lengths by the end of the first round. Every rank reads
            # them there, once, so that all make the same number of rounds.
            lengths = lengths or [self._length_of_payload(r) for r in range(self.size)]
            longest = max(lengths)
            for rank, length in enumerate(lengths):
                count = min(max(length - start, 0), PAYLOAD_BYTES)
                parts[rank].append(bytes(self.segment.map[where[rank] : where[rank] + count]))
            # No rank writes its next piece, or its next payload, before all have read this one.
            self.sync(deadline)
            start += PAYLOAD_BYTES
        return [b"".join(pieces) for pieces in parts]

    def _length_of_payload(self, rank: int) -> int:
        length = int(self.words[(1 + rank) * LINE + _PAYLOAD_LENGTH])
        if not 0 <= length <= _LONGEST_PAYLOAD:
            self.refuse(rank, f"a note of {length} bytes")
        return length

    def location(self, rank: int, parity: int) -> int:
        """Return the index of the six words with the places of ``rank``'s buffers.

        ``parity`` is that of the step which opened the operation. A rank writes the words before it
        arrives. The words stay until the rank opens another operation at that parity.
        """
        return (1 + rank) * LINE + _LOCATION + 8 * parity

    # -- memory of peers -------------------------------------------------------------------

    def read(self, rank: int, address: int, out: Array) -> bool:
        """Copy ``out.nbytes`` bytes from ``address`` of ``rank``'s process.

        Returns:
            False if the kernel refuses, or if that process has not mapped the memory.

        Raises:
            PeerLostError: the process has ended. If the communicator was broken before, the error
                is that of the earliest cause.
        """
        pid = self.pid(rank)
        try:
            if read_process(pid, address, address_of(out), out.nbytes):
                return True
            ended = not self.segment.alive(rank)
        except ProcessLookupError:
            ended = True  # a process that ends loses its memory some time before its lock
        if ended:
            text = f"rank {rank} (pid {pid}) has died (its last call: {self.last_call(rank)})"
            raise self.broken_by(Failure("lost", self.rank, text, (rank,)), "shm")
        return False

    def fetch(self, rank: int, address: int, out: Array) -> None:
        """Copy ``out.nbytes`` bytes from ``address`` of ``rank``'s process, which permits the copy.

        Raises:
            PeerLostError: the process has ended.
            CommunicatorAbortedError: the communicator is broken, and the memory is gone.
            BackendError: the kernel refuses the copy, although it allowed one before.
        """
        if self.read(rank, address, out):
            return
        self.refuse_broken("shm")  # a rank that has given up may have unmapped its memory
        self.refuse_unreadable(rank)

    def refuse_unreadable(self, rank: int) -> NoReturn:
        """Break the communicator, since the kernel does not read the memory of ``rank`` any more.

        Raises:
            BackendError: always.
        """
        text = f"reading the memory of rank {rank} (pid {self.pid(rank)}) failed"
        self.fail(Failure("aborted", self.rank, text))
        raise BackendError(
            f"shm: {text} [rank {self.rank}]. Set COLLECTIVE_DISABLE=shm_single_copy to avoid "
            "this.",
            "shm",
        )

    # -- waiting --------------------------------------------------------------------------

    def _wait_for(self, peer: int, step: int, deadline: Deadline) -> None:
        words = self.words
        for _ in range(self.polls):
            if step <= words[peer] <= step + 1:
                return
        self.wait(
            lambda: self.reached(peer, step, step + 1),
            lambda: [r for r in range(self.size) if words[(1 + r) * LINE] < step],
            self.request,
            deadline,
        )

    def reached(self, at: int, value: int, most: int) -> bool:
        """Tell whether a counter in a rank's line has reached ``value``.

        Args:
            at: index of the counter's word.
            value: the value to reach.
            most: the highest value that the protocol allows at this moment.

        Raises:
            BackendError: the counter has a value that the protocol does not allow.
        """
        counter = self.words[at]
        if not 0 <= counter <= most:
            self.refuse(at // LINE - 1, f"a counter is {counter}, but can be at most {most}")
        return counter >= value

    def wait(
        self,
        ready: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        what: object,
        deadline: Deadline,
        all_needed: bool = True,
    ) -> None:
        """Wait until ``ready()`` returns true, and keep a core busy for a moment at most.

        Args:
            ready: checks whether the wait is over.
            awaited: returns the ranks that have not done their part yet.
            what: the operation, for error texts; a ``MessageCall`` for a message.
            deadline: for the wait.
            all_needed: whether all awaited ranks must do their part, or any one of them.
        """
        start = time.monotonic()
        # A call may wait many times. If its deadline has passed, each of its waits looks once.
        yields_until = start + deadline.at_most(self.yield_s)
        while True:
            os.sched_yield()  # lets go of the interpreter lock too
            if ready():
                return
            if time.monotonic() > yields_until:
                break
        check_at, look_at = start, start + _STALL_S
        publish_at = start + publish_after(deadline.seconds)
        key = object()
        try:
            while not ready():
                progress_all()
                now = time.monotonic()
                if self.words[BROKEN]:
                    # A peer may have done its part first, and broken the communicator afterwards.
                    fence()
                    if ready():
                        return
                    raise self.failure(what)
                if self._left:
                    closed = Failure.closed(self.rank)
                    # No peer uses the memory of a receive. What this rank has sent stays valid.
                    if isinstance(what, MessageCall) and what.to is None:
                        raise closed.error(str(what), self.rank)
                    # Break the communicator first. Otherwise a peer could still use the memory
                    # that the caller gets back.
                    raise self.broken_by(closed, what)
                if now >= check_at:
                    check_at = now + _CHECK_PEERS_S
                    self._check_peers(ready, awaited, what, all_needed, deadline)
                    self.while_waiting(deadline)
                    if now >= publish_at:
                        self._publish(key, Waiting.of(what, caller(), awaited()))
                if now >= look_at:
                    look_at = now + _STALL_S
                    look(deadline, self.recorder, what, start)
                if deadline.expired:
                    self._late(awaited(), what, deadline)
                nap = min((now - start) * _NAP_SHARE, _NAP_LAST_S)
                self._nap(deadline.at_most(nap), ready)
        finally:
            if key in self.waits:
                self._publish(key, None)

    def _publish(self, key: object, waiting: Waiting | None) -> None:
        """Show the peers what this rank waits for.

        Args:
            key: identifies one wait of this rank, which may have several threads.
            waiting: description of the wait; None if it is over.
        """
        with self._waits_lock:
            if waiting == self.waits.get(key):
                return
            if waiting is None:
                del self.waits[key]
            else:
                self.waits[key] = waiting
            self._board.post(to_wire(list(self.waits.values())))

    def _nap(self, seconds: float, ready: Callable[[], bool]) -> None:
        if self._core is None:
            time.sleep(seconds)
        else:
            self._core.nap(self.segment.map, 8 * (self._line + _ASLEEP), seconds, ready)

    def _wake(self) -> None:
        """Wake the peers that nap."""
        if self._core is not None:
            self._core.wake(self.segment.map, self._asleep)

    def watch(self, ranks: Sequence[int], what: str) -> None:
        """Raise if the communicator is broken, or one of ``ranks`` is gone."""
        self.refuse_broken(what)
        self._check_peers(lambda: False, lambda: ranks, what, True, Deadline(0.0))

    def explain(self, ranks: Sequence[int], what: str) -> None:
        """Raise the reason why one of ``ranks`` is gone, if it becomes visible within a second.

        A process that ends loses its memory and its files before its lock.
        """
        deadline = Deadline(_ENDING_S)
        while not deadline.expired:
            self.watch(ranks, what)
            time.sleep(_ENDING_LOOK_S)

    def lost(self) -> set[int]:
        """Return the ranks that have left, or whose processes have ended."""
        others = (rank for rank in range(self.size) if rank != self.rank)
        return {
            rank
            for rank in others
            if self.words[(1 + rank) * LINE + _STATE] in _GONE or not self.segment.alive(rank)
        }

    def _check_peers(
        self,
        ready: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        what: object,
        all_needed: bool,
        deadline: Deadline,
    ) -> None:
        gone = {}
        ranks: Sequence[int] = awaited()
        for rank in ranks:
            if rank == self.rank:
                continue
            if (state := self.words[(1 + rank) * LINE + _STATE]) in _GONE:
                gone[rank] = _GONE[state]
            elif not self.segment.alive(rank):
                # The rank may have left between the look at its state and the look at its lock.
                state = self.words[(1 + rank) * LINE + _STATE]
                gone[rank] = _GONE.get(state, f"(pid {self.pid(rank)}) has died")
        if not gone or not (all_needed or len(gone) == len(ranks)):
            return
        fence()  # ready() then sees all that these ranks did before they left
        if ready():
            return
        # ready() may have processed data that these ranks left behind. Then they have done their
        # part.
        still = awaited()
        gone = {rank: fate for rank, fate in gone.items() if rank in still}
        if not gone:
            return
        # The rank may have left after an error that it shares with this rank.
        look(deadline)
        self.refuse_broken(what)
        fates = {rank: (fate, self.last_call(rank)) for rank, fate in gone.items()}
        failure = Failure("lost", self.rank, departed(fates, what), tuple(gone))
        raise self.broken_by(failure, what)

    def _late(self, awaited: Sequence[int], what: object, deadline: Deadline) -> None:
        waits = {rank: from_wire(wire) for rank, wire in self._board.read().items()}
        waits[self.rank] = [Waiting.of(what, caller(), awaited)]
        missing, remedy = explain(
            self.rank, awaited, waits, lambda rank: last_done(rank, self.last_call(rank))
        )
        failure = Failure.timed_out(self.rank, deadline.seconds, missing, awaited, remedy)
        raise self.broken_by(failure, what)

    # -- descriptions of calls, and failures --------------------------------------------------

    def publish_call(self, request: Request) -> int:
        """Write the description of a call where peers can read it; return its number.

        The last :data:`CALLS` descriptions are kept.
        """
        words, described = self.words, self._line + _DESCRIBED
        known = self._described.get(request)
        if known is not None and words[described] - known < CALLS:
            return known
        number = words[described] + 1
        at = self.layout.calls[self.rank] + number % CALLS * CALL_BYTES
        self.segment.map[at : at + CALL_BYTES] = description(request)
        words[described] = number
        self._described.pop(request, None)
        if len(self._described) >= CALLS:
            del self._described[next(iter(self._described))]
        self._described[request] = number
        return number

    def last_call(self, rank: int) -> str:
        """Return the last collective call of ``rank``, as text."""
        number = self.words[(1 + rank) * LINE + _LAST_CALL]
        if not number:
            return NO_CALL
        at = self.layout.calls[rank] + number % CALLS * CALL_BYTES
        return self.segment.map[at : at + CALL_BYTES].rstrip(b"\0").decode(errors="replace")

    def fail(self, failure: Failure) -> None:
        """Break the communicator for all ranks; of several failures of a rank the first counts."""
        # Several threads of this rank may fail at once, in calls of the foreground and background.
        with self._failing:
            if not self._has_failed:
                self._has_failed = True
                report(self._failures, failure)
        fence()
        # Write the flag last: a rank that sees the flag looks for a cause, and must find one.
        self.words[BROKEN] = 1
        self._wake()

    def refuse(self, rank: int, what: str) -> NoReturn:
        """Break the communicator, since ``rank`` has written an impossible value to shared memory.

        Raises:
            BackendError: always.
        """
        self.refuse_damaged(f"rank {rank}'s words in shared memory are damaged: {what}")

    def refuse_damaged(self, text: str) -> NoReturn:
        """Break the communicator, since shared memory is damaged.

        Raises:
            BackendError: always.
        """
        self.fail(Failure("aborted", self.rank, text))
        raise BackendError(
            f"shm: {text} [rank {self.rank}]. Either the ranks have different versions of this "
            "package, or some code has written to memory that it does not own.",
            "shm",
        )

    def refuse_moved(self, what: object) -> NoReturn:
        """Break the communicator, since an array of a running call has got other memory.

        Raises:
            CommunicatorAbortedError: always, unless the communicator was broken before.
        """
        raise self.broken_by(Failure.moved(self.rank), what)

    def refuse_broken(self, what: object) -> None:
        """Raise if the communicator is broken.

        If it is not, the memory of the peers was valid during all reads before this call.
        """
        if not ORDERED:
            fence()
        if self.words[BROKEN]:
            raise self.failure(what)

    def unanimous(self, mine: bool, deadline: Deadline) -> bool:
        """Return whether all ranks vote yes; the result is the same on all ranks."""
        return all(vote == b"\1" for vote in self.share(b"\1" if mine else b"\0", deadline))

    def broken_by(self, failure: Failure, what: object) -> Exception:
        """Break the communicator, and return the error to raise: the earliest cause of any rank.

        A peer may have reported a failure before this rank. For example, a peer that noticed the
        death of a rank first may have left by the time that this rank looks. Then the user must
        hear of the death, and not of the peer that left.
        """
        self.fail(failure)
        return self.failure(what)

    def failure(self, what: object) -> Exception:
        """Return the error for a call on the broken communicator: the earliest cause."""
        fence()  # read the reports after the flag, in the opposite order of fail()
        return cause(self._failures, self.rank).error(str(what), self.rank)


def _drop(segment: Segment, state: int, owner: int) -> None:
    """Tell the peers that this process dropped its communicator and lives on.

    In a forked child, do nothing.
    """
    words = memoryview(segment.map).cast("q")
    if os.getpid() == owner and words[state] == _JOINED:
        fence()
        words[state] = _DROPPED


def description(request: Request) -> bytes:
    """Return the description of a call, as it is in the segment."""
    raw = str(request).encode()
    if len(raw) > CALL_BYTES:
        raw = raw[: CALL_BYTES - 3].decode(errors="ignore").encode() + b"..."
    return raw.ljust(CALL_BYTES, b"\0")
