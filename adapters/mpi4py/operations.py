"""What requests name: messages that are posted at once, and what follows them; ``MPI.Status``.

No operation posts anything later than at its start. So an operation of this rank never waits for
this rank to come back to it, except to move bytes, which every call does.
"""

from __future__ import annotations

import array
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from collective import CollectiveError
from collective.contract.mail import CANCELLED, OVER

from .datatypes import CONSTANTS, Datatype
from .exceptions import CLASSES, TRANSLATED, MPIError, guarded, translated
from .groups import UNDEFINED
from .handles import OpaqueObject, name_methods
from .layouts import Piece
from .pickling import loads

ANY_SOURCE, ANY_TAG = -1, -1
_Fields = tuple[int, int, int, int, bool]
#: Source, tag, error, length, and whether it was cancelled: what a status without a message says.
EMPTY: _Fields = (ANY_SOURCE, ANY_TAG, CLASSES["SUCCESS"], 0, False)


def _field(index: int, kind: type, what: str) -> tuple[Any, Any, Any]:
    """Return the functions that get and set a field of a status, and its property."""

    def get(self: Any) -> Any:
        return kind(self._fields[index])

    def put(self: Any, value: int) -> None:
        self._fields[index] = value

    get.__doc__, put.__doc__ = f"Return {what}.", f"Set {what}."
    return get, put, property(get, put)


@name_methods
class Status:
    """Source, tag, length and error of a message.

    Args:
        status: a status to copy.
    """

    __slots__ = ("__dict__", "__weakref__", "_fields")
    _fields: array.array[int]
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, status: Status | None = None) -> None:
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"Status: expected Status, got {type(status).__name__}")
        self._fields = array.array("q", EMPTY if status is None else status._fields)

    Get_source, Set_source, source = _field(0, int, "the rank of the sender")
    Get_tag, Set_tag, tag = _field(1, int, "the tag")
    Get_error, Set_error, error = _field(2, int, "the error code")
    _, _, count = _field(3, int, "the length in bytes")
    Is_cancelled, Set_cancelled, cancelled = _field(4, bool, "whether the message was cancelled")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and self._fields == other._fields

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).f2py, (self.py2f(),)

    def Get_count(self, datatype: Datatype = CONSTANTS["BYTE"]) -> int:
        """Return the number of elements, or ``UNDEFINED`` if it is not whole."""
        size = datatype._live.size
        count, rest = divmod(self.count, size) if size else (0, self.count)
        return UNDEFINED if rest else count

    def Get_elements(self, datatype: Datatype) -> int:
        """Return the number of basic elements, or ``UNDEFINED``."""
        count, rest = datatype._live.basic_elements(self.count)
        return UNDEFINED if rest else count

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the length to ``count`` elements."""
        self.count = count * datatype._live.size

    def tomemory(self) -> memoryview:
        """Return the status's own memory."""
        return memoryview(self._fields)

    def py2f(self) -> list[int]:
        """Return the fields."""
        return list(self._fields)

    @classmethod
    def f2py(cls, arg: list[int]) -> Any:
        """Return a status with these fields."""
        status = cls()
        status.put(arg)
        return status

    def put(self, fields: Iterable[int]) -> None:
        """Set source, tag, error, length and whether the message was cancelled."""
        self._fields[:] = array.array("q", fields)


class Operation(OpaqueObject):
    """Messages that a call posts, and functions that follow once all are done.

    Args:
        plan: function of the operation that posts its messages; each start calls it.
        mail: messages of a communicator; None if there are none.
        tag: their tag.

    Attributes:
        active: whether a call waits for it, from its start on.
        done: whether it is complete.
        persistent: whether it can be started again.
        result: a received object.
        error: the exception that completed it.
        fields: what its status says.
        posted: the messages in flight.
    """

    # Most operations differ from these in little, and are made for each message.
    persistent = False
    active = False
    done = False
    result: Any = None
    error: MPIError | None = None
    fields: _Fields = EMPTY
    posted: Any = ()
    # The receive that the status describes, and the messages that answer a synchronous send.
    _received: Any = None
    _answers: Any = None
    _is_object = False
    _afterwards: tuple[Callable[[], object], ...] = ()

    def __init__(
        self, plan: Callable[[Operation], object] | None = None, mail: Any = None, tag: int = 0
    ) -> None:
        self._plan = plan
        self.mail = mail
        self.tag = tag

    def start(self) -> Operation:
        """Post the messages; return the operation."""
        if self.active:
            raise MPIError(CLASSES["ERR_REQUEST"], "Start: the request is active")
        self.done, self.error = False, None
        if self._plan is not None:
            self.posted = []
            with TRANSLATED:
                self._plan(self)
        self.active = True
        return self

    def run(self, status: Status | None = None) -> Any:
        """Post the messages, wait for them and fill a status; return the received object."""
        self.start().wait()
        return self.settle(status)

    # -- what a plan calls -------------------------------------------------------------------

    def send(self, data: Any, dst: int, asks: bool = False) -> None:
        """Post a send of packed bytes, whose receiver answers if ``asks`` is true."""
        self.posted += (self.mail.send(data if len(data) else None, dst, self.tag, asks),)

    def receive(self, piece: Piece | None, src: int) -> Any:
        """Post a receive into a piece; without one, ``data`` of the result has what comes."""
        memory: Any = None if piece is None else piece.direct
        if piece is not None and memory is None:  # the elements have gaps
            memory = bytearray(piece.nbytes)
            self.then(lambda: piece.unpack(memoryview(memory)[: posted.nbytes]))
        if memory is not None and not len(memory):
            memory = bytearray()
        posted = self.mail.receive(memory, src, self.tag)
        self.posted += (posted,)
        return posted

    def then(self, function: Callable[[], object]) -> None:
        """Call a function once all is done."""
        self._afterwards += (function,)

    def follow(self, received: Any, answers: Any, is_object: bool) -> None:
        """Let the status describe a receive, and answer it if it is of a synchronous send.

        Args:
            received: the receive.
            answers: messages that answer synchronous sends.
            is_object: whether the object of the message is the operation's result.
        """
        self._received, self._answers, self._is_object = received, answers, is_object
        _outstanding.add(self)

    # -- what requests call ------------------------------------------------------------------

    def advance(self) -> bool:
        """Complete the operation if it can be without waiting; return whether it is complete."""
        if not self.done:
            for posted in self.posted:
                if not posted.done:
                    self._answer()
                    return False
            self._complete()
        return self.done

    def wait(self) -> None:
        """Wait for the operation."""
        if not self.advance():
            # Meanwhile this rank may have to answer: other receives, or its own beside a send.
            others = len(_outstanding) - (self in _outstanding)
            if others or not self.posted or (self._received is not None and len(self.posted) > 1):
                wait_for([self])
            else:
                self._complete()

    def _complete(self) -> None:
        self.done = True
        received = self._received
        if received is not None:
            _outstanding.discard(self)
        try:
            for posted in self.posted:
                if not posted.whole:
                    self.mail.wait_all(self.posted)
                    break
            if self._is_object and received.state != CANCELLED:
                self.result = loads(received.data)
            for function in self._afterwards:
                function()
        except MPIError as error:
            self.error = error
        except CollectiveError as error:
            self.error = translated(error)
            self.error.__cause__ = error
        finally:
            # Memory of the program stays no longer than needed.
            self.posted = self._afterwards = ()
        self._answer()

    def _answer(self) -> None:
        """Answer the send of the received message, once, if it is synchronous."""
        answers = self._answers
        if answers is not None and self._received.done:
            self._answers = None
            if self._received.tag & self.mail.WANTS_ANSWER:
                answer(self.mail, answers, self._received)

    def settle(self, status: Status | None) -> Any:
        """Fill a status of the complete operation; return the received object, or raise."""
        if status is not None:
            self.fill(status)
        if self.error is not None:
            raise self.error
        return self.result

    def fill(self, status: Status) -> None:
        """Fill a status of the complete operation."""
        received, (source, tag, code, nbytes, cancelled) = self._received, self.fields
        if self.error is not None:
            code = self.error.ierr
        if received is not None:
            if received.state in (OVER, CANCELLED):
                source, tag, nbytes = self.mail.status(received)
            cancelled = received.state == CANCELLED
        status.put((source, tag, code, nbytes, cancelled))

    def retire(self) -> None:
        """Forget an operation whose request is cleared before a call has waited for it."""

    def cancel(self) -> None:
        """Withdraw the receive if it has met no message."""
        if self._received is not None and not self.done:
            self.mail.cancel(self._received)


class General(Operation):
    """Operation that the program itself completes.

    Args:
        query, free, cancel: functions that fill its status, free it and cancel it, or None.
        args, kwargs: further arguments of these functions.
    """

    active = True

    def __init__(self, query: Any, free: Any, cancel: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self._functions = query, free, cancel
        self._arguments = tuple(args or ()), dict(kwargs or {})

    def _call(self, function: Any, *first: Any) -> None:
        if function is not None:
            args, kwargs = self._arguments
            guarded(function, *first, *args, **kwargs)

    def advance(self) -> bool:
        return self.done

    def settle(self, status: Status | None) -> Any:
        try:
            return super().settle(Status() if status is None else status)
        finally:
            self.retire()

    def fill(self, status: Status) -> None:
        status.put(EMPTY)
        self._call(self._functions[0], status)

    def retire(self) -> None:
        self._call(self._functions[1])

    def cancel(self) -> None:
        self._call(self._functions[2], self.done)


def begun(
    context: Any, posted: Any, is_receive: bool = False, is_object: bool = False
) -> Operation:  # fmt: skip
    """Return the active operation of a posted message of a communicator's context."""
    operation = Operation(None, context.points)
    operation.posted, operation.active = (posted,), True
    if is_receive:
        operation.follow(posted, context.answers, is_object)
    return operation


def idle(source: int = ANY_SOURCE) -> Operation:
    """Return an operation without a message, from ``source`` as its status says."""
    operation = Operation()
    operation.fields = (source, *EMPTY[1:])
    return operation


def answer(mail: Any, answers: Any, received: Any) -> None:
    """Answer the synchronous send of a received message."""
    status = mail.status(received)
    answers.send(None, status.source, status.tag)


# Receives of messages of the program that are not complete. While this rank waits for something
# else, it completes them, since another rank may wait for the answer.
_outstanding: set[Operation] = set()


def await_posted(mail: Any, *posted: Any) -> None:
    """Wait for messages, and meanwhile complete the receives that the program has begun."""
    if _outstanding:
        operation = Operation(None, mail)
        operation.posted = posted
        wait_for([operation])
        operation.settle(None)
    else:
        mail.wait_all(posted)


def progress(operations: Sequence[Operation]) -> None:
    """Move what can move of these operations. Programs poll, so other ranks get the processor."""
    os.sched_yield()
    mail = next((operation.mail for operation in operations if operation.posted), None)
    if mail is not None:
        with TRANSLATED:
            mail.progress()


def wait_for(operations: Sequence[Operation], enough: Callable[[Any], bool] = all) -> None:
    """Wait for all of some operations, or with ``enough=any`` for one."""
    while True:
        waiting = [each for each in list(_outstanding) if not each.advance()]
        # The answer to an operation of this rank to itself may have come only now.
        if enough([operation.advance() for operation in operations]):
            return
        waiting += [operation for operation in operations if not operation.done]
        posted = [each for operation in waiting for each in operation.posted if not each.done]
        if any(not operation.posted for operation in waiting):
            time.sleep(0.0001)  # the program completes it, perhaps in another thread
            progress(waiting)
        elif posted:
            with TRANSLATED:
                waiting[0].mail.wait_any(posted)


# Operations whose requests are freed, and buffered sends. Their memory must stay until they end.
_unclaimed: list[Operation] = []


def keep(operation: Operation) -> None:
    """Keep an operation that nobody waits for until it ends."""
    _unclaimed[:] = [kept for kept in [*_unclaimed, operation] if not kept.advance()]


def flush() -> None:
    """Wait for the operations that nobody waits for."""
    while _unclaimed:
        _unclaimed.pop().wait()
