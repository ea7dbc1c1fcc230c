"""Results of calls for torch.distributed: works, their futures, and the queue of the calls."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from collective import UnsupportedError, Work
from collective.contract.work import Lane
from collective.inner import Deadline
from collective.request import call_site, in_thread

from .untraced import untraced

# Untyped, because the type annotations of this class differ between versions of torch.
_Base: Any = dist.distributed_c10d.Work
#: Function that returns -1, except within a backward pass.
in_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
# Before torch 2.7, C++ code does not keep the Python part of a work alive, for example in the first
# broadcast of DDP. Once the Python part is gone, C++ waits without end (pytorch pull request
# 146376).
LOSES_WORKS: bool = torch.__version__ < (2, 7)  # type: ignore[operator]  # it compares with tuples
# Work of this thread that get_future() has found behind a C++ work; see reach_held_works().
_asked = threading.local()


class FutureCall(Work[Any]):
    """Call in the background that completes a future at its end.

    Args:
        what: name of the operation, for errors.
        value: value of the future.
    """

    def __init__(self, what: str, value: Any) -> None:
        super().__init__(what)
        self._value = value
        self._guard = threading.Lock()
        self._resolved = False
        self._future: torch.futures.Future[Any] | None = None

    def future(self, devices: Sequence[torch.device]) -> torch.futures.Future[Any]:
        """Return the future of this call, always the same one."""
        with self._guard:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future(devices=list(devices))
        if self._over:
            self._tell()
        return self._future

    def run(self, function: Callable[[], Any]) -> None:
        """Make the call in this thread, in the way that a lane makes it in the lane's thread."""
        self._run(function)

    def _end(self) -> None:
        super()._end()
        self._tell()

    def _tell(self) -> None:
        # The thread that ends the call and a thread that requests the future may both get here, but
        # only one of them may complete the future.
        with self._guard:
            future = None if self._resolved else self._future
            self._resolved = future is not None or self._resolved
        if future is None:
            return
        if self._error is None:
            future.set_result(self._value)
        else:
            future.set_exception(self._error)


@untraced
class GroupWork(_Base):  # type: ignore[misc]
    """Call of torch.distributed that has completed, or runs in the background.

    Args:
        tensors: tensors that the call writes to.
        work: the call, if it runs in the background.
        source: rank that sends the message, or a function that returns this rank afterwards.
        event: event that a GPU's current stream has to wait for.
    """

    _future: torch.futures.Future[Any] | None = None

    def __init__(
        self,
        tensors: Sequence[torch.Tensor] = (),
        work: Work[Any] | None = None,
        source: int | Callable[[], int] = -1,
        event: torch.cuda.Event | None = None,
    ) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._work = work
        self._source = source
        self._event = event

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the results may be used; if the call raised an error, raise it here.

        Args:
            timeout: longest time to wait; zero waits until the call's own deadline.

        Raises:
            CollectiveTimeoutError: ``timeout`` has expired, and the call continues.
            CollectiveError: error of the call.
        """
        if self._work is not None:
            seconds = timeout.total_seconds()
            self._work.wait(seconds if seconds > 0 else None)
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has completed, with or without an error; do not wait."""
        if self._work is not None and not self._work.done():
            return False
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def is_success(self) -> bool:
        """Return whether the call has completed without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the call; None if there was no error, or if the call still runs."""
        return None if self._work is None else self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that the call has written to."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that sent the message; -1 if the call is no receive."""
        return self._source() if callable(self._source) else self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of tensors that the call writes to."""
        if hasattr(_asked, "found"):
            _asked.found = self
            return _no_future()
        devices: list[Any] = sorted({t.device for t in self._tensors if t.is_cuda}, key=str)
        if isinstance(self._work, FutureCall):
            future = self._work.future(devices)
            return future if in_backward() == -1 else _checked(future)
        if self._future is None:
            self._future = self._over(devices)
        return self._future

    def _over(self, devices: list[Any]) -> torch.futures.Future[Any]:
        """Wait for the call, and return a completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)
            return future
        if in_backward() != -1 and self._tensors and not devices:
            # set_result() stores a Python object in the C++ future, and DDP's C++ hooks do not
            # recognise this object as a list of tensors. fork() stores a typed list.
            return cast("torch.futures.Future[Any]", torch._C.fork(lambda: self._tensors))
        future.set_result(self._tensors)
        return future


@untraced
class JoinedCalls(GroupWork):
    """Several calls that are waited for together.

    Args:
        answers: works of the calls.
    """

    def __init__(self, answers: Sequence[GroupWork]) -> None:
        super().__init__([tensor for answer in answers for tensor in answer._tensors])
        self._answers = answers

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for answer in self._answers:
            answer.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(answer.is_completed() for answer in self._answers)

    def exception(self) -> BaseException | None:
        return next((e for e in (answer.exception() for answer in self._answers) if e), None)


class Queue:
    """Queue that runs calls in the order in which they are made, in a thread or synchronously.

    Args:
        name: name of the queue's thread.
        timeout: seconds that :meth:`close` waits for running calls.
        fail: function that breaks the group for all ranks, with an error.
        delivers: whether other ranks need the calls; see :class:`Lane`.
    """

    def __init__(
        self, name: str, timeout: float, fail: Callable[[Exception], None], delivers: bool = True
    ) -> None:
        self._fail = fail
        self._turn = threading.Lock()
        self._running: tuple[str, int, str | None] = "", 0, ""
        self._lane = Lane(name)
        self._lane.delivers = delivers
        self._timeout = timeout
        self._inside = threading.local()

    @property
    def idle(self) -> bool:
        """Whether no call is queued or running."""
        return self._lane.idle

    def run(self, what: str, function: Callable[[], Any]) -> None:
        """Run a call, and return when it has completed.

        A callback of a future may make calls as well. On every rank, these calls run immediately
        after the call that the future belongs to.
        """
        if self._lane.idle or getattr(self._inside, "thread", False):
            self._run_alone(what, function)
        else:
            self.start(what, function, None).wait()

    def start(self, what: str, function: Callable[[], Any], value: Any) -> Work[Any]:
        """Run a call in the background, after all earlier calls."""
        task, site = FutureCall(what, value), call_site()
        if torch.is_inference_mode_enabled():  # the thread does not know, and must write to results
            function = torch.inference_mode()(function)

        def turn() -> Any:
            self._inside.thread = True
            in_thread.site = site
            return self._run_alone(what, function)

        if getattr(self._inside, "thread", False):
            task.run(function)
            return task
        return self._lane.submit(what, turn, task)

    def _run_alone(self, what: str, function: Callable[[], Any]) -> Any:
        """Run a call, unless another thread is in a call that it has made synchronously."""
        if not self._turn.acquire(blocking=False):
            # Other ranks may make the two calls in the other order, and results would be mixed.
            error = UnsupportedError(
                f"{_named(what, threading.get_ident(), call_site())}: the process group is in "
                f"{_named(*self._running)} (expected one thread for each "
                "group, because all ranks must make their calls in one order). Give this thread a "
                "group of its own, dist.new_group(); for checkpoints pass it to "
                "async_save(..., process_group=group)."
            )
            self._fail(error)
            raise error
        try:
            self._running = what, threading.get_ident(), in_thread.site
            return function()
        finally:
            self._turn.release()

    def close(self) -> None:
        """Wait for running calls that other ranks need, and end the thread when it is idle."""
        if not getattr(self._inside, "thread", False):
            self._lane.close(Deadline(self._timeout if self._lane.delivers else 0.0))


def _named(what: str, thread: int, site: str | None) -> str:
    """Return the name of a call with its thread and its place in the program.

    Args:
        site: place of the call; None if the thread's own frames show it.
    """
    name = next((other.name for other in threading.enumerate() if other.ident == thread), "?")
    if site is None:
        frame = sys._current_frames().get(thread)
        site = "" if frame is None else call_site(frame=frame)
    return f"{what} in thread {name} at {site}"


@functools.cache
def reach_held_works() -> None:
    """Make works answer that C++ holds for a backend written in Python.

    torch wraps such a work in a C++ object that passes only ``wait`` and ``get_future`` on: it
    never says that it has completed, and has no result, error or source. Its future has an error
    as its value.
    """
    future_of, names = _Base.get_future, "is_completed is_success exception result get_future"
    for name in f"{names} source_rank _source_rank".split():
        setattr(_Base, name, _reaching(name, getattr(_Base, name), future_of))


def _reaching(
    name: str, by_torch: Callable[[Any], Any], future_of: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    @functools.wraps(by_torch)
    def method(work: Any) -> Any:
        held = _held(work, future_of) if type(work) is _Base else None
        return by_torch(work) if held is None else getattr(held, name)()

    return method


def _held(work: Any, future_of: Callable[[Any], Any]) -> GroupWork | None:
    """Return the work that a C++ work holds; None if the C++ work is of another backend."""
    _asked.found = None
    try:
        future_of(work)
    except RuntimeError:  # a work of C++ that has no future
        return None
    else:
        found: GroupWork | None = _asked.found
        return found
    finally:
        del _asked.found


@functools.cache
def _no_future() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(None)
    return future


def called_by_torch() -> bool:
    """Return whether torch.distributed's Python code called into the caller's file, and not C++."""
    frame = sys._getframe(1)
    entered = frame.f_code.co_filename
    while frame.f_code.co_filename == entered and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals is vars(dist.distributed_c10d)


def as_cpp_work(answer: GroupWork) -> Any:
    """Return a C++ work for an answer; it holds only a result or a RuntimeError."""
    make: Any = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
    future = answer.get_future()
    return make(future if answer._work is None else _checked(future))


def _checked(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    # set_exception() stores the exception as the value of the C++ future. DDP's reducer would use
    # this value as tensors, and crash. If a callback raises the exception, C++ gets an error.
    return future.then(lambda done: done.value())
