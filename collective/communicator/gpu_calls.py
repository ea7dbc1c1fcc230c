"""What calls do for arrays on GPUs: where they are, and the streams that calls are enqueued on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from collective import cuda
from collective import request as request_module
from collective.contract.backend import Backend
from collective.contract.work import Lane, Work
from collective.errors import DeviceError
from collective.memory import dtypes, nested
from collective.memory.arrays import Adapter, adapter_of
from collective.memory.dtypes import DType
from collective.memory.through_host import Staged

if TYPE_CHECKING:
    from collective.cuda import Event, Stream

__all__ = ["GpuCalls", "View", "nearest", "to_the_end", "with_site", "within"]

Array = np.ndarray[Any, Any]
T = TypeVar("T")
#: By what a call runs: an array on a GPU, its adapter, and the streams of its other arrays.
Near = tuple[Any, "Adapter | None", "Sequence[Stream]"]
_UINT8 = dtypes.BY_NAME["uint8"]


class View(NamedTuple):
    """An array as the transport can have it.

    Attributes:
        adapter: makes results like it.
        array: its memory: NumPy's, or a ``DeviceArray``.
        dtype: its element type.
    """

    adapter: Adapter
    array: Array
    dtype: DType


class GpuCalls:
    """The part of a communicator that knows of GPUs.

    Attributes:
        _on_device: whether arrays of GPUs go to the transport as they are.
        _enqueues: whether calls on them are only enqueued.
        _gpu: this rank's GPU, once an array has been found to be there.
    """

    rank: int
    size: int
    timeout: float
    _backend: Backend
    _lane: Lane
    _on_device: bool
    _enqueues: bool
    _gpu: Any

    @property
    def _who(self) -> str:
        return f"[rank {self.rank} of {self.size}]"

    def _enqueue(
        self,
        what: str,
        run: Callable[[], T],
        async_op: bool,
        near: Any,
        adapter: Adapter,
        others: Sequence[Stream] = (),
    ) -> T | Work[T]:
        """Run a collective on arrays of a GPU; see :meth:`_go`."""
        device, current = near.device, near.stream
        stream = self._backend.side_stream(device) if async_op else current
        if others:
            run = _joined(stream, others, run)
            if not async_op and self._lane.idle:
                return run()
        enqueue = within(stream, run)
        if not async_op:
            # Between calls in the background that go through the host this one has its turn.
            return self._lane.submit(what, with_site(enqueue)).wait()
        stream.wait(current.record())
        work = self._stream_work(what, stream, current, adapter)
        if self._lane.idle and self._backend.ready:
            work._run(enqueue)
        else:
            self._lane.submit(what, with_site(enqueue), work)
        return work

    def _stream_work(
        self, what: str, side: Any, current: Any, adapter: Adapter
    ) -> _StreamWork[Any]:
        now = functools.partial(adapter.current_stream, current.device, current)
        backend = self._backend
        return _StreamWork(what, side, now, backend.synchronize_event, backend.keep_until)

    def _settle(self, what: str, array: Any, seconds: float) -> None:
        """In a lane's thread, wait on the host for what it has enqueued.

        There a call has ended up whose arrays only turned out to be on a GPU: whoever waits for
        it does not know the stream.
        """
        if not self._enqueues or isinstance(array, np.ndarray):
            return
        if request_module.in_thread.site is not None:
            self._backend.synchronize_event(array.effective_stream.record(), what, seconds)

    def _on_the_host(self, view: View) -> View:
        """Return an array on a GPU as a copy in host memory, and what copies results back."""
        array: Any = view.array
        # It may be the result of a call that is still in the background.
        self._lane.drain(self.timeout)
        if self._enqueues:
            array.stream.wait_for(self._backend.side_stream(array.device))
        return View(Staged(view.adapter, array.device), array.to_host(), view.dtype)

    def _check_device(self, what: str, array: Any) -> None:
        mine = self._backend.device
        # What is empty may not know where it is.
        if mine is not None and array.device is not mine and array.size:
            raise DeviceError(
                f"{what}: an array on cuda:{array.device.ordinal}; this rank's GPU is "
                f"cuda:{mine.ordinal} {self._who}. Copy it there, or choose another GPU with "
                "COLLECTIVE_DEVICE."
            )
        self._gpu = mine

    def _where(self, array: Any) -> str | None:
        """Return ``"cuda"`` if ranks whose arrays are not on GPUs cannot take part, else None."""
        return "cuda" if self._enqueues and not isinstance(array, np.ndarray) else None

    def _room(self, adapter: Adapter, nbytes: int, near: Any = None) -> Any:
        """Return that many bytes on this rank's GPU.

        Args:
            near: a DeviceArray, on whose stream they will be used if the framework has no
                current one.
        """
        stream = None if near is None else near.stream
        return adapter.empty((nbytes,), _UINT8, self._backend.device, stream)

    @staticmethod
    def _seen(like: Any) -> Any:
        """Return an array on a GPU as the transport sees it, None for whatever else it is."""
        if like is None or isinstance(like, (str, np.ndarray)) or nested.is_tree(like):
            return None
        array: Any = adapter_of(like).view(like)[0]
        return None if isinstance(array, np.ndarray) else array


def to_the_end(run: Callable[[], T], near: Any) -> Callable[[], T]:
    """Have the host wait for what ``run`` enqueues: the result may be used on another stream."""

    def finished() -> T:
        result = run()
        near.effective_stream.synchronize()
        return result

    return finished


def with_site(run: Callable[[], T]) -> Callable[[], T]:
    """Carry the caller's place in the program into the thread that runs the call."""
    site = request_module.call_site()

    def runwith_site() -> T:
        request_module.in_thread.site = site
        return run()

    return runwith_site


def nearest(views: Iterable[Any]) -> Near:
    """Return by what a call runs, of views or of what else has an array and its adapter."""
    found = [each for each in views if type(each.array) is not np.ndarray]
    if not found:
        return None, None, ()
    near = found[0].array
    return near, found[0].adapter, list({each.array.stream for each in found} - {near.stream})


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


class _StreamWork(Work[T]):
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
