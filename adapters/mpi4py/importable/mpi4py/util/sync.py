"""Synchronisation of ranks by messages.

mpi4py has numbers in windows for this, which other ranks change by one-sided access. Here a thread
of the rank that has a number changes it for the others.
"""

from __future__ import annotations

import array
import contextlib
import math
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from collective import CollectiveError
from collective.adapters.mpi4py.communicators import mail_of
from collective.adapters.mpi4py.exceptions import TRANSLATED
from collective.adapters.mpi4py.operations import await_posted

from .. import MPI


class Sequential:
    """Block that the ranks of a communicator run one after the other.

    Args:
        comm: the communicator.
        tag: tag of its messages.
    """

    def __init__(self, comm: Any, tag: int = 0) -> None:
        self.comm = comm
        self.tag = int(tag)

    def __enter__(self) -> Sequential:
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self) -> None:
        """Wait for the lower ranks."""
        if self.comm.rank:
            self.comm.recv(None, self.comm.rank - 1, self.tag)

    def end(self) -> None:
        """Let the next rank begin."""
        if self.comm.rank + 1 < self.comm.size:
            self.comm.send(None, self.comm.rank + 1, self.tag)


class _Shared:
    """A number and queues at one rank, which all ranks of a communicator change by messages.

    The methods that take a rank run in a thread of the root, and answer that rank. Calls of one
    rank run in its order. The tag of an answer is the number of the queue, from 1.

    Args:
        comm: the communicator; all its ranks make the object.
        root: rank that has the number.
        number: the number, in an array whose type decides how it overflows.
    """

    def __init__(self, comm: Any, root: int, number: array.array[Any]) -> None:
        self._comm = comm.Dup()
        self._mail = mail_of(self._comm)
        self._root = root
        self._number = np.array(number)
        self._queues: defaultdict[int, deque[int]] = defaultdict(deque)
        self.queues = 1
        if comm.rank == root:
            threading.Thread(target=self._serve, daemon=True).start()

    def check(self) -> None:
        """Raise RuntimeError if the object has been freed."""
        if not self._comm:
            raise RuntimeError("the object has been freed")

    def post(self, method: Callable[..., None], *args: Any, queue: int = 1) -> Any:
        """Ask the root to call a method for this rank; return the receive of its answer."""
        self.check()
        with TRANSLATED:
            answer = self._mail.receive(None, self._root, queue)
            self._mail.send(pickle.dumps((method.__name__, queue, args)), self._root, 0)
        return answer

    def result(self, answer: Any) -> Any:
        """Wait for an answer, and return it."""
        with TRANSLATED:
            await_posted(self._mail, answer)
        return pickle.loads(answer.data)

    def ask(self, method: Callable[..., None], *args: Any, queue: int = 1) -> Any:
        """Have the root call a method for this rank; return its answer once there is one."""
        return self.result(self.post(method, *args, queue=queue))

    def free(self) -> None:
        """End the thread once no rank needs it; all ranks call this, and may do so again."""
        if self._comm:
            self._comm.Barrier()
            if self._comm.rank == self._root:
                self._mail.send(None, self._root, 0)
            self._comm.Free()

    def _serve(self) -> None:
        mail = self._mail
        with contextlib.suppress(CollectiveError):  # the program may end without a call of free()
            while (asked := mail.wait(mail.receive(None, MPI.ANY_SOURCE, 0), math.inf)).nbytes:
                method, queue, args = pickle.loads(asked.data)
                getattr(self, method)(mail.status(asked).source, queue, *args)

    def _answer(self, rank: int, queue: int, value: Any) -> None:
        self._mail.send(pickle.dumps(value), rank, queue)

    def add(self, rank: int, queue: int, increment: Any) -> None:
        """Add to the number; the answer is the number before."""
        before = self._number[0].item()
        self._number += np.array(increment, self._number.dtype)
        self._answer(rank, queue, before)

    def take(self, rank: int, queue: int, waits: bool) -> None:
        """Take one from the number if it is positive; else queue the rank, or answer False."""
        if self._number[0] > 0:
            self._number -= 1
            self._answer(rank, queue, True)
        elif waits:
            self._queues[queue].append(rank)
        else:
            self._answer(rank, queue, False)

    def give(self, rank: int, queue: int, count: int, limit: float = math.inf) -> None:
        """Add to the number for those who wait to take; the answer is False beyond a limit."""
        fits = bool(self._number[0] + count <= limit)
        if fits:
            self._number += count
            self._number -= self._wake(queue, count)
        self._answer(rank, queue, fits)

    def sleep(self, rank: int, queue: int) -> None:
        """Queue the rank until another one wakes it."""
        self._queues[queue].append(rank)

    def wake(self, rank: int, queue: int, count: int) -> None:
        """Wake up to ``count`` ranks; the answer is their number."""
        self._answer(rank, queue, self._wake(queue, count))

    def _wake(self, queue: int, count: int) -> int:
        waiting = self._queues[queue]
        count = min(count, len(waiting))
        for _ in range(count):
            self._answer(waiting.popleft(), queue, True)
        return count


class Counter:
    """Number that all ranks count on.

    Args:
        start, step: first value, and what :meth:`next` adds.
        typecode: code of the number's type, as in ``array``.
        comm, info, root: the ranks; not used; the rank that has the number.
    """

    def __init__(
        self, start: Any = 0, step: Any = 1, *, typecode: str = "i", comm: Any = MPI.COMM_SELF,
        info: Any = MPI.INFO_NULL, root: int = 0,
    ) -> None:  # fmt: skip
        self._start, self._step = start, step
        self._typecode = MPI.Datatype.fromcode(typecode).typechar
        self._shared = _Shared(comm, root, array.array(self._typecode, [start]))
        self.free = self._shared.free

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, incr: Any = None) -> Any:
        """Return the number, and add the step or ``incr`` to it."""
        increment = array.array(self._typecode, [self._step if incr is None else incr])[0]
        return self._shared.ask(_Shared.add, increment)


class _Acquired:
    """Object that a block has acquired."""

    def __enter__(self: Any) -> Any:
        self.acquire()
        return self

    def __exit__(self: Any, *error: object) -> None:
        self.release()


class Mutex(_Acquired):
    """Lock that one rank holds at a time.

    Args:
        recursive: whether the rank that holds it may acquire it again.
        comm, info: the ranks; not used.
    """

    def __init__(
        self, *, recursive: bool = False, comm: Any = MPI.COMM_SELF, info: Any = MPI.INFO_NULL
    ) -> None:
        self._recursive = recursive
        self._count = 0
        self._shared = _Shared(comm, 0, array.array("i", [1]))

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; return whether this rank has it, always so if ``blocking``."""
        if not self.locked():
            self._count = int(self._shared.ask(_Shared.take, blocking))
            return self._count > 0
        if not self._recursive:
            raise RuntimeError("cannot acquire already held mutex")
        self._count += 1
        return True

    def release(self) -> None:
        """Release the lock, once for each time that it was acquired."""
        if not self.locked():
            raise RuntimeError("cannot release unheld mutex")
        self._count -= 1
        if not self._count:
            self._shared.ask(_Shared.give, 1)

    def locked(self) -> bool:
        """Return whether this rank has the lock."""
        return self.count() > 0

    def count(self) -> int:
        """Return how many times this rank has acquired the lock."""
        self._shared.check()
        return self._count

    def drop(self) -> None:
        """Release the lock if this rank has it."""
        if self._count:
            self._count = 1
            self.release()

    def free(self) -> None:
        """Release the lock if this rank has it, and free it; all ranks call this."""
        self.drop()
        self._shared.free()


class Condition(_Acquired):
    """Condition for which ranks wait.

    Args:
        mutex: lock that goes with it; by default one of its own.
        recursive, comm, info: for its own lock.
    """

    def __init__(
        self, mutex: Mutex | None = None, *, recursive: bool = True, comm: Any = MPI.COMM_SELF,
        info: Any = MPI.INFO_NULL,
    ) -> None:  # fmt: skip
        self._mutex = mutex or Mutex(recursive=recursive, comm=comm)
        self._owns = mutex is None
        self._mutex._shared.queues += 1
        self._queue = self._mutex._shared.queues

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; return whether this rank has it, always so if ``blocking``."""
        self._check()
        return self._mutex.acquire(blocking)

    def release(self) -> None:
        """Release the lock."""
        self._check()
        self._mutex.release()

    def locked(self) -> bool:
        """Return whether this rank has the lock."""
        return self._mutex.locked()

    def _check(self) -> None:
        if not self._queue:
            raise RuntimeError("the condition has been freed")

    def wait(self) -> bool:
        """Release the lock, wait until another rank notifies this one, and acquire the lock."""
        mutex = self._held("wait")
        woken = mutex._shared.post(_Shared.sleep, queue=self._queue)
        count, mutex._count = mutex._count, 1
        mutex.release()
        mutex._shared.result(woken)
        mutex.acquire()
        mutex._count = count
        return True

    def wait_for(self, predicate: Callable[[], Any]) -> Any:
        """Wait until a function returns a true value, and return the value."""
        while not (result := predicate()):
            self.wait()
        return result

    def notify(self, n: int = 1) -> int:
        """Wake up to ``n`` ranks that wait, and return their number."""
        return int(self._held("notify")._shared.ask(_Shared.wake, n, queue=self._queue))

    def notify_all(self) -> int:
        """Wake all ranks that wait, and return their number."""
        return self.notify(2**31 - 1)

    def _held(self, what: str) -> Mutex:
        self._check()
        if not self.locked():
            raise RuntimeError(f"cannot {what} on unheld mutex")
        return self._mutex

    def free(self) -> None:
        """Release the lock if this rank has it, and free the condition; all ranks call this."""
        self._queue = 0
        if self._owns:
            self._mutex.free()
        else:
            self._mutex.drop()


class Semaphore(_Acquired):
    """Number of permits that ranks acquire and release.

    Args:
        value: number of permits.
        bounded: whether no more than ``value`` can be released.
        comm, info: the ranks; not used.
    """

    def __init__(
        self, value: int = 1, *, bounded: bool = True, comm: Any = MPI.COMM_SELF,
        info: Any = MPI.INFO_NULL,
    ) -> None:  # fmt: skip
        if value < 0:
            raise ValueError("initial value must be non-negative")
        self._bounded = bounded
        self._counter = Counter(value, comm=comm)
        self.free = self._counter.free

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire a permit; return whether there was one, always so if ``blocking``."""
        return bool(self._counter._shared.ask(_Shared.take, blocking))

    def release(self, n: int = 1) -> None:
        """Release permits."""
        if n < 1:
            raise ValueError("increment must be one or more")
        limit = self._counter._start if self._bounded else math.inf
        if not self._counter._shared.ask(_Shared.give, n, limit):
            raise ValueError("semaphore released too many times")
