"""The ``multiprocessing`` of Chainer's modules that start processes.

A process that is spawned, or forked by a server, reads from a pipe what it is to do, and imports
Chainer for it. Here it imports this package first, so that its Chainer is mended, whatever the
main module imports.

And a pool does not replace a worker that failed. :class:`multiprocessing.pool.Pool` does so for
ever, if each one fails as it starts; and what a worker was at is lost, so that whoever waits for
it waits for good.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.pool
import os
from collections.abc import Callable
from multiprocessing import (
    JoinableQueue,
    Pipe,
    TimeoutError,  # noqa: A004  (Chainer asks for it by this name)
    cpu_count,
    current_process,
    get_start_method,
    queues,
)
from typing import Any

from collective.errors import CollectiveError

__all__ = [
    "JoinableQueue",
    "Pipe",
    "Pool",
    "Process",
    "TimeoutError",
    "WorkerLostError",
    "cpu_count",
    "current_process",
    "fetch",
    "finish",
    "get_start_method",
    "wait_for_batch",
]


class WorkerLostError(CollectiveError, RuntimeError):
    """A process of a pool ended before the pool did; what it was to do is lost."""


class Process(multiprocessing.Process):
    """A process in which Chainer is mended before anything of Chainer's is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The function is read first, for which this package is imported; then the class, which
        # may be one of Chainer's, and what is to be run.
        return _unpickled, (type(self),), self.__dict__


def _unpickled(kind: type[Process]) -> Process:
    return kind.__new__(kind)


class _NoWorker:
    """Stands in a pool for a worker, so that the pool starts none: it has not ended."""

    name = ""
    daemon = True
    exitcode = None

    def start(self) -> None:
        """Start nothing."""

    def terminate(self) -> None:
        """End nothing."""

    def is_alive(self) -> bool:
        """Say no: there is nothing to wait for."""
        return False

    def join(self) -> None:
        """Wait for nothing."""


class _Workers:
    """A pool's context: makes its workers, until one fails.

    Args:
        replaced: whether workers end when they have done their share, for others to follow.

    Attributes:
        failed: the first worker that ended otherwise.
    """

    def __init__(self, replaced: bool) -> None:
        self.failed: Process | None = None
        self._replaced = replaced
        self._running: list[Process] = []

    def SimpleQueue(self) -> Any:
        """Make what the pool's tasks and results travel in."""
        return multiprocessing.SimpleQueue()

    def Process(self, *args: Any, **kwds: Any) -> Process | _NoWorker:
        """Make a worker; the pool asks for one when it starts, and when one has ended."""
        # Exit codes are asked for here alone, in the thread in which the pool does: of a child
        # of a fork server two threads at once could read a wrong one.
        codes = [(worker, worker.exitcode) for worker in self._running]
        for worker, code in codes:
            if self.failed is None and code is not None and (code or not self._replaced):
                self.failed = worker
        if self.failed is not None:
            return _NoWorker()
        made = Process(*args, **kwds)
        self._running = [worker for worker, code in codes if code is None] + [made]
        return made


class Pool(multiprocessing.pool.Pool):
    """A pool of processes that knows if one of them failed, and then starts no other.

    The arguments are those of :class:`multiprocessing.pool.Pool`.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Any = (),
        maxtasksperchild: int | None = None,
    ) -> None:
        self._size = processes or os.cpu_count() or 1
        self._workers = _Workers(replaced=maxtasksperchild is not None)
        super().__init__(processes, initializer, initargs, maxtasksperchild, self._workers)

    def check(self) -> None:
        """Raise :class:`WorkerLostError` if a worker failed."""
        failed = self._workers.failed
        if failed is not None:
            raise WorkerLostError(
                f"{failed.name}: this process of a pool, {failed.pid}, ended with exit code "
                f"{failed.exitcode} before the pool did, and what it was to do is lost. What it "
                "wrote to the standard error says why; a negative code is the signal that ended "
                "it. If it could not start: processes may only be started below "
                '`if __name__ == "__main__":`, and what they are given, as a data set, is '
                "imported there."
            ) from None

    # CPython divides by the number of workers that it has at the moment. That is 0 until it starts
    # new ones, if all have ended at once after their ``maxtasksperchild``.
    def map(self, func: Any, iterable: Any, chunksize: int | None = None) -> Any:
        """Apply ``func`` to each item; return the results."""
        return self.map_async(func, iterable, chunksize).get()

    def map_async(
        self, func: Any, iterable: Any, chunksize: int | None = None, callback: Any = None,
        error_callback: Any = None,
    ) -> Any:  # fmt: skip
        """Apply ``func`` to each item; return a ``MapResult`` at once."""
        items = list(iterable)
        if chunksize is None:
            chunksize = math.ceil(len(items) / (4 * self._size))
        return super().map_async(func, items, chunksize, callback, error_callback)

    def close(self) -> None:
        """Take no more tasks; with a worker lost, end the others, who wait for its part."""
        if self._workers.failed is None:
            super().close()
        else:
            self.terminate()


# -- what chainer.iterators.MultiprocessIterator calls -----------------------------------------


def fetch(loop: Any) -> bool:
    """Fetch a batch, in the thread that does so; keep an error for the one that takes batches.

    Args:
        loop: Chainer's ``_PrefetchLoop``.

    Returns:
        Whether there is more to fetch.
    """
    try:
        more: bool = loop._task()
    except BaseException as error:
        loop._comm.error = error
        return False
    return more


def wait_for_batch(communicator: Any, seconds: float) -> None:
    """Wait for a batch, or for some time.

    Args:
        communicator: Chainer's ``_Communicator`` of the two threads, locked.
        seconds: how long.

    Raises:
        BaseException: there will be none, as this ended the thread that fetches them.
    """
    error: BaseException | None = getattr(communicator, "error", None)
    if error is not None:
        raise error
    communicator._not_empty_cond.wait(seconds)


# -- what chainer.training.extensions.snapshot_writers calls -----------------------------------


def finish(queue: Any, consumer: Any) -> None:
    """Wait until all snapshots are written, or whoever writes them has ended.

    Args:
        queue: Chainer's to that thread or process, which ends by itself at the end of it; or what
            a program's own writer has made.
        consumer: the thread or the process.

    Raises:
        WorkerLostError: it has ended before; snapshots are missing.
    """
    consumer.join()
    # A thread has no exit code, and what a program has made may have something else by that name.
    code = getattr(consumer, "exitcode", None)
    failed = isinstance(code, int) and code != 0
    if failed:
        # What is in the queue would wait for a reader when this process ends.
        queue.cancel_join_thread()
    if failed or _unfinished(queue):
        raise WorkerLostError(
            f"{consumer.name}: what writes the snapshots ended "
            + (f"with exit code {code} " if failed else "")
            + "before all were written. What it wrote to the standard error says why; the last "
            "snapshots are missing."
        )
    queue.join()


def _unfinished(queue: Any) -> bool:
    """Tell whether ``queue.join()`` would wait for a task that nobody does any more."""
    if isinstance(queue, queues.JoinableQueue):
        tasks: Any = queue
        return not tasks._unfinished_tasks._semlock._is_zero()  # as its join() does
    left = getattr(queue, "unfinished_tasks", 0)
    return isinstance(left, int) and left > 0
