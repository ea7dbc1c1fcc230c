"""What becomes of operations after they were enqueued: their deadlines, their peers, their errors.

A call on a GPU's memory returns when NCCL has put it on a stream. Whether it ends there is
found out here, by a thread for each transport that sleeps while nothing is under way: it looks
at an event behind each operation, asks NCCL for errors and the monitor for the peers, and has
the ranks' calls compared where one stalls. It does the same for calls that NCCL does not return
from. When something is wrong it breaks the communicator for all ranks and aborts NCCL's
communicators, so that kernels that spin come to their end and the program's streams go on.
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
    from collective.backends.peers.channel import Channel, Wait
    from collective.cuda import Event, Stream

    from .engine import NcclComm

__all__ = ["Asked", "Batch", "Pending", "Watch", "failure_of"]

# Looks at what is under way: soon at first, then rarely.
_FIRST_S, _GROWTH, _LAST_S = 1e-3, 1.5, 50e-3
# How long the thread goes on looking when nothing is under way, before it has to be woken:
# a training loop that comes back within that time does not pay for a wake-up a step.
_LINGER_S = 1.0
# How long communicators may take to end well, or to be aborted.
_END_S = 2.0


class Asked(NamedTuple):
    """What was asked for.

    Attributes:
        where: the call, for errors.
        deadline: the call's.
        awaited: the ranks that it takes; None for all.
        sequence: a collective call's number; None for a message.
    """

    where: object
    deadline: Deadline
    awaited: Sequence[int] | None
    sequence: int | None


class Pending(NamedTuple):
    """One operation on its way.

    Attributes:
        event: behind it.
        stream: that it is on; kept, so that no other gets its handle.
    """

    event: Event
    stream: Stream
    asked: Asked


class Watch:
    """Looks after the operations and the NCCL communicators of one transport.

    An operation is put into :attr:`inside` first, the thread woken if it is :attr:`asleep`,
    the operation enqueued, then given to :attr:`add` and taken out of :attr:`inside`, in this
    order: so it is under somebody's eyes all the time.

    Attributes:
        inside: what is being enqueued, by whatever makes one call at a time; None for nothing.
        add: take an operation into care. Of one stream's operations the first comes first.
        asleep: whether :meth:`wake` has to be called.
        over: whether the transport is closed or broken, and so its communicators are gone.
        chores: called now and then while the thread is awake; return whether to stay so.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._new: deque[Pending] = deque()
        self.add = self._new.append
        self.inside: dict[object, Asked | None] = {}
        self.asleep = True
        self.chores: list[Callable[[], bool]] = []
        self._pending: dict[int, deque[Pending]] = {}
        # Appended to by any thread, taken from by one that has the lock.
        self._kept: deque[tuple[Event, object]] = deque()
        # How those that are looked at are waited for, by the stream or by who is inside.
        self._waits: dict[object, tuple[Asked, Wait]] = {}
        # Guards what is under way; never held while something waits.
        self._lock = threading.Lock()
        self._comms: list[NcclComm] = []
        self._signal = threading.Event()
        self._thread: threading.Thread | None = None
        self.over = False
        channel.unfinished = self.unfinished
        channel.on_failure.append(self.wake)

    # -- communicators --------------------------------------------------------------------

    def adopt(self, comm: NcclComm) -> NcclComm:
        """Take a communicator into care: it ends with the transport.

        Raises:
            CommunicatorAbortedError, …: the transport is broken; ``comm`` has been aborted.
        """
        # Under the lock, as _break() takes them: either that finds this one, or this finds the
        # transport broken.
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
        """Have the thread look now."""
        self.asleep = False
        self._signal.set()

    # -- operations -----------------------------------------------------------------------

    def unfinished(self) -> int | None:
        """Return the number of the oldest collective call that is under way, or None."""
        with self._lock:
            with contextlib.suppress(CollectiveError):  # the thread meets it as well
                self._sweep()
            numbers = [
                one.asked.sequence
                for queue in self._pending.values()
                for one in queue
                if one.asked.sequence is not None
            ]
        return min(numbers, default=None)

    def keep(self, event: Event, things: object) -> None:
        """Keep a reference until ``event`` has come, or the transport is over."""
        self._kept.append((event, things))
        if self.asleep:
            self.wake()

    def _sweep(self) -> None:
        """Let go of the operations that are over. The lock is held."""
        new, pending = self._new, self._pending
        while new:
            one = new.popleft()
            pending.setdefault(one.stream.handle, deque()).append(one)
        for stream, queue in list(pending.items()):
            # They end in order, so that mostly one question does.
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
        """Let go of all operations: they were broken off."""
        with self._lock:
            while self._new:
                self._new.popleft().event.release()
            for queue in self._pending.values():
                for one in queue:
                    one.event.release()
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
                # What came before the flag could be seen has nobody to wake this thread.
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
        """Look once at everything; return whether something is under way."""
        try:
            with self._lock:
                self._sweep()
                queues = {
                    stream: [one.asked for one in queue] for stream, queue in self._pending.items()
                }
                comms = list(self._comms)
            for comm in comms:
                # While a call is inside a library that blocks, nobody can ask.
                text = comm.async_error(wait=False)
                if text is not None:
                    raise BackendError(f"nccl: {text}", backend="nccl")
            inside = {who: [asked] for who, asked in list(self.inside.items()) if asked}
            for key, asked in (*queues.items(), *inside.items()):
                self._wait_for(key, asked)
            left = sum(chore() for chore in self.chores)
            return bool(left or queues or inside or self._kept)
        except Exception as error:  # whatever it is, the peers must not wait for this rank
            self._fail(error)
            return True

    def _wait_for(self, key: object, queue: Sequence[Asked]) -> None:
        """Raise if operations that come one after the other have to be given up."""
        # Behind the first there may be one with a shorter deadline.
        asked = next((behind for behind in queue if behind.deadline.expired), queue[0])
        kept = self._waits.get(key)
        if kept is None or kept[0] is not asked:
            wait = self._channel.wait(
                asked.where, asked.deadline, asked.awaited, sequence=asked.sequence
            )
            kept = self._waits[key] = asked, wait
        kept[1].check()

    # -- the end --------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        """Break the communicator for all ranks, unless that is what the error tells."""
        channel = self._channel
        if channel.failure is not None:
            return
        found = error
        if isinstance(error, BackendError):
            with self._lock:
                oldest = [queue[0] for queue in self._pending.values()]
            where: object = oldest[0].asked.where if oldest else "nccl"
            # NCCL notices the end of a connection before the monitor knows why, and some of
            # the calls that do not go together.
            channel.compare()
            found = channel.explain(where, error)
        if channel.failure is None:
            channel.abort(failure_of(found, channel.rank))

    def _break(self) -> None:
        """Abort NCCL's communicators, all at once: one may wait for the kernels of another."""
        with self._lock:
            self.over = True
            comms, self._comms = self._comms, []
        threads = [
            threading.Thread(target=_abort, args=(comm,), name="collective-nccl-abort", daemon=True)
            for comm in comms
        ]
        for thread in threads:
            thread.start()
        # One that hangs in the driver is left to itself: what the program waits for is an error.
        deadline = Deadline(_END_S)
        for thread in threads:
            thread.join(deadline.left())
        self._forget()

    def drain(self, deadline: Deadline) -> None:
        """Wait until nothing is under way, or until ``deadline``, unless it is broken."""
        while self._channel.failure is None and not deadline.expired:
            with contextlib.suppress(CollectiveError), self._lock:
                self._sweep()
                if not self._pending:
                    return
            time.sleep(_FIRST_S)

    def close(self) -> None:
        """End the thread and the communicators, well or, if that takes long, not so well."""
        with self._lock:
            self.over = True
            thread, busy = self._thread, bool(self._pending or self._new)
            comms, self._comms = self._comms, []
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(2 * _END_S)
        # What is still under way has had its time (drain()): it will not end well.
        broken = busy or self._channel.failure is not None
        deadline = Deadline(0.0 if broken else _END_S)
        for comm in comms:
            _end(comm, deadline)
        self._forget()


class Batch:
    """Calls that NCCL takes as one (``ncclGroupStart``, ``ncclGroupEnd``).

    Attributes:
        asked: the first of them, None before it.
    """

    def __init__(self, watch: Watch) -> None:
        self.asked: Asked | None = None
        self._watch = watch
        self._comm: NcclComm | None = None
        self._last: dict[int, tuple[Stream, Asked]] = {}

    def add(self, comm: NcclComm | None, asked: Asked, stream: Stream) -> None:
        """Take note of a call that is about to be made."""
        if self._comm is None:
            assert comm is not None
            self.asked = self._watch.inside[0] = asked
            if self._watch.asleep:
                self._watch.wake()
            comm.group_start()
            self._comm = comm
        self._last[stream.handle] = stream, asked

    def end(self, settle: Callable[[Asked], None] | None = None) -> None:
        """Have NCCL enqueue the calls; look after them, unless they are lost."""
        assert self._comm is not None
        assert self.asked is not None
        watch = self._watch
        try:
            pending = self._comm.group_end()
            if settle is not None:
                if pending:
                    settle(self.asked)
                for stream, asked in self._last.values():
                    watch.add(Pending(stream.record(), stream, asked))
        finally:
            watch.inside[0] = None


def _abort(comm: NcclComm) -> None:
    with contextlib.suppress(CollectiveError):  # it is broken anyway
        comm.abort()


def _end(comm: NcclComm, deadline: Deadline) -> None:
    """Let NCCL send what is still on its way to the network, and end the communicator."""

    def poll() -> None:
        if deadline.expired:
            raise TimeoutError

    # A rank that waits for this one is told so by the monitor.
    with contextlib.suppress(BackendError, CommunicatorAbortedError, TimeoutError):
        if not deadline.expired:
            comm.destroy(poll)
    _abort(comm)


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return what the other ranks are told of an error that this rank has met."""
    if isinstance(error, PeerLostError):
        return Failure("lost", rank, str(error), error.ranks)
    return Failure("aborted", rank, f"rank {rank}: {type(error).__name__}: {error}")
