"""Transport between ranks that are threads of one process.

It is for tests, for notebooks, and for programs with one replica per device. There are no
unnecessary copies: ranks read each other's arrays in place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from collective.algorithms.messages import sendrecv
from collective.backends.inbox import StreamLock
from collective.backends.mail import PythonMail
from collective.backends.matching import Matcher, Waiter, awaited, describe
from collective.backends.onesided import OneSided, Region
from collective.contract.backend import ANY_SOURCE, Capabilities
from collective.contract.failure import Failure
from collective.contract.mail import EAGER_BYTES, PAYLOAD_TAG, progress_all
from collective.contract.waits import (
    CLOSED,
    DROPPED,
    NO_CALL,
    Caller,
    MessageCall,
    Waiting,
    caller,
    departed,
    explain,
    last_done,
)
from collective.errors import PeerLostError, RendezvousError
from collective.memory.buffer import Buffer
from collective.native import NOBODY
from collective.request import Disagreement, Request

if TYPE_CHECKING:
    from collective.contract.world import World
    from collective.deadline import Deadline

Array = np.ndarray[Any, Any]

# The hubs in which the threads of a world meet, by job; connect() removes its hub when it ends.
_hubs: dict[str, _SharedState] = {}
_hubs_lock = threading.Lock()
# Seconds between two checks for events that wake no waiting thread: in a call, and in connect().
_LOOK_S, _MEET_S = 0.5, 0.02
# Number of messages in one box up to which short ones are copied, 64 MiB at most. Beyond it, a send
# waits for its receiver.
_COPIES = 1024


class _SharedState:
    """State that the ranks of one communicator share; ``condition`` guards all of it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.token = secrets.token_hex(8)
        self.condition = threading.Condition()
        self.arrived = [0] * size  # number of steps that each rank has made
        self.gone = [""] * size  # reason for which a rank makes no more calls
        self.last: list[Request | None] = [None] * size
        # Each rank's digest of its call, in one list for even steps and one for odd steps. A fast
        # rank may open its next operation while a slow rank still reads this operation's digests.
        self.digests = [[0] * size, [0] * size]
        self.headers: list[bytes] = [b""] * size
        self.sources: list[Array | None] = [None] * size
        self.outputs: list[Array | None] = [None] * size
        self.failure: Failure | None = None
        # The calls in which each rank waits: the call, who makes it, and whom it waits for.
        self.waits: list[list[tuple[object, Caller, Callable[[], Sequence[int]]]]] = [
            [] for _ in range(size)
        ]
        # Messages to a rank from another one, in order.
        self.mail: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self.groups: dict[tuple[tuple[int, ...], int], _SharedState] = {}
        self.joined: set[int] = set()

    def tell(self) -> None:
        """Wake the ranks that wait."""
        with self.condition:
            self.condition.notify_all()


class _Message:
    """A message on its way, which is its own prefix."""

    __slots__ = ("array", "nbytes", "tag", "taken")

    def __init__(self, array: Array, tag: int) -> None:
        self.array = array
        self.nbytes = array.nbytes
        self.tag = tag
        self.taken = False


class _Box:
    """Messages to and from one rank, as a :class:`~collective.backends.inbox.Carrier`.

    The receiver copies a long message directly from the sender's array.
    """

    def __init__(self, hub: _SharedState, rank: int, peer: int) -> None:
        self._hub = hub
        self._rank, self._peer = rank, peer
        self._outgoing, self._incoming = hub.mail[peer, rank], hub.mail[rank, peer]
        self.receiving = StreamLock()

    def write(self, content: Array, tag: int) -> Iterator[None]:
        """Send a message; yield until a long one has been received."""
        box = self._outgoing
        short = content.nbytes <= EAGER_BYTES and len(box) < _COPIES
        message = _Message(content.copy() if short else content, tag)
        box.append(message)
        self._hub.tell()
        try:
            while not (short or message.taken):
                yield
        finally:
            if not (short or message.taken):
                with contextlib.suppress(ValueError):  # the receiver is copying it
                    box.remove(message)

    def prefix(self) -> _Message | None:
        """Return the next message, which stays there; None if there is none."""
        return self._incoming[0] if self._incoming else None

    def read(self, prefix: _Message, out: Array) -> Iterator[None]:
        """Take a message out of the box."""
        self._incoming.popleft()
        out[:] = prefix.array
        # If the communicator broke meanwhile, the sender may have given up and written to its
        # array.
        failure = self._hub.failure
        if failure is not None:
            raise failure.error(f"recv(tag={prefix.tag})", self._rank)
        prefix.taken = True
        self._hub.tell()
        return iter(())

    def spoil(self) -> None:
        """Do nothing: the communicator is broken."""

    def refuse(self, what: str) -> NoReturn:
        """Break the communicator, since a receive expects another length."""
        text = f"rank {self._peer}'s message to rank {self._rank}: {what}"
        failure = Failure("aborted", self._rank, text)
        with self._hub.condition:
            self._hub.failure = self._hub.failure or failure
            self._hub.tell()
        raise failure.error("recv", self._rank)


class ThreadsBackend(OneSided):
    """Transport between threads of this process; see the module's docstring."""

    name = "threads"
    payload_tag = PAYLOAD_TAG
    capabilities = Capabilities(
        in_process=True,
        checks_calls=True,
        symmetric_memory=True,
        any_source=True,
        posts=True,
        detects_lost_peers=True,
        shrinks=True,
        grows=True,
    )

    def __init__(self, hub: _SharedState, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self.meeting = hub.token
        self._hub = hub
        self._steps = 0
        self._made: dict[tuple[int, ...], int] = {}
        weakref.finalize(self, _drop, hub, rank, os.getpid()).atexit = False

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Wait for the other threads of ``world.job``; see :meth:`Backend.connect`."""
        with _hubs_lock:
            hub = _hubs.setdefault(world.job, _SharedState(world.size))
        self = cls(hub, world.rank)
        with hub.condition:
            hub.joined.add(world.rank)
            hub.condition.notify_all()
            try:
                while (missing := set(range(hub.size)) - hub.joined) and not deadline.expired:
                    hub.condition.wait(deadline.at_most(_MEET_S))
                    world.store.check()
            except BaseException:
                hub.joined.discard(world.rank)  # no other thread may believe that all are here
                raise
            finally:
                # Whether all ranks have arrived or not, a later thread meets in another hub.
                with _hubs_lock:
                    if _hubs.get(world.job) is hub:
                        del _hubs[world.job]
        if missing:
            raise RendezvousError(
                f"threads: after {deadline.seconds:g} s ranks {sorted(missing)} of {hub.size} have "
                f"not arrived [rank {world.rank}]. Every rank is a thread of one process; for "
                "processes use backend='shm'."
            )
        return self

    # -- point to point -----------------------------------------------------------------

    @functools.cached_property
    def _engine(self) -> Matcher:
        hub, rank = self._hub, self.rank
        others = (peer for peer in range(hub.size) if peer != rank)
        return Matcher({peer: _Box(hub, rank, peer) for peer in others}, hub.tell, rank)

    @functools.cached_property
    def mail(self) -> PythonMail:  # type: ignore[override]  # an attribute elsewhere
        """Posted messages of this rank; most communicators have none."""
        hub, rank = self._hub, self.rank
        # The mail belongs to this object, and must not refer to it.
        backend = weakref.proxy(self)

        def wait(waiter: Waiter, to: int, source: int, tag: int, deadline: Deadline) -> None:
            backend._wait_for_mail(waiter, to, source, describe(to, source, tag), deadline)

        return PythonMail(
            self._engine, wait, lambda where: backend.refuse_all(where),
            lambda: hub.failure or hub.gone[rank], lambda posted: posted.error,
        )  # fmt: skip

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._move(describe(dst, NOBODY, tag), src, None, dst, NOBODY, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        return self._move(describe(NOBODY, src, tag), None, dst, NOBODY, src, tag, deadline)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        if self.rank in (to, source):
            sendrecv(self, src, to, dst, source, tag, deadline)
        else:
            self._move(describe(to, source, tag), src, dst, to, source, tag, deadline)

    def _move(
        self, call: MessageCall, src: Buffer | None, dst: Buffer | None, to: int, source: int,
        tag: int, deadline: Deadline,
    ) -> int:  # fmt: skip
        self.refuse_broken(call)
        x, out = (None if each is None else each.array.view(np.uint8) for each in (src, dst))
        exchange = self._engine.exchange(x, to, out, source, tag)
        try:
            self._wait_for_mail(exchange, to, source, call, deadline)
        except BaseException:
            exchange.give_up()
            raise
        return exchange.sender

    def _wait_for_mail(
        self, waiter: Waiter, to: int, source: int, call: object, deadline: Deadline
    ) -> None:
        """Wait for posted messages."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        if waiter.advance():
            with self._hub.condition:
                self._wait(
                    lambda: not waiter.advance(),
                    lambda: awaited(waiter.pending, to, source, peers),
                    call,
                    deadline,
                    all_needed=source != ANY_SOURCE,
                )

    # -- primitives of the collectives ----------------------------------------------------

    def _open(
        self,
        request: Request,
        src: Array | None,
        dst: Array | None,
        largest: int,
        deadline: Deadline,
    ) -> bool:
        hub, rank = self._hub, self.rank
        with hub.condition:
            hub.sources[rank] = src
            hub.outputs[rank] = dst
            hub.last[rank] = request
            digests = hub.digests[self._steps & 1]
            digests[rank] = request.digest
            self._step(deadline, request)
        if digests.count(request.digest) != self.size:
            with hub.condition:
                hub.headers[rank] = request.header()
                self._step(deadline, request)
                headers = list(hub.headers)
                self._step(deadline, request)
            raise Disagreement(headers)
        return False

    def _sync(self, deadline: Deadline) -> None:
        with self._hub.condition:
            self._step(deadline, self._hub.last[self.rank])

    def _step(self, deadline: Deadline, request: Request | None) -> None:
        hub = self._hub
        # Check for a failure before this rank arrives. Until it arrives, no other rank can have
        # completed the operation. But a rank that has failed since the last step has left the
        # operation, and its arrays may be in use again.
        self.refuse_broken(request)
        self._steps = step = self._steps + 1
        hub.arrived[self.rank] = step
        if min(hub.arrived) >= step:
            hub.condition.notify_all()
        arrived = hub.arrived
        self._wait(
            lambda: min(arrived) >= step,
            lambda: [r for r in range(self.size) if arrived[r] < step],
            request,
            deadline,
        )

    def _region(self, rank: int, dtype: np.dtype[Any], count: int) -> Region:
        return Region(self._exposed(self._hub.sources, rank)[:count])

    def _results(self, rank: int, dtype: np.dtype[Any], count: int) -> Region:
        return Region(self._exposed(self._hub.outputs, rank)[:count])

    def _outputs(self, dtype: np.dtype[Any], count: int) -> list[Array] | None:
        return [self._exposed(self._hub.outputs, rank) for rank in range(self.size)]

    def _exposed(self, arrays: Sequence[Array | None], rank: int) -> Array:
        """Return the array that ``rank`` exposes in the running call.

        Raises:
            CommunicatorAbortedError: the rank has failed in that call, and left.
            PeerLostError: the rank has closed its communicator.
        """
        array = arrays[rank]
        if array is not None:
            return array
        call, failure = self._hub.last[self.rank], self._hub.failure
        if failure is not None:
            raise failure.error(str(call), self.rank)
        raise PeerLostError(f"{call}: {self._left((rank,), call)} [rank {self.rank}]", (rank,))

    def empty(self, nbytes: int, request: Request, deadline: Deadline) -> Array:
        self.agree(request, deadline)
        return super().empty(nbytes, request, deadline)

    # -- failure, life --------------------------------------------------------------------

    def _wait(
        self,
        ready: Callable[[], bool],
        awaited: Callable[[], Sequence[int]],
        call: object,
        deadline: Deadline,
        all_needed: bool = True,
    ) -> None:
        """Wait until ``ready()`` is true; the caller holds the condition.

        Args:
            ready: returns whether the wait is over.
            awaited: returns the ranks that have not yet done their part.
            call: the operation, for errors.
            deadline: deadline of the operation.
            all_needed: whether the wait needs all of these ranks, or any one of them.
        """
        hub = self._hub
        waits, waiting = hub.waits[self.rank], (call, caller(), awaited)
        waits.append(waiting)
        try:
            while not ready():
                progress_all()
                self.refuse_broken(call)
                if hub.gone[self.rank]:
                    self.abort(Failure.closed(self.rank))
                    continue
                absent = awaited()
                left = tuple(r for r in absent if hub.gone[r])
                if left and (all_needed or len(left) == len(absent)):
                    self.abort(Failure("lost", self.rank, self._left(left, call), left))
                    continue
                if deadline.expired:
                    text, remedy = self._explained(absent)
                    self.abort(Failure.timed_out(self.rank, deadline.seconds, text, absent, remedy))
                    continue
                hub.condition.wait(deadline.at_most(_LOOK_S))
        finally:
            waits.remove(waiting)

    def _explained(self, absent: Sequence[int]) -> tuple[str, str]:
        """Return what this rank has waited for in vain, and the remedy."""
        hub = self._hub
        waits = {
            rank: [Waiting.of(call, who, awaited()) for call, who, awaited in running]
            for rank, running in enumerate(hub.waits)
        }
        last = [last_done(rank, str(call or NO_CALL)) for rank, call in enumerate(hub.last)]
        return explain(self.rank, absent, waits, last.__getitem__)

    def _left(self, ranks: Sequence[int], call: object) -> str:
        hub = self._hub
        return departed({r: (hub.gone[r], str(hub.last[r] or NO_CALL)) for r in ranks}, call)

    def refuse_broken(self, where: object) -> None:
        failure = self._hub.failure
        if failure is not None:
            raise failure.error(str(where), self.rank)

    def refuse_all(self, where: object) -> None:
        """Raise if the communicator is broken or closed."""
        self.refuse_broken(where)
        if self._hub.gone[self.rank]:
            raise Failure.closed(self.rank).error(str(where), self.rank)

    def lost(self) -> Set[int]:
        # A thread that has ended has closed its communicator or dropped it, which sets ``gone``.
        return {rank for rank, why in enumerate(self._hub.gone) if why and rank != self.rank}

    def abort(self, failure: Failure) -> None:
        hub = self._hub
        with hub.condition:
            if hub.failure is None:
                hub.failure = failure
            hub.condition.notify_all()

    def close(self) -> None:
        hub = self._hub
        with hub.condition:
            hub.gone[self.rank] = CLOSED
            if "mail" in self.__dict__:
                self.mail.close()
            hub.sources[self.rank] = hub.outputs[self.rank] = None
            hub.condition.notify_all()

    def group(self, ranks: Sequence[int], deadline: Deadline) -> ThreadsBackend:
        key = tuple(ranks)
        with self._hub.condition:
            self.refuse_broken("group")
            self._made[key] = nth = self._made.get(key, 0) + 1
            hub = self._hub.groups.setdefault((key, nth), _SharedState(len(key)))
            hub.joined.add(self.rank)
            if len(hub.joined) == len(key):
                del self._hub.groups[key, nth]
        return ThreadsBackend(hub, key.index(self.rank))


def _drop(hub: _SharedState, rank: int, owner: int) -> None:
    """Mark a rank as gone for its peers, because its transport was garbage-collected."""
    # Do not wait for the lock: a finalizer may run at any point of the program. Peers that wait
    # need no wake-up, because they check again after _LOOK_S.
    if os.getpid() == owner and not hub.gone[rank]:
        hub.gone[rank] = DROPPED


def _forget() -> None:
    """Forget the hubs in a forked child: the threads that have yet to arrive are its parent's."""
    global _hubs_lock
    _hubs_lock = threading.Lock()
    _hubs.clear()


os.register_at_fork(after_in_child=_forget)
