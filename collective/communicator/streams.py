"""Work that goes on on a stream of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collective import cuda
from collective.contract.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from collective.cuda import Event, Stream
    from collective.memory.arrays import Adapter

__all__ = ["Near", "StreamWork", "joined", "nearest", "within"]

T = TypeVar("T")

#: By what a call runs: an array on a GPU, its adapter, and the streams of its other arrays.
Near = tuple[Any, "Adapter | None", "Sequence[Stream]"]


def nearest(arrays: Iterable[tuple[Any, Adapter]]) -> Near:
    """Return by what a call on these arrays runs, of which each is with its adapter."""
    found = [(array, adapter) for array, adapter in arrays if type(array) is not np.ndarray]
    if not found:
        return None, None, ()
    near, adapter = found[0]
    return near, adapter, list({array.stream for array, _ in found} - {near.stream})


def within(stream: Stream, function: Callable[[], T]) -> Callable[[], T]:
    """Return ``function`` with everything that it does to arrays of a GPU on ``stream``."""

    def inside() -> T:
        with cuda.on(stream):
            return function()

    return inside


def joined(stream: Stream, others: Sequence[Stream], function: Callable[[], T]) -> Callable[[], T]:
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
        finish: Callable[[Event, str, float | None], None],
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
            self._finish(self._event, self._what, timeout)
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
