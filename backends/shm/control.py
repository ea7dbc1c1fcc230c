"""The control segment: how ranks arrive, wait, compare calls and hear of failures."""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from collective import native
from collective.contract.failure import Failure
from collective.contract.stalls import look
from collective.deadline import Deadline
from collective.errors import BackendError, RendezvousError, UnsupportedError
from collective.request import Disagreement, Request

from .layout import CALL_BYTES, CALLS, FAILURE_BYTES, LINE, NOTE_BYTES, Layout
from .segment import Segment

__all__ = ["BROKEN", "Control", "fence"]

# Words of a rank's line. A fast peer may be one step ahead, and write while this rank still reads
# the words of the step before. So digest and location have two places, for even and odd steps.
# collective/native/shared.h names the words that C writes, too: those up to the state, what was
# noted, and three counters behind, each alone in a line of the cache.
_STEP = 0
_DIGEST = 1  # + parity
_ASLEEP = 3
_LOCATION = 8  # + 8 * parity: of src: segment, offset, address; the same of dst
_STATE, _PID, _NOTED, _EXCHANGED, _FAILED_AT, _FAILURE_LENGTH, _NOTICE, _NOTES = range(32, 40)
#: The first word of all: not 0 when some rank has failed.
BROKEN = 0
# The next one: a number that rank 0 draws for the ranks that meet here.
_TOKEN = 1
# In a line of the cache by itself: how many ranks nap; see collective/native/sleeping.h.
_SLEEPERS = 8

_JOINED, _LEFT, _DROPPED = 1, 2, 3
# By its state, what a rank has done that no longer takes part.
_GONE = {
    _LEFT: "has closed its communicator",
    _DROPPED: "has dropped its communicator without closing it",
}

# A wait polls, then yields the processor, then sleeps ever longer. Polling suits a peer on another
# core. With more ranks than cores it would keep the peer from running, so the wait yields the
# processor almost at once.
_POLLS = 200
_POLLS_CROWDED = 20
_YIELD_S = 0.002
# A nap is a twentieth of the wait so far: that is what waking late costs at most. A rank that
# announces something wakes the ranks that nap. They sleep on without the native core, or if the
# rank sees too late that they nap.
_NAP_SHARE, _NAP_LAST_S = 0.05, 5e-3
# Time between two looks at the peers' locks, which take a system call for each peer.
_CHECK_PEERS_S = 0.05
# A process that ends loses its memory before its lock: for how long to wait for the lock, and how
# often to look at it.
_ENDING_S, _ENDING_LOOK_S = 1.0, 0.005
# Time that a wait lasts before its first look for a deadlock, and before each further look.
_STALL_S = 1.0
# A note is a path, a vote, a text or a call's header. A longer one is damaged.
_LONGEST_NOTE = 1 << 30

# x86 keeps stores in order, and loads in order. Elsewhere (AArch64, POWER) a flag could overtake
# the data that it announces. A free lock is the cheapest fence that Python has.
_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
_fence_lock = threading.Lock()


def fence() -> None:
    """Order the memory accesses before and after, where the processor does not."""
    if not _ORDERED:
        with _fence_lock:
            pass


class Control:
    """One rank's view of the control segment.

    Attributes:
        request: the call that began last.
        crowded: whether there are more ranks than cores.
        words: the segment as 64-bit words.
        polls: how often a wait looks before it yields the processor.
        yield_s: seconds that a wait then yields it, before it sleeps.
    """

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.segment = segment
        self.layout = Layout(size)
        self.words = memoryview(segment.map).cast("q")
        self._core: Any = native.chosen.extension
        self._line = (1 + rank) * LINE
        self._peers = [(1 + r) * LINE for r in range(size) if r != rank]
        self._asleep = [8 * (line + _ASLEEP) for line in self._peers]
        self.request: Request | str = "connect"
        self._noted: dict[Request, int] = {}
        self._pids = [0] * size
        # Dropping the communicator does not mean that the process died. The descriptor of the
        # segment, and with it the lock, stays until the peers can read that it was dropped.
        drop = weakref.finalize(self, _drop, segment, self._line + _STATE, os.getpid())
        drop.atexit = False
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.yield_s = _YIELD_S
        self.crowded = size > (cores or 1)
        self.polls = _POLLS_CROWDED if self.crowded else _POLLS

    # -- life ---------------------------------------------------------------------------

    def join(
        self,
        deadline: Deadline,
        last: Callable[[], None] | None = None,
        watch: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """Announce this process and wait for the others.

        Args:
            deadline: for all of it.
            last: if given, this rank announces itself after all others, and calls this
                in between: nobody has gone on by then, and everybody is here.
            watch: called now and then with the ranks that are missing; it may raise.

        Raises:
            RendezvousError: somebody did not come; names them.
        """
        if self.rank == 0:
            self.words[_TOKEN] = secrets.randbits(63)
        # Lock and number before the state: whoever sees that this rank has joined may ask for both
        # at once, and takes a free lock for its death.
        self.segment.lock_alive(self.rank)
        self.words[self._line + _PID] = os.getpid()
        if last is not None:
            others = [r for r in range(self.size) if r != self.rank]
            self._wait_joined(others, deadline, watch)
            last()
        self.words[self._line + _STATE] = _JOINED
        self._wait_joined(range(self.size), deadline, watch)
        # Read once: what a peer writes there later must not have another process's memory read.
        self._pids = pids = [int(self.words[(1 + r) * LINE + _PID]) for r in range(self.size)]
        if len(set(pids)) < self.size:
            # A process's own locks never hold it up: such ranks would take each other for dead.
            raise UnsupportedError(
                f"shm: {self.size} ranks in {len(set(pids))} processes; each must be a process "
                f"of its own [rank {self.rank}]. For ranks that are threads use "
                "backend='threads'."
            )

    def _wait_joined(
        self,
        ranks: Sequence[int],
        deadline: Deadline,
        watch: Callable[[Sequence[int]], None] | None,
    ) -> None:
        pause = 0.0005
        while missing := [r for r in ranks if not self.words[(1 + r) * LINE + _STATE]]:
            if watch is not None:
                watch(missing)
            if deadline.expired:
                raise RendezvousError(
                    f"shm: after {deadline.seconds:g} s ranks {missing} of {self.size} have not "
                    f"arrived [rank {self.rank}]. Were all of them started, on this host?"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)

    @property
    def meeting(self) -> str:
        """Number that the ranks which joined here have in common; see :attr:`Backend.meeting`."""
        return f"{self.words[_TOKEN]:016x}"

    def leave(self) -> None:
        """Tell the peers that this rank will not come again."""
        self.words[self._line + _STATE] = _LEFT
        # The lock goes with the descriptor; peers look at the state first.
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
        """Make the first step of ``request``: wait for all ranks and compare what they do.

        The caller has looked at :data:`BROKEN` before it wrote anything that a peer may read:
        one that is late in the last call but one may still be there.

        Raises:
            Disagreement: on every rank, if two digests differ.
        """
        words, line = self.words, self._line
        self.request = request
        words[line + _NOTED] = self.note(request)
        step = words[line] + 1
        slot = _DIGEST + (step & 1)
        digest = request.digest
        # The digest first: whoever sees the step reads it. In the word of the step's parity, since
        # a peer may still be comparing that of the step before; nobody is two steps behind.
        words[line + slot] = digest
        self._step(step, deadline)
        for peer in self._peers:
            if words[peer + slot] != digest:
                raise self.disagreement(request, deadline)

    def disagreement(self, request: Request, deadline: Deadline) -> Disagreement:
        """Return what to raise when digests differ; every rank calls it."""
        headers = self.exchange(request.header(), deadline)
        for rank, header in enumerate(headers):
            try:
                json.loads(header)
            except ValueError:
                self.refuse(rank, "the description of its call is no JSON")
        return Disagreement(headers)

    def sync(self, deadline: Deadline) -> None:
        """Make a further step of the same operation.

        Without this rank's step no other can have come to the end of the operation: one that
        has failed since the last step has left it, and its memory may be in use again. So
        what has been read of it is not to be had.
        """
        words = self.words
        if words[BROKEN]:
            raise self.failure(self.request)
        self._step(words[self._line] + 1, deadline)

    def _step(self, step: int, deadline: Deadline) -> None:
        """Let the others see that this rank has come to ``step``, and wait for them."""
        words = self.words
        if not _ORDERED:
            fence()
        words[self._line] = step
        # Without a fence between the step and this look: who begins to nap at this very moment
        # sleeps its nap out, 5 ms at most. A fence would cost every call.
        if words[_SLEEPERS]:
            self._wake()
        for peer in self._peers:
            if not step <= words[peer] <= step + 1:
                self._wait_for(peer, step, deadline)
        if not _ORDERED:
            fence()

    def exchange(self, note: bytes, deadline: Deadline) -> list[bytes]:
        """Return every rank's ``note``; any length, in steps of some pages."""
        words, where = self.words, self.layout.notes
        words[self._line + _EXCHANGED] = len(note)
        parts: list[list[bytes]] = [[] for _ in range(self.size)]
        lengths: list[int] = []
        start, longest = 0, 1
        while start < longest:
            piece = note[start : start + NOTE_BYTES]
            self.segment.map[where[self.rank] : where[self.rank] + len(piece)] = piece
            self.sync(deadline)
            # All ranks have written their lengths by the end of the first round. Every rank reads
            # them there, once, so that all make the same number of rounds.
            lengths = lengths or [self._length_of_note(r) for r in range(self.size)]
            longest = max(lengths)
            for rank, length in enumerate(lengths):
                count = min(max(length - start, 0), NOTE_BYTES)
                parts[rank].append(bytes(self.segment.map[where[rank] : where[rank] + count]))
            # Nobody writes the next piece, or the next call's note, before all have read this one.
            self.sync(deadline)
            start += NOTE_BYTES
        return [b"".join(pieces) for pieces in parts]

    def _length_of_note(self, rank: int) -> int:
        length = int(self.words[(1 + rank) * LINE + _EXCHANGED])
        if not 0 <= length <= _LONGEST_NOTE:
            self.refuse(rank, f"a note of {length} bytes")
        return length

    def location(self, rank: int, parity: int) -> int:
        """Return the index of the six words that say where ``rank``'s buffers are.

        ``parity`` is that of the step which opened the operation. A rank writes them
        before it arrives; they stay until it opens another operation at that parity.
        """
        return (1 + rank) * LINE + _LOCATION + 8 * parity

    def version_of_notice(self, rank: int) -> int:
        """Return the index of the word that grows with each notice of ``rank``."""
        return (1 + rank) * LINE + _NOTICE

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
        """Tell whether a counter in a rank's line has come to ``value``.

        Args:
            at: the index of the counter's word.
            most: the highest value that the protocol allows by now.

        Raises:
            BackendError: the counter is none of the protocol's.
        """
        found = self.words[at]
        if not 0 <= found <= most:
            self.refuse(at // LINE - 1, f"a counter of {found}, which is {most} at most")
        return found >= value

    def wait(
        self,
        ready: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        what: object,
        deadline: Deadline,
        all_needed: bool = True,
    ) -> None:
        """Wait until ``ready()``, without keeping a core busy for longer than a moment.

        Args:
            awaited: the ranks that it takes and that have not done their part.
            what: the operation, for error texts.
            all_needed: whether it takes all of them, or any.
        """
        start = time.monotonic()
        while True:
            os.sched_yield()  # lets go of the interpreter lock too
            if ready():
                return
            if time.monotonic() - start > self.yield_s:
                break
        check_at, look_at = start, start + _STALL_S
        while not ready():
            now = time.monotonic()
            if self.words[BROKEN]:
                # A peer that broke it afterwards may have done its part before.
                if ready():
                    return
                raise self.failure(what)
            if now >= check_at:
                check_at = now + _CHECK_PEERS_S
                self._check_peers(ready, awaited, what, all_needed, deadline)
            if now >= look_at:
                look_at = now + _STALL_S
                look(deadline)
            if deadline.expired:
                self._late(awaited(), what, deadline)
            nap = min((now - start) * _NAP_SHARE, _NAP_LAST_S)
            self._nap(deadline.at_most(nap), ready)

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
        """Raise why one of ``ranks`` is gone, if that turns out in a moment.

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
                # It may have left between the two looks.
                state = self.words[(1 + rank) * LINE + _STATE]
                gone[rank] = _GONE.get(state, f"(pid {self.pid(rank)}) has died")
        if not gone or not (all_needed or len(gone) == len(ranks)) or ready():
            return
        # ready() may have taken what they left behind: then they have done their part.
        still = awaited()
        gone = {rank: fate for rank, fate in gone.items() if rank in still}
        if not gone:
            return
        # It may have left after an error that it had in common with this rank.
        look(deadline)
        self.refuse_broken(what)
        text = "; ".join(
            f"rank {rank} {fate} (its last call: {self.last_call(rank)})"
            for rank, fate in gone.items()
        )
        lost = tuple(gone)
        raise self.broken_by(Failure("lost", self.rank, text, lost), what)

    def _late(self, awaited: Sequence[int], what: object, deadline: Deadline) -> None:
        known = "; ".join(f"rank {r} last did {self.last_call(r)}" for r in awaited)
        missing = f"rank {', '.join(map(str, awaited))}: {known}"
        raise self.broken_by(Failure.timed_out(self.rank, deadline.seconds, missing, awaited), what)

    # -- what happened ----------------------------------------------------------------------

    def note(self, request: Request) -> int:
        """Describe a call for peers that wonder what this rank did last, and return its number.

        The last :data:`CALLS` descriptions are kept.
        """
        words, notes = self.words, self._line + _NOTES
        known = self._noted.get(request)
        if known is not None and words[notes] - known < CALLS:
            return known
        number = words[notes] + 1
        at = self.layout.calls[self.rank] + number % CALLS * CALL_BYTES
        self.segment.map[at : at + CALL_BYTES] = _clip(str(request), CALL_BYTES).ljust(
            CALL_BYTES, b"\0"
        )
        words[notes] = number
        self._noted.pop(request, None)
        if len(self._noted) >= CALLS:
            del self._noted[next(iter(self._noted))]
        self._noted[request] = number
        return number

    def last_call(self, rank: int) -> str:
        """Return the last collective call of ``rank``, as text."""
        number = self.words[(1 + rank) * LINE + _NOTED]
        if not number:
            return "no collective call"
        at = self.layout.calls[rank] + number % CALLS * CALL_BYTES
        return self.segment.map[at : at + CALL_BYTES].rstrip(b"\0").decode(errors="replace")

    def fail(self, failure: Failure) -> None:
        """Break the communicator for all ranks; the first failure of a rank counts."""
        words, line = self.words, self._line
        if not words[line + _FAILED_AT]:
            head = json.dumps([failure.kind, failure.rank, failure.ranks]).encode() + b"\n"
            text = failure.text.encode(errors="backslashreplace")
            room = FAILURE_BYTES - len(head)
            if len(text) > room:  # the end of a traceback tells most
                text = b"..." + text[3 - room :]
            raw = head + text
            at = self.layout.failures[self.rank]
            self.segment.map[at : at + len(raw)] = raw
            words[line + _FAILURE_LENGTH] = len(raw)
            fence()
            # After text and length, which failure() reads as soon as this is not 0. All processes
            # of the host have one clock, so that failure() finds the earliest cause.
            words[line + _FAILED_AT] = time.monotonic_ns()
        fence()
        # Last: whoever sees it looks for a cause, and there has to be one.
        words[BROKEN] = 1
        self._wake()

    def refuse(self, rank: int, what: str) -> NoReturn:
        """Break the communicator, as ``rank`` has written to shared memory what no rank writes.

        Raises:
            BackendError: always.
        """
        self.refuse_damaged(f"rank {rank}'s words in shared memory are damaged: {what}")

    def refuse_damaged(self, text: str) -> NoReturn:
        """Break the communicator, as shared memory is damaged.

        Raises:
            BackendError: always.
        """
        self.fail(Failure("aborted", self.rank, text))
        raise BackendError(
            f"shm: {text} [rank {self.rank}]. That rank has another version of this package, or "
            "something writes to memory that is not its own.",
            "shm",
        )

    def refuse_broken(self, what: object) -> None:
        """Raise if the communicator is broken."""
        if self.words[BROKEN]:
            raise self.failure(what)

    def unanimous(self, mine: bool, deadline: Deadline) -> bool:
        """Return whether all ranks say yes; every rank hears the same."""
        return all(vote == b"\1" for vote in self.exchange(b"\1" if mine else b"\0", deadline))

    def broken_by(self, failure: Failure, what: object) -> Exception:
        """Break the communicator, and return what to raise: a peer may have come before.

        One that heard of a rank's death first may be gone by the time that this rank looks,
        and is not what the program's user has to know of.
        """
        self.fail(failure)
        return self.failure(what)

    def failure(self, what: object) -> Exception:
        """Return what to raise now that the communicator is broken: the first cause."""
        words = self.words
        found: list[tuple[bool, int, Failure]] = []
        for rank in range(self.size):
            line = (1 + rank) * LINE
            if at := words[line + _FAILED_AT]:
                failure = self._failure_of(rank)
                # A rank whose own code raised is a cause; the others may be its echo.
                found.append((failure.kind != "failed", at, failure))
        if not found:
            text = "shared memory is damaged: it says that a rank has failed, and not which one"
            found.append((True, 0, Failure("aborted", self.rank, text)))
        return min(found, key=lambda cause: cause[:2])[2].error(str(what), self.rank)

    def _failure_of(self, rank: int) -> Failure:
        """Return why ``rank`` has broken the communicator."""
        where, length = self.layout.failures[rank], self.words[(1 + rank) * LINE + _FAILURE_LENGTH]
        raw = self.segment.map[where : where + min(max(length, 0), FAILURE_BYTES)]
        head, _, text = raw.partition(b"\n")
        try:
            kind, reporter, ranks = json.loads(head)
            known = str(kind), int(reporter), text.decode(errors="ignore"), tuple(map(int, ranks))
            return Failure(*known)
        except (TypeError, ValueError):
            return Failure("aborted", rank, f"rank {rank} has failed, and its report is damaged")


def _drop(segment: Segment, state: int, owner: int) -> None:
    """Tell the peers that a rank has lost its communicator and lives on; a child tells nothing."""
    words = memoryview(segment.map).cast("q")
    if os.getpid() == owner and words[state] == _JOINED:
        words[state] = _DROPPED


def _clip(text: str, nbytes: int) -> bytes:
    raw = text.encode()
    return (
        raw if len(raw) <= nbytes else raw[: nbytes - 3].decode(errors="ignore").encode() + b"..."
    )
