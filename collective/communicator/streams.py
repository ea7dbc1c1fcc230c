"""Calls on arrays of a GPU: the streams that they run on, and the ``Work`` of those under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from collective import cuda
from collective import request as request_module
from collective.contract.backend import Backend
from collective.contract.work import Lane, Work
from collective.deadline import Deadline
from collective.memory.arrays import Adapter

if TYPE_CHECKING:
    from collective.cuda import Event, Stream

__all__ = [
    "Near", "StreamWork", "enqueue", "nearest", "settle", "stream_work", "synchronized",
    "with_site", "within",
]  # fmt: skip

T = TypeVar("T")


class Enqueuing(Protocol):
    """What is needed of a path."""

    backend: Backend
    lane: Lane
    enqueues: bool


class Near(NamedTuple):
    """By which array of a GPU a call runs.

    Attributes:
        array: the array, or its spot. To run the call means to enqueue it on the array's stream;
            an asynchronous call goes on a stream beside that.
        adapter: of its framework.
        others: the streams of the call's other arrays.
    """

    array: Any
    adapter: Adapter
    others: Sequence[Stream] = ()


def nearest(views: Iterable[Any]) -> Near | None:
    """Return by what a call runs; None if no array is on a GPU.

    Args:
        views: objects with an ``array`` and its ``adapter``.
    """
    on_gpu = [view for view in views if type(view.array) is not np.ndarray]
    if not on_gpu:
        return None
    first = on_gpu[0].array
    others = {view.array.stream for view in on_gpu} - {first.stream}
    return Near(first, on_gpu[0].adapter, list(others))


def enqueue(
    path: Enqueuing, what: str, run: Callable[[], T], async_op: bool, near: Near
) -> T | Work[T]:
    """Run a collective call on arrays of a GPU, which enqueues it.

    Args:
        what: the operation, for errors.
        run: makes the call.
        async_op: return a ``Work`` at once, and enqueue beside the caller's stream.
    """
    device, current = near.array.device, near.array.stream
    stream = path.backend.side_stream(device) if async_op else current
    if near.others:
        run = _joined(stream, near.others, run)
        if not async_op and path.lane.idle:
            return run()
    inside = within(stream, run)
    if not async_op:
        # Between calls in the background that go through the host this one has its turn.
        return path.lane.submit(what, with_site(inside)).wait()
    stream.wait(current.record())
    work = stream_work(path, what, stream, current, near.adapter)
    if path.lane.idle and path.backend.ready:
        work._run(inside)
    else:
        path.lane.submit(what, with_site(inside), work)
    return work


def stream_work(
    path: Enqueuing, what: str, side: Any, current: Any, adapter: Adapter
) -> StreamWork[Any]:
    """Return the ``Work`` of an operation that runs on the stream ``side``."""
    now = partial(adapter.current_stream, current.device, current)
    backend = path.backend
    return StreamWork(what, side, now, backend.synchronize_event, backend.keep_until)


def settle(path: Enqueuing, what: str, array: Any, deadline: Deadline) -> None:
    """In a lane's thread, wait on the host for what the thread has enqueued.

    A call has ended up there whose arrays only turned out to be on a GPU: whoever waits for it
    does not know the stream.
    """
    if not path.enqueues or isinstance(array, np.ndarray):
        return
    if request_module.in_thread.site is not None:
        event = array.effective_stream.record()
        path.backend.synchronize_event(event, what, deadline)


def synchronized(run: Callable[[], T], array: Any) -> Callable[[], T]:
    """Have the host wait for what ``run`` enqueues: the result may be used on another stream."""

    def run_to_the_end() -> T:
        result = run()
        array.effective_stream.synchronize()
        return result

    return run_to_the_end


def with_site(run: Callable[[], T]) -> Callable[[], T]:
    """Carry the caller's place in the program into the thread that runs the call."""
    site = request_module.call_site()

    def run_with_site() -> T:
        request_module.in_thread.site = site
        return run()

    return run_with_site


def within(stream: Stream, function: Callable[[], T]) -> Callable[[], T]:
    """Return ``function`` with everything that it does to arrays of a GPU on ``stream``."""

    def inside() -> T:
        with cuda.on(stream):
            return function()

    return inside


def _joined(stream: Stream, others: Sequence[Stream], function: Callable[[], T]) -> Callable[[], T]:
    """Have what ``function`` puts on ``stream`` wait for others, and those wait for its end."""
    for other in others:
        stream.wait_for(other)

    def inside() -> T:
        result = function()
        for other in others:
            other.wait_for(stream)
        return result

    return inside


class StreamWork(Work[T]):
    """An operation on arrays of a GPU, enqueued on a stream beside the caller's.

    Args:
        what: the operation, for errors.
        side: the stream it runs on.
        current: returns the stream on which the calling thread enqueues what it does next.
        finish: waits on the host for an event, for some seconds, and raises what went wrong.
        keep: keeps a reference until an event has come. Frameworks give memory to others when
            nobody refers to it, whatever this stream still does with it.
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

        What is enqueued on that stream afterwards finds the result. The host waits only until
        the operation has been enqueued.

        Args:
            timeout: seconds for that.

        Raises:
            CollectiveTimeoutError, CollectiveError: as :meth:`Work.wait`. What goes wrong on
                the GPU is raised by :meth:`synchronize` and by later calls.
        """
        result = super().wait(timeout)
        if self._event is not None:
            self._current().wait(self._event)
        return result

    def synchronize(self, timeout: float | None = None) -> T:
        """Wait, on the host, until the operation is over on the GPU; return its result.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed, or the operation's own deadline.
            CollectiveError: what went wrong, on the GPU too.
        """
        result = super().wait(timeout)
        if self._event is not None:
            deadline = Deadline.never() if timeout is None else Deadline(timeout)
            self._finish(self._event, self._what, deadline)
        return result

    def done(self) -> bool:
        """Tell whether the operation is over on the GPU, well or badly, without waiting."""
        return super().done() and (self._event is None or self._event.query())

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._result = result = function()
            self._event = event = self._side.record()
            self._keep(event, (function, result))
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self._end()
