"""Calls on GPU arrays: the streams that they run on, and the ``Work`` of calls in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from collective import cuda
from collective import request as request_module
from collective.contract.work import Work
from collective.deadline import Deadline
from collective.memory.arrays import Adapter

if TYPE_CHECKING:
    from collective.cuda import Event, Stream

    from .path import Path

T = TypeVar("T")


class Near(NamedTuple):
    """GPU array that determines the stream of a call.

    Attributes:
        array: the array, or its spot. The call is enqueued on the array's stream; an asynchronous
            call is enqueued on a side stream.
        adapter: adapter of the array's framework.
        others: streams of the call's other arrays.
    """

    array: Any
    adapter: Adapter
    others: Sequence[Stream] = ()


def nearest(views: Iterable[Any]) -> Near | None:
    """Return the GPU array that determines the stream of a call; None if no array is on a GPU.

    Args:
        views: objects with an ``array`` and its ``adapter``.
    """
    on_gpu = [view for view in views if type(view.array) is not np.ndarray]
    if not on_gpu:
        return None
    first = on_gpu[0].array
    others = {view.array.stream for view in on_gpu} - {first.stream}
    return Near(first, on_gpu[0].adapter, list(others))


def enqueue(path: Path, what: str, run: Callable[[], T], async_op: bool, near: Near) -> T | Work[T]:
    """Enqueue a collective call on GPU arrays.

    Args:
        what: the operation, for errors.
        run: function that makes the call.
        async_op: if true, return a ``Work`` at once, and enqueue the call on a side stream.
    """
    device, current = near.array.device, near.array.stream
    stream = path.backend.side_stream(device) if async_op else current
    if near.others:
        run = _joined(stream, near.others, run)
        if not async_op and path.lane.idle:
            return run()
    inside = within(stream, run)
    if not async_op:
        # Background calls that go through the host may be waiting in the lane. This call must have
        # its turn after them.
        return path.lane.submit(what, with_site(inside)).wait()
    stream.wait(current.record())
    work = stream_work(path, what, stream, current, near.adapter)
    if path.lane.idle and path.backend.ready:
        work._run(inside)
    else:
        path.lane.submit(what, with_site(inside), work)
    return work


def stream_work(
    path: Path, what: str, side: Any, current: Any, adapter: Adapter
) -> StreamWork[Any]:
    """Return the ``Work`` of an operation that runs on the stream ``side``."""
    now = partial(adapter.current_stream, current.device, current)
    backend = path.backend
    return StreamWork(what, side, now, backend.synchronize_event, backend.keep_until)


def settle(path: Path, what: str, array: Any, deadline: Deadline) -> None:
    """Wait on the host, if in a lane's thread, until the GPU has completed this thread's work.

    It is for calls that find only while they run that their array is on a GPU. The caller, which
    waits for the lane, does not know the stream.
    """
    if not path.enqueues or isinstance(array, np.ndarray):
        return
    if request_module.in_thread.site is not None:
        event = array.effective_stream.record()
        path.backend.synchronize_event(event, what, deadline)


def synchronized(run: Callable[[], T], array: Any) -> Callable[[], T]:
    """Return a function that calls ``run`` and waits on the host for the work that it enqueues.

    The caller may then use the result on another stream.
    """

    def run_to_the_end() -> T:
        result = run()
        array.effective_stream.synchronize()
        return result

    return run_to_the_end


def with_site(run: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls ``run`` with the caller's place in the program as call site.

    The function runs in a lane's thread, where the caller's frames cannot be seen.
    """
    site = request_module.call_site()

    def run_with_site() -> T:
        request_module.in_thread.site = site
        return run()

    return run_with_site


def within(stream: Stream, function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls ``function`` with ``stream`` as the current GPU stream."""

    def inside() -> T:
        with cuda.on(stream):
            return function()

    return inside


def _joined(stream: Stream, others: Sequence[Stream], function: Callable[[], T]) -> Callable[[], T]:
    """Return ``function`` with synchronisation between ``stream`` and the other streams.

    Work that ``function`` enqueues on ``stream`` waits for the present work of the other streams.
    Their later work waits for its end.
    """
    for other in others:
        stream.wait_for(other)

    def inside() -> T:
        result = function()
        for other in others:
            other.wait_for(stream)
        return result

    return inside


class StreamWork(Work[T]):
    """Operation on GPU arrays that is enqueued on a side stream, beside the caller's stream.

    Args:
        what: the operation, for errors.
        side: stream that the operation runs on.
        current: function that returns the calling thread's current stream.
        finish: function that waits on the host for an event until a deadline, and raises the
            error if the operation failed.
        keep: function that keeps a reference to an object until an event has completed. Without a
            reference, a framework would reuse the memory although the side stream still uses it.
    """

    def __init__(
        self,
        what: str,
        side: Stream,
        current: Callable[[], Stream],
        finish: Callable[[Event, str, Deadline], None],
        keep: Callable[[Event, object], None],
    ) -> None:
        super().__init__(what)
        self._side = side
        self._current = current
        self._finish = finish
        self._keep = keep
        self._event: Event | None = None

    def wait(self, timeout: float | None = None) -> T:
        """Make the caller's current stream wait until the operation is over; return its result.

        Work that is enqueued on that stream afterwards can use the result. The host waits only
        until the operation has been enqueued.

        Args:
            timeout: seconds that the host may wait.

        Raises:
            CollectiveTimeoutError, CollectiveError: as :meth:`Work.wait`. :meth:`synchronize` and
                later calls raise errors that occur on the GPU.
        """
        result = super().wait(timeout)
        if self._event is not None:
            self._current().wait(self._event)
        return result

    def synchronize(self, timeout: float | None = None) -> T:
        """Wait, on the host, until the operation is over on the GPU; return its result.

        Raises:
            CollectiveTimeoutError: ``timeout`` or the operation's own deadline expired.
            CollectiveError: the operation failed, on the host or on the GPU.
        """
        result = super().wait(timeout)
        if self._event is not None:
            deadline = Deadline.never() if timeout is None else Deadline(timeout)
            self._finish(self._event, self._what, deadline)
        return result

    def done(self) -> bool:
        """Return whether the operation has completed or failed on the GPU, without waiting."""
        return super().done() and (self._event is None or self._event.query())

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._result = result = function()
            self._event = event = self._side.record()
            self._keep(event, (function, result))
        except BaseException as error:  # wait() raises it in the thread that waits
            self._error = error
        self._end()
