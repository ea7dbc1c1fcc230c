"""Replacement for ``multiprocessing`` in Chainer's modules that start processes.

A process that is spawned, or forked by a server, reads its task from a pipe, and imports Chainer
for it. With this module, the process imports this package first. So its Chainer is repaired,
whatever the main module imports.

In addition, a pool does not replace a worker that failed. :class:`multiprocessing.pool.Pool`
replaces such workers endlessly if each new one fails at its start. The failed worker's task is lost
there, so that the caller waits for its result without end.
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
    TimeoutError,  # noqa: A004  (Chainer imports it by this name)
    cpu_count,
    current_process,
    get_start_method,
    queues,
)
from typing import Any

from collective import CollectiveError

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
    """End of a pool's process before the pool's; the task of the process is lost."""


class Process(multiprocessing.Process):
    """Process that repairs Chainer before it unpickles anything of Chainer."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling first reads the function, for which this package is imported. Then it reads
        # the class, which may be one of Chainer's, and the task.
        return _unpickled, (type(self),), self.__dict__


def _unpickled(kind: type[Process]) -> Process:
    return kind.__new__(kind)


class _NoWorker:
    """Placeholder for a worker, so that the pool starts no process: it seems not to have ended."""

    name = ""
    daemon = True
    exitcode = None

    def start(self) -> None:
        """Start nothing."""

    def terminate(self) -> None:
        """End nothing."""

    def is_alive(self) -> bool:
        """Return False: there is nothing to wait for."""
        return False

    def join(self) -> None:
        """Wait for nothing."""


class _PoolContext:
    """Context of a pool, which makes the pool's workers until one fails.

    Args:
        replaced: whether workers end after their share of tasks, and new workers replace them.

    Attributes:
        failed: first worker that ended for another reason.
    """

    def __init__(self, replaced: bool) -> None:
        self.failed: Process | None = None
        self._replaced = replaced
        self._running: list[Process] = []

    def SimpleQueue(self) -> Any:
        """Make a queue for the pool's tasks or results."""
        return multiprocessing.SimpleQueue()

    def Process(self, *args: Any, **kwds: Any) -> Process | _NoWorker:
        """Make a worker; the pool calls this when it starts, and when a worker has ended."""
        # Exit codes are read only here, in the thread in which the pool reads them. If two threads
        # read them at once, one could get a wrong code of a child of a fork server.
        codes = [(worker, worker.exitcode) for worker in self._running]
        for worker, code in codes:
            if self.failed is None and code is not None and (code or not self._replaced):
                self.failed = worker
        if self.failed is not None:
            return _NoWorker()
        worker_process = Process(*args, **kwds)
        self._running = [worker for worker, code in codes if code is None] + [worker_process]
        return worker_process


class Pool(multiprocessing.pool.Pool):
    """Pool of processes that detects a failed worker, and then starts no other worker.

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
        self._workers = _PoolContext(replaced=maxtasksperchild is not None)
        super().__init__(processes, initializer, initargs, maxtasksperchild, self._workers)

    def check(self) -> None:
        """Raise :class:`WorkerLostError` if a worker failed."""
        failed = self._workers.failed
        if failed is not None:
            raise WorkerLostError(
                f"{failed.name}: this process of a pool, {failed.pid}, ended with exit code "
                f"{failed.exitcode} before the pool did, and its task is lost. See its output on "
                "the standard error for the reason. A negative code is the signal that ended it. "
                "If it could not start: start processes only below "
                '`if __name__ == "__main__":`, and define their arguments, such as a data set, '
                "where the new process can import them."
            ) from None

    # CPython divides by the present number of workers. If all workers have ended at the same time
    # after their ``maxtasksperchild``, this number is 0 until new workers start.
    def map(self, func: Any, iterable: Any, chunksize: int | None = None) -> Any:
        """Apply ``func`` to each item; return the results."""
        return self.map_async(func, iterable, chunksize).get()

    def map_async(
        self, func: Any, iterable: Any, chunksize: int | None = None, callback: Any = None,
        error_callback: Any = None,
    ) -> Any:  # fmt: skip
        """Apply ``func`` to each item; return a ``MapResult`` immediately."""
        items = list(iterable)
        if chunksize is None:
            chunksize = math.ceil(len(items) / (4 * self._size))
        return super().map_async(func, items, chunksize, callback, error_callback)

    def close(self) -> None:
        """Accept no more tasks; if a worker is lost, end the others, which wait for its part."""
        if self._workers.failed is None:
            super().close()
        else:
            self.terminate()


# -- functions for chainer.iterators.MultiprocessIterator --------------------------------------


def fetch(loop: Any) -> bool:
    """Fetch a batch, in the fetching thread; store an error for the thread that takes batches.

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
    """Wait for a batch, for at most ``seconds``.

    Args:
        communicator: Chainer's ``_Communicator`` of the two threads, locked.
        seconds: longest time to wait.

    Raises:
        BaseException: the error that ended the fetching thread; no more batches will come.
    """
    error: BaseException | None = getattr(communicator, "error", None)
    if error is not None:
        raise error
    communicator._not_empty_cond.wait(seconds)


# -- functions for chainer.training.extensions.snapshot_writers --------------------------------


def finish(queue: Any, consumer: Any) -> None:
    """Wait until all snapshots are written, or until their writer has ended.

    Args:
        queue: Chainer's queue to the writer, which ends by itself at the end of the queue; or the
            queue that a program's own writer has made.
        consumer: thread or process that writes.

    Raises:
        WorkerLostError: the writer ended too early; snapshots are missing.
    """
    consumer.join()
    # A thread has no exit code. An object of the program may have another attribute of this name.
    code = getattr(consumer, "exitcode", None)
    failed = isinstance(code, int) and code != 0
    if failed:
        # Otherwise data in the queue would wait for a reader when this process ends.
        queue.cancel_join_thread()
    if failed or _unfinished(queue):
        raise WorkerLostError(
            f"{consumer.name}: the writer of the snapshots ended "
            + (f"with exit code {code} " if failed else "")
            + "before all were written, so the last snapshots are missing. See its output on the "
            "standard error for the reason."
        )
    queue.join()


def _unfinished(queue: Any) -> bool:
    """Return whether ``queue.join()`` would wait for a task that no consumer will finish."""
    if isinstance(queue, queues.JoinableQueue):
        tasks: Any = queue
        return not tasks._unfinished_tasks._semlock._is_zero()  # the condition of its join()
    left = getattr(queue, "unfinished_tasks", 0)
    return isinstance(left, int) and left > 0
