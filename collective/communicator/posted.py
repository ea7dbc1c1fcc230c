"""Works of messages that are in flight without a thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from collective.contract.mail import EXACTLY, FAILED, PENDING, use
from collective.contract.work import Work
from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from .path import Path

#: A message in steps: each yields the posted operations that it waits for, and the last one returns
#: the result.
Steps = Generator[Sequence[Any], None, Any]


class _Begins:
    """Stand-in for the operations of a message that are being posted for the first time."""

    done, state = False, PENDING


# Seconds between two looks of a wait that must not break the communicator when its time has passed.
_LOOK_S = 1e-3


def post_send(path: Path, data: Any, dst: int, tag: int) -> Any:
    """Post a send of an array over the engine of a path's transport."""
    return _posted(path, path.mail.send(data, dst, tag), f"send(tag={tag})")


def post_receive(path: Path, memory: Any, src: int, tag: int) -> Any:
    """Post a receive into an array over the engine of a path's transport."""
    return _posted(path, path.mail.receive(memory, src, tag, EXACTLY, False), f"recv(tag={tag})")


def _posted(path: Path, posted: Any, what: str) -> Any:
    if posted is NotImplemented:
        path.mail.refuse(what)
        path.refuse_broken(what)
    return posted


class PostedWork(Work[Any]):
    """Handle of a message in flight, whose steps the waits of this process take.

    A receive takes two steps if an array follows the head. All receives with one tag take their
    steps in the order in which they were posted, so each gets the array behind its own head.

    Args:
        path: path of the communicator.
        what, tag: the call, for errors, and its tag.
        steps: the message; its first operations are posted at once.
        receives: whether the message is a receive, so that others must not overtake it.
        seconds: timeout of the call, which begins with :meth:`wait`.
    """

    def __init__(
        self, path: Path, what: str, tag: int, steps: Steps, receives: bool,
        seconds: float | Deadline,
    ) -> None:  # fmt: skip
        super().__init__(what)
        use(path)
        self._path = path
        self._mail = path.mail  # until the end, even if the path is closed before
        self._tag = tag
        self._steps = steps
        self._seconds = seconds
        self._items: Sequence[Any] = (_Begins,)  # so no other thread takes the first step
        if receives:
            path.enlist(tag, self)
        self._step()

    def _step(self) -> None:
        """Post the next operations; set the result after the last one."""
        try:
            for item in self._items:
                if item.state == FAILED and (mail := self._mail) is not None:
                    mail.explain(item)
            self._items = tuple(next(self._steps))
            return
        except StopIteration as last:
            self._result = last.value
        except Exception as error:  # raised by wait()
            self._fail(error)
            return
        except BaseException as error:  # it belongs to whoever takes the step, too
            self._fail(error)
            raise
        self._finish()

    def _fail(self, error: BaseException) -> None:
        self._path.note_failure(error)
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._items, self._mail = (), None
        self._end()
        self._path.retire(self._tag, self)

    def take_steps(self) -> None:
        """Take all steps that are possible without waiting."""
        while not self._over and all(item.done for item in self._items):
            self._step()

    def _advance(self) -> None:
        """Take the steps of this message, and before them those of the earlier receives."""
        path = self._path
        path.take_steps([*path.receives_before(self._tag, self), self])

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until the message has been sent or received; see :meth:`Work.wait`.

        Without a ``timeout``, that of the message begins with this call.
        """
        self._advance()
        deadline = Deadline.of(self._seconds if timeout is None else timeout)
        while not self._over:
            if timeout is None:
                self._wait_for_items(deadline)
            elif deadline.expired:
                raise CollectiveTimeoutError(
                    f"wait: timed out: {self._what} is still running after {timeout:g} s; wait "
                    "again, or abort() the communicator."
                )
            else:
                self._wait_a_moment(deadline)
            self._advance()
        return super().wait()

    def finish(self, limit: float | Deadline) -> Any:
        """Wait within the deadline of a call that has begun, and return the result."""
        self._advance()
        while not self._over:
            self._wait_for_items(Deadline.of(limit))
            self._advance()
        return super().wait()

    def settle(self, deadline: Deadline) -> None:
        """Wait as :meth:`wait` does, but only until a deadline; ``wait`` raises the error."""
        with contextlib.suppress(Exception):
            self.finish(deadline.within(Deadline.of(self._seconds).left()))

    # A thread that ends the work drops the engine a moment before the work is over. So all others
    # read the attribute once. Without an engine there is nothing to wait for.

    def _wait_for_items(self, deadline: Deadline) -> None:
        mail = self._mail
        if mail is None:
            time.sleep(0)
            return
        try:
            mail.wait(self._items, False, deadline)
        except BaseException as error:
            self._fail(error)

    def _wait_a_moment(self, deadline: Deadline) -> None:
        until, mail = Deadline(deadline.at_most(_LOOK_S)), self._mail
        while mail is not None and not until.expired:
            mail.progress()
            if all(item.done for item in self._items):
                return
            time.sleep(0)

    def done(self) -> bool:
        """Tell, without waiting, whether the message has succeeded or failed."""
        mail = self._mail
        if mail is not None:
            mail.progress()
            self._advance()
        return self._over
