"""Executors over other ranks, or over processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
    as_completed,
    wait,
)
from concurrent.futures import ProcessPoolExecutor as _Processes
from concurrent.futures import ThreadPoolExecutor as _Threads
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from collective.adapters.mpi4py.communicators import WORKER

from .. import MPI

__all__ = [
    "ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION", "BrokenExecutor", "CancelledError",
    "Executor", "Future", "InvalidStateError", "MPICommExecutor", "MPIPoolExecutor",
    "ProcessPoolExecutor", "ThreadPoolExecutor", "TimeoutError", "as_completed",
    "compose", "get_comm_workers", "wait",
]  # fmt: skip

TimeoutError = TimeoutError  # noqa: A001
_TASK, _END = 1, 2
# Seconds between two looks for results.
_NAP = 0.0005


class _Workers:
    """Other ranks of a communicator, which work for this one.

    Args:
        comm: the communicator, of which this rank is the root.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._waiting: deque[tuple[Future[Any], Any]] = deque()
        self._idle = [rank for rank in range(comm.size) if rank != comm.rank]
        self._busy: dict[int, Future[Any]] = {}
        self.size = len(self._idle)
        self._closing = False
        self._thread = threading.Thread(target=self._dispatch, daemon=True)
        self._thread.start()

    def submit(self, key: int, first: Any, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of a call on some rank, for the executor with a key.

        Args:
            key: number of the executor.
            first: what each rank calls before its first call for the executor, or None.
            fn, args, kwargs: the call.
        """
        future: Future[Any] = Future()
        self._waiting.append((future, (key, first, fn, args, kwargs)))
        return future

    def close(self) -> None:
        """Wait for all tasks, and let the other ranks go on."""
        self._closing = True
        self._thread.join()

    def _dispatch(self) -> None:
        status = MPI.Status()
        while self._waiting or self._busy or not self._closing:
            while self._waiting and self._idle:
                future, task = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    self._begin(future, task)
            if self._busy and self._comm.iprobe(MPI.ANY_SOURCE, _TASK, status):
                self._end(status.source)
            else:
                time.sleep(_NAP)
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._comm.send(None, rank, _END)

    def _begin(self, future: Future[Any], task: Any) -> None:
        try:
            self._comm.send(task, self._idle[-1], _TASK)
        except Exception as error:  # the task cannot be pickled
            future.set_exception(error)
            return
        self._busy[self._idle.pop()] = future

    def _end(self, rank: int) -> None:
        future = self._busy.pop(rank)
        self._idle.append(rank)
        try:
            result, error, text = self._comm.recv(None, rank, _TASK)
        except Exception as failure:  # the result cannot be unpickled
            future.set_exception(failure)
            return
        if error is None:
            future.set_result(result)
        else:
            error.__cause__ = RuntimeError(f"\n'''\n{text}'''")
            future.set_exception(error)


def _serve(comm: Any, root: int) -> None:
    """Work for the root until it needs no more."""
    status = MPI.Status()
    ready: set[Any] = set()
    _Shared.comm = comm.Create_group(comm.Get_group().Excl([root]))
    while True:
        task = comm.recv(None, root, MPI.ANY_TAG, status)
        if status.tag == _END:
            return
        key, initializer, function, args, options = task
        try:
            if key not in ready and initializer is not None:
                initializer[0](*initializer[1])
            ready.add(key)
            answer: Any = function(*args, **options), None, ""
        except BaseException as error:
            answer = None, error, traceback.format_exc()
        try:
            comm.send(answer, root, _TASK)
        except Exception as error:
            comm.send((None, RuntimeError(str(error)), traceback.format_exc()), root, _TASK)


class _Shared:
    """What all executors of this process share.

    Attributes:
        workers: the other ranks, on the rank that runs a program of ``-m mpi4py.futures``.
        comm: communicator of the workers, on these.
    """

    workers: _Workers | None = None
    comm: Any = None


class _Context(SpawnContext):
    """Maker of processes whose ``COMM_WORLD`` has one rank."""

    Process = partial(SpawnProcess, name=WORKER)  # type: ignore[assignment]


class MPIPoolExecutor(Executor):
    """Executor whose functions run on other ranks, or in processes of its own.

    Args:
        max_workers: number of processes of its own; ranks are what they are.
        initializer, initargs: function that each worker calls first.
        options: options of mpi4py about processes that it would start; they have no effect.
    """

    _keys = itertools.count()
    _takes_ranks = True

    def __init__(
        self, max_workers: int | None = None, initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (), *, _workers: _Workers | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if max_workers is not None and max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        initargs, workers = tuple(initargs), _workers or _Shared.workers
        self._own: Executor | None = None
        self._start: Callable[..., Future[Any]]
        if workers is not None and self._takes_ranks:
            first = None if initializer is None else (initializer, initargs)
            self._start = partial(workers.submit, next(self._keys), first)
            self._size = workers.size
        else:
            self._size = max_workers or int(os.environ.get("MPI4PY_FUTURES_MAX_WORKERS") or 1)
            self._own = self._make(self._size, initializer, initargs)
            self._start = self._own.submit
        self._open = True
        self._futures: set[Future[Any]] = set()

    @property
    def num_workers(self) -> int:
        """Number of workers, 0 after the shutdown."""
        return self._size if self._open else 0

    # Users of executors of all kinds read it.
    _max_workers = num_workers

    @staticmethod
    def _make(size: int, initializer: Any, initargs: tuple[Any, ...]) -> Executor:
        """Return the executor that works in place of other ranks."""
        return _Processes(size, _Context(), initializer, initargs)

    def bootup(self, wait: bool = True) -> MPIPoolExecutor:
        """Return the executor: its workers are there."""
        if not self._open:
            raise RuntimeError("cannot bootup after shutdown")
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the future of a call."""
        if not self._open:
            raise RuntimeError("cannot submit after shutdown")
        future = self._start(fn, *args, **kwargs)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None,
        chunksize: int = 1, buffersize: int | None = None, unordered: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """Return an iterator over the results of calls with an item of each iterable."""
        return self.starmap(
            fn, zip(*iterables), timeout, chunksize, buffersize=buffersize, unordered=unordered
        )

    def starmap(
        self, fn: Callable[..., Any], iterable: Iterable[Any], timeout: float | None = None,
        chunksize: int = 1, buffersize: int | None = None, unordered: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """Return an iterator over the results of calls with the arguments of an iterable."""
        if chunksize < 1:
            raise ValueError("chunksize must be greater than or equal to 1")
        deadline = None if timeout is None else time.monotonic() + timeout
        items = iter(iterable)
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        futures = [self.submit(_chunk, fn, chunk) for chunk in chunks]
        return _results(futures, deadline, unordered)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and wait for those that there are."""
        self._open = False
        if self._own is not None:
            return self._own.shutdown(wait, cancel_futures=cancel_futures)
        futures = list(self._futures)
        for future in futures if cancel_futures else ():
            future.cancel()
        for future in futures if wait else ():
            with contextlib.suppress(BaseException):
                future.exception()


MPIPoolExecutor.Future = Future  # type: ignore[attr-defined]


class ProcessPoolExecutor(MPIPoolExecutor):
    """Executor whose functions run in processes of its own."""

    _takes_ranks = False


class ThreadPoolExecutor(ProcessPoolExecutor):
    """Executor whose functions run in threads of this process."""

    @staticmethod
    def _make(size: int, initializer: Any, initargs: tuple[Any, ...]) -> Executor:
        return _Threads(size, "", initializer, initargs)


def _chunk(fn: Callable[..., Any], chunk: list[Any]) -> list[Any]:
    return [fn(*args) for args in chunk]


def _results(futures: list[Future[Any]], deadline: float | None, unordered: bool) -> Iterator[Any]:
    left = None if deadline is None else deadline - time.monotonic()
    try:
        for future in as_completed(futures, left) if unordered else futures:
            left = None if deadline is None else deadline - time.monotonic()
            yield from future.result(left)
    finally:
        for future in futures:
            future.cancel()


class MPICommExecutor:
    """Block in which one rank has an executor, and the others work for it.

    Args:
        comm: communicator of these ranks.
        root: rank that gets the executor; the others get None.
        options: as for ``MPIPoolExecutor``.
    """

    def __init__(self, comm: Any = None, root: int = 0, **options: Any) -> None:
        self._comm = MPI.COMM_WORLD if comm is None else comm
        if not 0 <= root < self._comm.size:
            raise ValueError("expecting root in range(comm.size)")
        self._root = root
        self._options = options
        self._workers: _Workers | None = None
        self._executor: MPIPoolExecutor | None = None

    def __enter__(self) -> MPIPoolExecutor | None:
        if _Shared.workers is not None:  # the other ranks do not run the program
            self._executor = MPIPoolExecutor(**self._options)
            return self._executor
        self._private = self._comm.Dup()
        if self._comm.rank != self._root:
            _serve(self._private, self._root)
            return None
        if self._comm.size > 1:
            self._workers = _Workers(self._private)
        self._executor = MPIPoolExecutor(_workers=self._workers, **self._options)
        return self._executor

    def __exit__(self, *error: object) -> bool:
        if self._executor is not None:
            self._executor.shutdown()
        if self._workers is not None:
            self._workers.close()
        if _Shared.workers is None:
            self._private.Free()
        return self._comm.rank != self._root and error[0] is not None


def get_comm_workers() -> Any:
    """Return the communicator of the workers, in a function that runs on one.

    Raises:
        RuntimeError: this process is no rank that works for another one.
    """
    if _Shared.comm is None:
        raise RuntimeError("get_comm_workers: this process is no worker of a communicator")
    return _Shared.comm


def compose(
    future: Future[Any], resulthook: Callable[[Any], Any] | None = None,
    excepthook: Callable[[BaseException], Any] | None = None,
) -> Future[Any]:  # fmt: skip
    """Return a future with the result of a function of a future's result, or of its error."""
    composed: Future[Any] = Future()

    def finish(done: Future[Any]) -> None:
        try:
            error = done.exception()
            if error is None:
                result = done.result()
                composed.set_result(result if resulthook is None else resulthook(result))
            elif excepthook is None:
                composed.set_exception(error)
            else:
                result = excepthook(error)
                if isinstance(result, BaseException):
                    composed.set_exception(result)
                else:
                    composed.set_result(result)
        except BaseException as failure:
            composed.set_exception(failure)

    future.add_done_callback(finish)
    return composed


def run_main(main: Callable[[str], dict[str, Any]]) -> None:
    """Run a program on rank 0, while the other ranks work for its executors.

    Args:
        main: function that runs the program under a name, and returns its globals.
    """
    comm = MPI.COMM_WORLD.Dup()
    if comm.size == 1:
        main("__main__")
    elif comm.rank == 0:
        _Shared.workers = _Workers(comm)
        try:
            main("__main__")
        finally:
            _Shared.workers.close()
    else:
        # Functions of the program come by their names in __main__.
        program = types.ModuleType("__main__")
        program.__dict__.update(main("__worker__"))
        sys.modules["__main__"] = program
        _serve(comm, 0)
