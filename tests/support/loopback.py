"""A transport with only the required methods, whose ranks are threads.

Use it to test code above a transport. All calls but send and recv are defaults of
``collective.contract.backend.Backend``. The transport takes the contract literally to find faults:
messages of an unexpected length fail, and a send of :class:`Rendezvous` returns only after the
receive.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar, TypeVar

import numpy as np

from collective.contract.backend import ANY_SOURCE, Backend, Capabilities
from collective.contract.failure import Failure
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import CommunicatorClosedError, RendezvousError
from collective.memory.buffer import Buffer

__all__ = ["Loopback", "Rendezvous", "connect_all", "run"]

T = TypeVar("T")

_jobs = count()


class _Message:
    """Message in flight: a copy, or the sender's own memory until the message is received."""

    def __init__(self, data: np.ndarray[Any, Any], number: int) -> None:
        self.data = data
        self.number = number
        self.taken = False


class _Hub:
    """State shared by the ranks of one job. ``lock`` guards all of it."""

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self.woken = [threading.Condition(self.lock) for _ in range(size)]
        self.mail: dict[tuple[int, int, int], deque[_Message]] = {}
        self.arrived: set[int] = set()
        self.left: set[int] = set()
        self.failure: Failure | None = None
        self.sent = 0

    def wake_all(self) -> None:
        for condition in self.woken:
            condition.notify_all()


_hubs: dict[str, _Hub] = {}
_hubs_lock = threading.Lock()


class Loopback(Backend):
    """Transport of ranks in one process; ``send`` copies the message and returns."""

    name = "loopback"
    capabilities = Capabilities(
        in_process=True, any_source=True, detects_lost_peers=True, shrinks=True, grows=True
    )
    rendezvous: ClassVar[bool] = False

    def __init__(self, world: World, hub: _Hub) -> None:
        self.rank = world.rank
        self.size = world.size
        self._hub = hub
        self._closed = False

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Loopback:
        key = f"{cls.name} {world.job}"
        with _hubs_lock:
            hub = _hubs.setdefault(key, _Hub(world.size))
            with hub.lock:
                hub.arrived.add(world.rank)
                hub.wake_all()
            if len(hub.arrived) == world.size:
                del _hubs[key]  # Delete before any rank returns: the job may connect again.
        with hub.lock:
            while len(hub.arrived) < world.size and not deadline.expired:
                hub.woken[world.rank].wait(0.05)
                if world.store is not None:  # The functions of this module pass no store.
                    world.store.check()
            if len(hub.arrived) == world.size:
                return cls(world, hub)
            missing = sorted(set(range(world.size)) - hub.arrived)
        with _hubs_lock:
            if _hubs.get(key) is hub:
                del _hubs[key]
        raise RendezvousError(
            f"connect: ranks {missing} did not arrive within {deadline.seconds:g} s "
            f"[rank {world.rank} of {world.size}]."
        )

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        hub = self._hub
        data = src.bytes().array
        with hub.lock:
            self._check("send")
            message = _Message(data if self.rendezvous else data.copy(), hub.sent)
            hub.sent += 1
            hub.mail.setdefault((self.rank, dst, tag), deque()).append(message)
            hub.woken[dst].notify_all()
            if self.rendezvous:
                self._wait("send", dst, lambda: message.taken or None, deadline)
            elif dst in hub.left:
                self._lost("send", dst)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        hub = self._hub
        with hub.lock:
            source, message = self._wait("recv", src, lambda: self._next(src, tag), deadline)
            expected = dst.bytes().array
            if message.data.nbytes != expected.nbytes:
                raise AssertionError(
                    f"rank {self.rank} receives {expected.nbytes} bytes where rank {source} "
                    f"sent {message.data.nbytes}, tag {tag}"
                )
            np.copyto(expected, message.data)
            message.taken = True
            hub.woken[source].notify_all()
            return source

    def lost(self) -> set[int]:
        return self._hub.left - {self.rank}

    def abort(self, failure: Failure) -> None:
        with self._hub.lock:
            self._break(failure)

    def close(self) -> None:
        hub = self._hub
        with hub.lock:
            self._closed = True
            hub.left.add(self.rank)
            hub.wake_all()

    def _next(self, src: int, tag: int) -> tuple[int, _Message] | None:
        sources = range(self.size) if src == ANY_SOURCE else (src,)
        queues = [(s, self._hub.mail.get((s, self.rank, tag))) for s in sources]
        waiting = [(queue[0].number, s, queue) for s, queue in queues if queue]
        if not waiting:
            return None
        _, source, queue = min(waiting, key=lambda item: item[0])
        return source, queue.popleft()

    def _wait(self, what: str, peer: int, ready: Callable[[], T | None], deadline: Deadline) -> T:
        """Wait until ``ready`` returns a value, ``peer`` has left, or the deadline expires."""
        hub = self._hub
        while True:
            self._check(what)
            value = ready()
            if value is not None:
                return value
            others = set(range(self.size)) - {self.rank} if peer == ANY_SOURCE else {peer}
            if others <= hub.left:
                self._lost(what, *others)
            if deadline.expired:
                names = ", ".join(map(str, sorted(others)))
                text = f"timed out: rank {self.rank} waited in {what} for ranks {names}"
                self._break(Failure("timeout", self.rank, text, tuple(sorted(others))))
            else:
                hub.woken[self.rank].wait(deadline.left())

    def _check(self, what: str) -> None:
        if self._hub.failure is not None:
            raise self._hub.failure.error(what, self.rank)
        if self._closed:
            raise CommunicatorClosedError(f"{what}: this rank has closed it [rank {self.rank}]")

    def _lost(self, what: str, *peers: int) -> None:
        names = ", ".join(map(str, peers))
        self._break(Failure("lost", self.rank, f"ranks {names} left", tuple(sorted(peers))))
        self._check(what)

    def _break(self, failure: Failure) -> None:
        if self._hub.failure is None:
            self._hub.failure = failure
            self._hub.wake_all()


class Rendezvous(Loopback):
    """Variant of Loopback whose ``send`` returns only after the receiver has the message."""

    name = "loopback-rendezvous"
    rendezvous = True


def connect_all(size: int, kind: type[Backend] = Loopback) -> list[Backend]:
    """Return the connected ranks of a new job, for calls from this thread."""
    job = f"test-{next(_jobs)}"
    return _in_threads(
        [
            lambda rank=rank: kind.connect(_world(rank, size, job), Deadline(10.0))
            for rank in range(size)
        ],
        10.0,
    )


def run(
    size: int, body: Callable[[Backend], T], kind: type[Backend] = Loopback, timeout: float = 20.0
) -> list[T]:
    """Run ``body`` on every rank, each a thread, and return the results by rank.

    Raises:
        BaseException: the first exception of a rank; the transport is aborted, so that no other
            rank waits.
        TimeoutError: a rank still runs after ``timeout`` seconds; the text has its stack.
    """
    job = f"test-{next(_jobs)}"
    backends: list[Backend] = []

    def rank_of(rank: int) -> T:
        backend = kind.connect(_world(rank, size, job), Deadline(10.0))
        backends.append(backend)
        try:
            return body(backend)
        except BaseException as error:
            backend.abort(Failure("failed", rank, repr(error)))
            raise

    try:
        return _in_threads([lambda r=rank: rank_of(r) for rank in range(size)], timeout)
    finally:
        for backend in backends:
            backend.close()


def _world(rank: int, size: int, job: str) -> World:
    store: Any = None  # The ranks find each other by the job's name.
    return World(rank, size, rank, size, "localhost", "none", job, store)


def _in_threads(functions: Sequence[Callable[[], T]], timeout: float) -> list[T]:
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:  # The caller's thread raises it.
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=(i,), name=f"rank {i}", daemon=True)
        for i in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline(timeout)
    for thread in threads:
        thread.join(deadline.left())
    stuck = [thread for thread in threads if thread.is_alive()]
    if errors:
        raise errors[0]
    if stuck:
        frames = sys._current_frames()
        stacks = [
            f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident or 0]))}"
            for thread in stuck
        ]
        raise TimeoutError(f"still running after {timeout:g} s:\n" + "\n".join(stacks))
    return [results[index] for index in range(len(functions))]
