"""What torch.distributed gets back from a call: works, with futures, and the queue they wait in."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

import collective
from collective.contract.work import Lane, Work
from collective.deadline import Deadline
from collective.request import call_site, in_thread

from .untraced import untraced

__all__ = [
    "LOSES_WORKS",
    "FutureCall",
    "GroupWork",
    "JoinedCalls",
    "Queue",
    "as_cpp_work",
    "called_by_torch",
    "in_backward",
]

# Its types change from version to version of torch.
_Base: Any = dist.distributed_c10d.Work
#: Returns -1 but while a backward pass calls.
in_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
# Before torch 2.7 C++ does not keep the Python part of a work that it is given, as by DDP's first
# broadcast, and waits for ever once that is gone (pull request 146376 of pytorch).
LOSES_WORKS: bool = torch.__version__ < (2, 7)  # type: ignore[operator]  # tuples are understood
# Whose frames a program's call is not in.
_PASSED_OVER = tuple(
    os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
    for package in (collective, torch)
)


class FutureCall(Work[Any]):
    """A call in the background that tells a future when it is over.

    Args:
        what: the operation, for errors.
        value: what the future holds in the end.
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
        """Make the call in this thread, as a lane does in its own."""
        self._run(function)

    def _end(self) -> None:
        super()._end()
        self._tell()

    def _tell(self) -> None:
        # Once: what ends the call and who asks for the future may both come here.
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
    """A call of torch.distributed's: over, or in the background.

    Args:
        tensors: what it writes to.
        work: the call, if it is in the background.
        source: the rank that a message is received from, or what tells it afterwards.
        event: what the current stream of a GPU has to wait for.
    """

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
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the results may be used; raise what the call raised.

        Args:
            timeout: zero waits for as long as the call's own deadline allows.

        Raises:
            CollectiveTimeoutError: ``timeout`` passed and the call goes on.
            CollectiveError: whatever the call raised.
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
        """Tell whether the call is over, well or badly, without waiting."""
        if self._work is not None and not self._work.done():
            return False
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def is_success(self) -> bool:
        """Tell whether the call is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the call raised, None if it went well or is running."""
        return None if self._work is None else self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that were written to."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that a message came from; -1 for anything else."""
        return self._source() if callable(self._source) else self._source

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value are the tensors that are written to."""
        devices: list[Any] = sorted({t.device for t in self._tensors if t.is_cuda}, key=str)
        if isinstance(self._work, FutureCall):
            future = self._work.future(devices)
            return future if in_backward() == -1 else _checked(future)
        if self._future is None:
            self._future = self._over(devices)
        return self._future

    def _over(self, devices: list[Any]) -> torch.futures.Future[Any]:
        """Return a future that is over."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)
            return future
        if in_backward() != -1 and self._tensors and not devices:
            # What set_result() leaves to C++ is an object of Python's, of which DDP's hooks in
            # C++ do not know that it is a list of tensors.
            return cast("torch.futures.Future[Any]", torch._C.fork(lambda: self._tensors))
        future.set_result(self._tensors)
        return future


@untraced
class JoinedCalls(GroupWork):
    """Several calls as one.

    Args:
        answers: the calls.
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
        return next((e for e in (each.exception() for each in self._answers) if e), None)


class Queue:
    """Runs calls in the order in which they were made: in the background, or here and now.

    Args:
        name: of its thread.
        timeout: seconds that :meth:`close` waits for what is still running.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self._lane = Lane(name)
        self._timeout = timeout
        self._inside = threading.local()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self._lane.idle

    def run(self, what: str, function: Callable[[], Any]) -> None:
        """Run a call and return when it is over.

        A callback of a future may make calls, too. They come right after the call whose future
        it is, on every rank alike.
        """
        if self._lane.idle or getattr(self._inside, "thread", False):
            outside = in_thread.site
            in_thread.site = call_site(_PASSED_OVER)
            try:
                function()
            finally:
                in_thread.site = outside
        else:
            self.start(what, function, None).wait()

    def start(self, what: str, function: Callable[[], Any], value: Any) -> Work[Any]:
        """Run a call after those made before, in the background."""
        task, site = FutureCall(what, value), call_site(_PASSED_OVER)

        def turn() -> Any:
            self._inside.thread = True
            in_thread.site = site
            return function()

        if getattr(self._inside, "thread", False):
            task.run(function)
            return task
        return self._lane.submit(what, turn, task)

    def close(self) -> None:
        """Wait for what is running, and see the thread off."""
        if not getattr(self._inside, "thread", False):
            self._lane.close(Deadline(self._timeout))


def called_by_torch() -> bool:
    """Tell whether the asker's file was entered from torch.distributed's Python, and not by C++."""
    frame = sys._getframe(1)
    entered = frame.f_code.co_filename
    while frame.f_code.co_filename == entered and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals is vars(dist.distributed_c10d)


def as_cpp_work(answer: GroupWork) -> Any:
    """Return an answer as a work of C++'s own, with a result or a RuntimeError and nothing else."""
    make: Any = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
    future = answer.get_future()
    return make(future if answer._work is None else _checked(future))


def _checked(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    # DDP's reducer takes the value for tensors and crashes on an exception, which is what
    # set_exception() leaves to C++. What a callback raises is an error there, too.
    return future.then(lambda done: done.value())
