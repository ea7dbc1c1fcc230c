"""Watching of enqueued operations: their deadlines, their peers and their errors.

A call on a GPU's memory returns when NCCL has enqueued the operation on a stream. A thread for each
transport finds out whether the operation completes; the thread sleeps while nothing is in flight.
It polls an event behind each operation, asks NCCL for errors, and asks the monitor about the peers.
If an operation stalls, the thread has the ranks' calls compared. The thread also watches calls that
have not returned from NCCL.

On an error the thread breaks the communicator for all ranks and aborts NCCL's communicators. Then
spinning kernels end, and the program's streams continue.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from collective.contract.failure import Failure
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveError,
    CommunicatorAbortedError,
    PeerLostError,
)

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.backends.peers.wait import Wait
    from collective.cuda import Event, Stream

    from .engine import NcclComm

# Seconds between two polls of the operations in flight: short at first, then growing.
_FIRST_S, _GROWTH, _LAST_S = 1e-3, 1.5, 50e-3
# Seconds for which the thread keeps polling when nothing is in flight, before it sleeps until
# woken. A training loop that makes its next call within that time pays for no wake-up per step.
_LINGER_S = 1.0
# Seconds that communicators may take to be destroyed or aborted.
_END_S = 2.0


class Asked(NamedTuple):
    """Call that the program has made.

    Attributes:
        where: the call, for errors.
        deadline: deadline of the call.
        awaited: the ranks that the call depends on; None for all ranks.
        sequence: number of a collective call; None for a message.
    """

    where: object
    deadline: Deadline
    awaited: Sequence[int] | None
    sequence: int | None


class Pending(NamedTuple):
    """Operation in flight.

    Attributes:
        event: event recorded behind the operation.
        stream: stream of the operation. The reference keeps a new stream from getting its handle.
        asked: the call of the operation.
    """

    event: Event
    stream: Stream
    asked: Asked


class Watch:
    """Watch over the operations and the NCCL communicators of one transport.

    The transport first puts a call into :attr:`inside` and wakes the thread if it is
    :attr:`asleep`. Then it enqueues the operation, passes it to :attr:`add`, and at last removes
    the call from :attr:`inside`. In this order, the operation is watched all the time.

    Attributes:
        inside: the calls that are being enqueued, by caller. A caller is any object that makes one
            call at a time; the value is None while it makes no call.
        add: function that starts watching an operation. Add a stream's operations in the order in
            which they were enqueued.
        asleep: whether the thread sleeps until :meth:`wake`.
        over: whether the transport is closed or broken, and so its communicators are gone.
        chores: functions called regularly while the thread is awake; each returns whether the
            thread should stay awake.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._new: deque[Pending] = deque()
        self.add = self._new.append
        self.inside: dict[object, Asked | None] = {}
        self.asleep = True
        self.chores: list[Callable[[], bool]] = []
        self._pending: dict[int, deque[Pending]] = {}
        # Any thread appends to it; only a thread that holds the lock removes items.
        self._kept: deque[tuple[Event, object]] = deque()
        # The watched calls and their waits, by stream or by the caller in ``inside``.
        self._waits: dict[object, tuple[Asked, Wait]] = {}
        # Guards the operations in flight. A thread that holds the lock never waits for anything.
        self._lock = threading.Lock()
        self._comms: list[NcclComm] = []
        self._signal = threading.Event()
        self._thread: threading.Thread | None = None
        self.over = False
        channel.unfinished = self.unfinished
        channel.on_failure.append(self.wake)

    # -- communicators --------------------------------------------------------------------

    def adopt(self, comm: NcclComm) -> NcclComm:
        """Watch a communicator from now on, and end it with the transport; return it.

        Raises:
            CommunicatorAbortedError, …: the transport is broken; ``comm`` has been aborted.
        """
        # _break() takes the communicators under the same lock. So either _break() finds this
        # communicator, or this method finds the transport broken.
        with self._lock:
            if self._channel.failure is None and not self.over:
                self._comms.append(comm)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="collective-nccl-watch", daemon=True
                    )
                    self._thread.start()
                return comm
        comm.abort()
        self._channel.check("nccl")
        raise BackendError("nccl: the transport is closed.", backend="nccl")

    def wake(self) -> None:
        """Make the thread poll now."""
        self.asleep = False
        self._signal.set()

    # -- operations -----------------------------------------------------------------------

    def unfinished(self) -> int | None:
        """Return the number of the oldest collective call in flight, or None."""
        with self._lock:
            with contextlib.suppress(CollectiveError):  # the thread gets the same error
                self._sweep()
            numbers = [
                operation.asked.sequence
                for queue in self._pending.values()
                for operation in queue
                if operation.asked.sequence is not None
            ]
        return min(numbers, default=None)

    def keep(self, event: Event, things: object) -> None:
        """Keep a reference to ``things`` until ``event`` is complete or the transport is over."""
        self._kept.append((event, things))
        if self.asleep:
            self.wake()

    def _sweep(self) -> None:
        """Drop the operations that have completed. The caller holds the lock."""
        new, pending = self._new, self._pending
        while new:
            operation = new.popleft()
            pending.setdefault(operation.stream.handle, deque()).append(operation)
        for stream, queue in list(pending.items()):
            # A stream's operations complete in order, so one query is mostly enough.
            all_over = queue[-1].event.query()
            while queue and (all_over or queue[0].event.query()):
                queue.popleft().event.release()
            if not queue:
                del pending[stream]
                self._waits.pop(stream, None)
        kept = self._kept
        for _ in range(len(kept)):
            if kept[0][0].query():
                kept.popleft()
            else:
                kept.rotate(-1)

    def _forget(self) -> None:
        """Drop all operations: they were broken off."""
        with self._lock:
            while self._new:
                self._new.popleft().event.release()
            for queue in self._pending.values():
                for operation in queue:
                    operation.event.release()
            self._pending.clear()
            self._waits.clear()
            self._kept.clear()

    # -- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        pause, idle_since = _FIRST_S, time.monotonic()
        while not self.over:
            if self._channel.failure is not None:
                self._break()
                return
            self._signal.clear()
            busy = self._look()
            now = time.monotonic()
            if busy:
                idle_since = now
            if now - idle_since > _LINGER_S:
                self.asleep = True
                # A thread that added something before it could see the flag does not wake this one.
                # So look once more before sleeping.
                if not self._anything():
                    self._signal.wait()
                self.asleep = False
                pause, idle_since = _FIRST_S, time.monotonic()
            else:
                self._signal.wait(pause)
                pause = min(_GROWTH * pause, _LAST_S)

    def _anything(self) -> bool:
        return bool(self._new or self._kept) or any(list(self.inside.values()))

    def _look(self) -> bool:
        """Check everything once; return whether anything is in flight."""
        try:
            with self._lock:
                self._sweep()
                queues = {
                    stream: [operation.asked for operation in queue]
                    for stream, queue in self._pending.items()
                }
                comms = list(self._comms)
            for comm in comms:
                # While a call blocks inside NCCL, no thread can ask for its errors, so do not wait.
                text = comm.async_error(wait=False)
                if text is not None:
                    raise BackendError(f"nccl: {text}", backend="nccl")
            inside = {who: [asked] for who, asked in list(self.inside.items()) if asked}
            for key, asked in (*queues.items(), *inside.items()):
                self._wait_for(key, asked)
            left = sum(chore() for chore in self.chores)
            return bool(left or queues or inside or self._kept)
        except Exception as error:  # any error: the peers must not wait for this rank
            self._fail(error)
            return True

    def _wait_for(self, key: object, queue: Sequence[Asked]) -> None:
        """Raise if the operations of a queue have failed or are late.

        Args:
            key: the stream of the queue, or the caller in ``inside``.
            queue: the calls of the operations, in order.
        """
        # A later operation may have a shorter deadline than the first one.
        asked = next((call for call in queue if call.deadline.expired), queue[0])
        watched = self._waits.get(key)
        if watched is None or watched[0] is not asked:
            wait = self._channel.wait(
                asked.where, asked.deadline, asked.awaited, sequence=asked.sequence
            )
            watched = self._waits[key] = asked, wait
        watched[1].check()

    # -- the end --------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Break the communicator for all ranks, unless it is broken already."""
        channel = self._channel
        if channel.failure is not None:
            return
        cause = error
        if isinstance(error, BackendError):
            with self._lock:
                oldest = [queue[0] for queue in self._pending.values()]
            where: object = oldest[0].asked.where if oldest else "nccl"
            # NCCL notices the end of a connection before the monitor knows the reason. NCCL also
            # notices some calls that do not match, so have the calls compared.
            channel.compare()
            cause = channel.explain(where, error)
        if channel.failure is None:
            channel.abort(failure_of(cause, channel.rank))

    def _break(self) -> None:
        """Abort NCCL's communicators, all at once: one abort may wait for another one's kernels."""
        with self._lock:
            self.over = True
            comms, self._comms = self._comms, []
        threads = [
            threading.Thread(target=_abort, args=(comm,), name="collective-nccl-abort", daemon=True)
            for comm in comms
        ]
        for thread in threads:
            thread.start()
        # An abort that hangs in the driver stays behind, because the program waits for its error.
        deadline = Deadline(_END_S)
        for thread in threads:
            thread.join(deadline.left())
        self._forget()

    def drain(self, deadline: Deadline) -> None:
        """Wait until nothing is in flight, the deadline has passed, or the transport is broken."""
        while self._channel.failure is None and not deadline.expired:
            with contextlib.suppress(CollectiveError), self._lock:
                self._sweep()
                if not self._pending:
                    return
            time.sleep(_FIRST_S)

    def close(self) -> None:
        """End the thread and the communicators; abort a communicator that takes too long."""
        with self._lock:
            self.over = True
            thread, busy = self._thread, bool(self._pending or self._new)
            comms, self._comms = self._comms, []
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * _END_S)
        # drain() has given the operations their time, so an operation that is still in flight will
        # not complete.
        broken = busy or self._channel.failure is not None
        deadline = Deadline(0.0 if broken else _END_S)
        for comm in comms:
            _end(comm, deadline)
        self._forget()


class Batch:
    """Group of calls that NCCL takes as one (``ncclGroupStart``, ``ncclGroupEnd``).

    Attributes:
        asked: the first call of the group; None before it.
    """

    def __init__(self, watch: Watch) -> None:
        self.asked: Asked | None = None
        self._watch = watch
        self._comm: NcclComm | None = None
        self._last: dict[int, tuple[Stream, Asked]] = {}

    def add(self, comm: NcclComm | None, asked: Asked, stream: Stream) -> None:
        """Record a call that is about to be made; begin the group if it is the first one."""
        if self._comm is None:
            assert comm is not None
            self.asked = self._watch.inside[0] = asked
            if self._watch.asleep:
                self._watch.wake()
            comm.group_start()
            self._comm = comm
        self._last[stream.handle] = stream, asked

    def end(self, watched: bool = False) -> None:
        """End the group, so that NCCL enqueues the calls.

        Args:
            watched: whether to watch the calls. If the communicator is broken, nobody needs that.
        """
        assert self._comm is not None
        watch = self._watch
        try:
            self._comm.group_end()
            if watched:
                for stream, asked in self._last.values():
                    watch.add(Pending(stream.record(), stream, asked))
        finally:
            watch.inside[0] = None


def _abort(comm: NcclComm) -> None:
    with contextlib.suppress(CollectiveError):  # it is broken anyway
        comm.abort()


def _end(comm: NcclComm, deadline: Deadline) -> None:
    """Let NCCL send its outstanding data to the network, and end the communicator."""

    def poll() -> None:
        if deadline.expired:
            raise TimeoutError

    # Errors do not matter here: the monitor informs a rank that waits for this one.
    with contextlib.suppress(BackendError, CommunicatorAbortedError, TimeoutError):
        if not deadline.expired:
            comm.destroy(poll)
    _abort(comm)


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return the failure that the other ranks get for an error of this rank."""
    if isinstance(error, PeerLostError):
        return Failure("lost", rank, str(error), error.ranks)
    return Failure("aborted", rank, f"rank {rank}: {type(error).__name__}: {error}")
