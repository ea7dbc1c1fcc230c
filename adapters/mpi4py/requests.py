"""``MPI.Request``, ``MPI.Status`` and ``MPI.Message``, over what the engine has posted.

What a request names is an :class:`Operation`. Most are an :class:`Exchange`: some posted sends and
receives, and functions to call once all are done. No operation posts anything later than at its
start. So an operation of this rank never waits for this rank to come back to it, except to move
bytes, which every call does.
"""

from __future__ import annotations

import array
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import collective
from collective.contract.mail import CANCELLED

from .datatypes import CONSTANTS, Datatype
from .exceptions import CLASSES, MPIError, refuse, translated
from .groups import PROC_NULL, UNDEFINED
from .handles import Handle, Inner
from .messages import Piece, simple

__all__ = [
    "ANY_SOURCE", "ANY_TAG", "Exchange", "Grequest", "Message", "Operation",
    "Persistent", "Prequest", "Receive", "Request", "Status", "empty", "progress",
]  # fmt: skip

ANY_SOURCE, ANY_TAG = -1, -1
_SUCCESS, _PENDING = 0, CLASSES["ERR_PENDING"]
# Order of the fields in a status's memory.
_SOURCE, _TAG, _ERROR, _COUNT, _CANCELLED = range(5)


def _field(index: int, kind: type) -> Any:
    def get(self: Any) -> Any:
        return kind(self._fields[index])

    def put(self: Any, value: int) -> None:
        self._fields[index] = value

    return property(get, put)


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
        fields = (ANY_SOURCE, ANY_TAG, _SUCCESS, 0, 0) if status is None else status._fields
        self._fields = array.array("q", fields)

    source = _field(_SOURCE, int)
    tag = _field(_TAG, int)
    error = _field(_ERROR, int)
    count = _field(_COUNT, int)
    cancelled = _field(_CANCELLED, bool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and self._fields == other._fields

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), self.__getstate__()

    def __getstate__(self) -> dict[str, int]:
        return {"source": self.source, "tag": self.tag, "error": self.error,
                "count": self.count, "cancelled": self.cancelled}  # fmt: skip

    def __setstate__(self, state: dict[str, int]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def Get_source(self) -> int:
        """Return the rank of the sender."""
        return int(self.source)

    def Set_source(self, source: int) -> None:
        """Set the rank of the sender."""
        self.source = source

    def Get_tag(self) -> int:
        """Return the tag."""
        return int(self.tag)

    def Set_tag(self, tag: int) -> None:
        """Set the tag."""
        self.tag = tag

    def Get_error(self) -> int:
        """Return the error code."""
        return int(self.error)

    def Set_error(self, error: int) -> None:
        """Set the error code."""
        self.error = error

    def Get_count(self, datatype: Datatype = CONSTANTS["BYTE"]) -> int:
        """Return the number of elements, or ``UNDEFINED`` if it is not whole."""
        return _whole(self.count, datatype._live.size)

    def Get_elements(self, datatype: Datatype) -> int:
        """Return the number of basic elements, or ``UNDEFINED``."""
        layout = datatype._live
        if layout.dtype is not None and layout.dtype.names is None:
            return _whole(self.count, layout.dtype.itemsize)
        parts = sum(count for _, count, _ in layout.blocks) or 1
        whole, rest = divmod(self.count, layout.size or 1)
        for _, count, child in layout.blocks if rest else []:
            n = min(count, rest // (child.size or 1))
            rest -= n * child.size
            whole += n / parts
        return UNDEFINED if rest else round(whole * parts)

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the length to ``count`` elements."""
        self.count = count * datatype._live.size

    def Is_cancelled(self) -> bool:
        """Return whether the message was cancelled."""
        return bool(self.cancelled)

    def Set_cancelled(self, flag: bool) -> None:
        """Set whether the message was cancelled."""
        self.cancelled = flag

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
        status._fields = array.array("q", arg)
        return status

    def put(self, fields: tuple[int, int, int, int, bool]) -> None:
        """Set source, tag, error, length and whether the message was cancelled."""
        for index, value in enumerate(fields):
            self._fields[index] = value


def _whole(count: int, size: int) -> int:
    if not size:
        return UNDEFINED if count else 0
    return UNDEFINED if count % size else count // size


_Fields = tuple[int, int, int, int, bool]
_EMPTY: _Fields = (ANY_SOURCE, ANY_TAG, _SUCCESS, 0, False)


class Operation(Inner):
    """What a request names.

    Attributes:
        done: whether it is complete.
        active: whether a call waits for it; persistent operations are inactive until started.
        persistent: whether it can be started again.
        result: a received object.
        error: the exception that completed it.
        fields: what its status says.
    """

    # Most operations differ from these in little, and are made for each message.
    persistent = False
    done = False
    active = True
    result: Any = None
    error: MPIError | None = None
    fields: _Fields = _EMPTY

    def __init__(self) -> None:
        """Leave out the attributes of other inner objects: requests have none."""

    def advance(self) -> bool:
        """Complete the operation if it can be without waiting; return whether it is complete."""
        return self.done

    def pending(self) -> tuple[Any, list[Any]]:
        """Return the mail, and what is posted there and not done."""
        return None, []

    def wait(self) -> None:
        """Wait for the operation."""
        wait_for([self])

    def settle(self, status: Status | None) -> None:
        """Fill a status of the complete operation."""
        if status is not None:
            status.put(self.fields)

    def retire(self) -> None:
        """Forget a complete operation."""

    def cancel(self) -> None:
        """Withdraw what can be withdrawn."""


class Exchange(Operation):
    """Messages that are posted at once.

    Args:
        mail: messages of a communicator.
        tag: their tag.

    Attributes:
        received: the receive whose status is the operation's, if any.
    """

    received: Any = None

    def __init__(self, mail: Any, tag: int) -> None:
        self.mail = mail
        self.tag = tag
        self.posted: list[Any] = []
        self.afterwards: list[Callable[[], Any]] = []

    def send(self, data: Any, dst: int, wants_answer: bool = False) -> None:
        """Post a send of packed bytes."""
        data = data if len(data) else None
        self.posted.append(self.mail.send(data, dst, self.tag, wants_answer))

    def receive(self, piece: Piece, src: int) -> Any:
        """Post a receive into a piece."""
        memory: Any = piece.direct
        if memory is None:  # the elements have gaps
            memory = bytearray(piece.nbytes)
            self.then(lambda: piece.unpack(memoryview(memory)[: posted.nbytes]))
        posted = self.mail.receive(memory if len(memory) else bytearray(), src, self.tag)
        self.posted.append(posted)
        return posted

    def receive_data(self, src: int) -> Any:
        """Post a receive of whatever comes; ``data`` of the result has it."""
        posted = self.mail.receive(None, src, self.tag)
        self.posted.append(posted)
        return posted

    def then(self, function: Callable[[], Any]) -> None:
        """Call a function once all is done; the last one's result is the operation's."""
        self.afterwards.append(function)

    def advance(self) -> bool:
        if not self.done and all(posted.done for posted in self.posted):
            self._complete()
        return self.done

    def pending(self) -> tuple[Any, list[Any]]:
        return self.mail, [posted for posted in self.posted if not posted.done]

    def wait(self) -> None:
        """Wait for the messages."""
        if not self.done:
            if _outstanding and not (len(_outstanding) == 1 and id(self) in _outstanding):
                wait_for([self])
            else:
                self._complete()

    def _complete(self) -> None:
        self.done = True
        try:
            self.mail.wait_all(self.posted)
            for function in self.afterwards:
                self.result = function()
        except collective.CollectiveError as error:
            self.error = translated(error)
            self.error.__cause__ = error
        if self.received is not None:
            status = self.mail.status(self.received)
            code = self.error.ierr if self.error is not None else _SUCCESS
            cancelled = self.received.state == CANCELLED
            self.fields = (status.source, status.tag, code, status.nbytes, cancelled)
        # Memory of the program stays no longer than needed.
        self.posted, self.afterwards = [], []

    def cancel(self) -> None:
        if self.received is not None and not self.done:
            self.mail.cancel(self.received)


def answer(answers: Any, mail: Any, posted: Any) -> None:
    """Tell the sender of a received message that it has been received, if it waits for that.

    The answer has the tag of the message. Messages of one rank with one tag are received in order.
    So when the n-th answer comes, the n-th such message has met its receive, whichever message is
    answered.

    Args:
        answers, mail: messages of the communicator: those for answers, and those of the program.
    """
    if mail.wants_answer(posted):
        status = mail.status(posted)
        answers.send(None, status.source, status.tag)


class Receive(Exchange):
    """Receive of a message of the program.

    Args:
        mail: messages of a communicator.
        tag: the message's tag, or ``ANY_TAG``.
        answers: messages for answers to synchronous sends.
        posted: the receive, if it is posted already.
    """

    def __init__(self, mail: Any, tag: int, answers: Any, posted: Any = None) -> None:
        super().__init__(mail, tag)
        self._answers = answers
        if posted is not None:
            self.received = posted
            self.posted.append(posted)

    def _complete(self) -> None:
        super()._complete()
        if id(self) in _outstanding:
            del _outstanding[id(self)]
        answer(self._answers, self.mail, self.received)


def await_posted(mail: Any, *posted: Any) -> None:
    """Wait for messages, and meanwhile complete the receives that the program has begun."""
    if _outstanding:
        exchange = Exchange(mail, 0)
        exchange.posted += posted
        wait_for([exchange])
        if exchange.error is not None:
            raise exchange.error
    else:
        mail.wait_all(posted)


# Receives that the program has begun and not waited for. While this rank waits for something else,
# it completes them, since another rank may wait for that.
_outstanding: dict[int, Receive] = {}


def outstanding(operation: Operation) -> Operation:
    """Remember a receive that the program does not wait for at once."""
    if isinstance(operation, Receive):
        _outstanding[id(operation)] = operation
    return operation


class Persistent(Operation):
    """Operation that is made again at each start.

    Args:
        make: function that begins it.
    """

    persistent = True

    def __init__(self, make: Callable[[], Operation]) -> None:
        super().__init__()
        self._make = make
        self._current: Operation | None = None
        self.active = False

    def start(self) -> None:
        """Begin the operation."""
        if self.active:
            raise MPIError(CLASSES["ERR_REQUEST"], "Start: the request is active")
        self._current = self._make()
        self.active, self.done, self.error = True, False, None

    def advance(self) -> bool:
        if self._current is not None and not self.done and self._current.advance():
            self._take()
        return self.done

    def pending(self) -> tuple[Any, list[Any]]:
        return self._current.pending() if self._current is not None else (None, [])

    def wait(self) -> None:
        if self._current is not None and not self.done:
            self._current.wait()
            self._take()

    def _take(self) -> None:
        assert self._current is not None
        self.done, self.result = True, self._current.result
        self.error, self.fields = self._current.error, self._current.fields

    def cancel(self) -> None:
        if self._current is not None:
            self._current.cancel()


class _General(Operation):
    """Operation that the program itself completes."""

    def __init__(self, query: Any, free: Any, cancel: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self._functions = query, free, cancel
        self._arguments = tuple(args or ()), dict(kwargs or {})

    def _call(self, function: Any, *first: Any) -> None:
        if function is None:
            return
        args, kwargs = self._arguments
        try:
            function(*first, *args, **kwargs)
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            if isinstance(error, MPIError):
                raise
            raise MPIError(CLASSES["ERR_OTHER"]) from error

    def settle(self, status: Status | None) -> None:
        status = Status() if status is None else status
        status.put(_EMPTY)
        self._call(self._functions[0], status)

    def retire(self) -> None:
        self._call(self._functions[1])

    def cancel(self) -> None:
        self._call(self._functions[2], self.done)


def empty(source: int = ANY_SOURCE) -> Operation:
    """Return a complete operation without a message."""
    operation = Operation()
    operation.done = True
    operation.fields = (source, ANY_TAG, _SUCCESS, 0, False)
    return operation


def progress(operations: Sequence[Operation]) -> None:
    """Move what can move of these operations. Programs poll, so other ranks get the processor."""
    os.sched_yield()
    mail = next((m for m, posted in (op.pending() for op in operations) if posted), None)
    if mail is None:
        return
    try:
        mail.progress()
    except collective.CollectiveError as error:
        raise translated(error) from error


def wait_for(operations: Sequence[Operation], enough: Callable[[Any], bool] = all) -> None:
    """Wait for all of some operations, or with ``enough=any`` for one."""
    while True:
        progress(operations)
        if enough([operation.advance() for operation in operations]):
            return
        mail: Any = None
        posted: list[Any] = []
        general = False
        for receive in list(_outstanding.values()):
            if not receive.advance():
                posted += receive.pending()[1]
        for operation in operations:
            if not operation.done:
                its_mail, its_posted = operation.pending()
                mail = its_mail or mail
                posted += its_posted
                general = general or not its_posted
        if general:  # the program completes it, perhaps in another thread
            time.sleep(0.0001)
        elif posted:
            try:
                mail.wait_any(posted)
            except collective.CollectiveError as error:
                raise translated(error) from error


def _live_operations(requests: Sequence[Request]) -> dict[int, Operation]:
    """Return the active operations of requests, by index."""
    return {
        index: request._inner
        for index, request in enumerate(requests)
        if request._inner is not None and request._inner.active
    }


def _all_done(operations: Sequence[Operation]) -> bool:
    """Return whether all operations are complete, after each had a chance to be."""
    return sum(operation.advance() for operation in operations) == len(operations)


def _lengthened(statuses: Any, count: int) -> Sequence[Status]:
    if statuses is None:
        return ()
    if isinstance(statuses, list):
        statuses += [Status() for _ in range(count - len(statuses))]
    return statuses  # type: ignore[no-any-return]


class Request(Handle, kind=True):
    """Operation that has begun."""

    __slots__ = ()
    null_error = CLASSES["ERR_REQUEST"]

    def _settle(self, status: Status | None) -> Any:
        """Fill the status, clear the handle and return the object, or raise the error."""
        operation = self._inner
        operation.active = False
        if not operation.persistent:
            self._inner = None
        operation.settle(status)
        operation.retire()
        if operation.error is not None:
            raise operation.error
        return operation.result

    def _is_idle(self, status: Status | None) -> bool:
        """Return whether there is nothing to wait for; then the status is empty."""
        if self._inner is not None and self._inner.active:
            return False
        if status is not None:
            status.put(_EMPTY)
        return True

    def wait(self, status: Status | None = None) -> Any:
        """Wait, and return the received object."""
        return self._awaited(status)

    def _awaited(self, status: Status | None) -> Any:
        if self._is_idle(status):
            return None
        self._inner.wait()
        return self._settle(status)

    def Wait(self, status: Status | None = None) -> bool:
        """Wait."""
        self._awaited(status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return whether it is complete, and the received object."""
        return self._tested(status)

    def _tested(self, status: Status | None) -> tuple[bool, Any]:
        if self._is_idle(status):
            return True, None
        progress([self._inner])
        return (True, self._settle(status)) if self._inner.advance() else (False, None)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether it is complete."""
        return self._tested(status)[0]

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether it is complete; the request stays."""
        return type(self).Get_status_all([self], None if status is None else [status])

    get_status = Get_status

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Wait for one, and return its index and object."""
        live = _live_operations(requests)
        if not live:
            cls()._is_idle(status)
            return UNDEFINED, None
        wait_for(list(live.values()), any)
        index = next(index for index, operation in live.items() if operation.done)
        return index, requests[index]._settle(status)

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """Wait for one, and return its index."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def testany(
        cls, requests: Sequence[Request], status: Status | None = None
    ) -> tuple[int, bool, Any]:
        """Return the index of a complete one, whether there is one, and its object."""
        live = _live_operations(requests)
        if not live:
            cls()._is_idle(status)
            return UNDEFINED, True, None
        progress(list(live.values()))
        for index, operation in live.items():
            if operation.advance():
                return index, True, requests[index]._settle(status)
        return UNDEFINED, False, None

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Return the index of a complete one, and whether there is one."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Any = None) -> list[Any]:
        """Wait for all, and return their objects."""
        for operation in _live_operations(requests).values():
            operation.wait()
        return cls._settle_all(requests, _lengthened(statuses, len(requests)))

    @classmethod
    def _settle_all(cls, requests: Sequence[Request], statuses: Sequence[Status]) -> list[Any]:
        results, errors = [], []
        for index, request in enumerate(requests):
            status = statuses[index] if index < len(statuses) else None
            try:
                results.append(None if request._is_idle(status) else request._settle(status))
            except MPIError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return results

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Wait for all."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def testall(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[bool, Any]:
        """Return whether all are complete, and if so their objects."""
        statuses = _lengthened(statuses, len(requests))
        live = list(_live_operations(requests).values())
        progress(live)
        if not _all_done(live):
            return False, None
        return True, cls._settle_all(requests, statuses)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return whether all are complete."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[Any, Any]:
        """Wait for one or more, and return their indices and objects."""
        return cls._some(requests, statuses, True)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """Wait for one or more, and return their indices."""
        return cls._some(requests, statuses, True)[0]  # type: ignore[no-any-return]

    @classmethod
    def testsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[Any, Any]:
        """Return the indices of the complete ones, and their objects."""
        return cls._some(requests, statuses, False)

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """Return the indices of the complete ones."""
        return cls._some(requests, statuses, False)[0]  # type: ignore[no-any-return]

    @classmethod
    def _some(cls, requests: Sequence[Request], statuses: Any, waits: bool) -> tuple[Any, Any]:
        live = _live_operations(requests)
        if not live:
            return None, None
        if waits:
            wait_for(list(live.values()), any)
        else:
            progress(list(live.values()))
        indices = [index for index, operation in live.items() if operation.advance()]
        statuses = _lengthened(statuses, len(indices))
        chosen = [requests[index] for index in indices]
        return indices, cls._settle_all(chosen, statuses)

    @classmethod
    def Get_status_any(
        cls, requests: Sequence[Request], status: Status | None = None
    ) -> tuple[int, bool]:
        """Return the index of a complete one, and whether there is one; the requests stay."""
        live = _live_operations(requests)
        if not live:
            cls()._is_idle(status)
            return UNDEFINED, True
        progress(list(live.values()))
        for index, operation in live.items():
            if operation.advance():
                operation.settle(status)
                return index, True
        return UNDEFINED, False

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return whether all are complete; the requests stay."""
        statuses = _lengthened(statuses, len(requests))
        live = _live_operations(requests)
        progress(list(live.values()))
        if not _all_done(list(live.values())):
            return False
        for index, status in enumerate(statuses):
            if index in live:
                live[index].settle(status)
            else:
                status.put(_EMPTY)
        return True

    @classmethod
    def Get_status_some(cls, requests: Sequence[Request], statuses: Any = None) -> Any:
        """Return the indices of the complete ones; the requests stay."""
        live = _live_operations(requests)
        if not live:
            return None
        progress(list(live.values()))
        indices = [index for index, operation in live.items() if operation.advance()]
        for index, status in zip(indices, _lengthened(statuses, len(indices))):
            live[index].settle(status)
        return indices

    get_status_any = Get_status_any
    get_status_all = Get_status_all
    get_status_some = Get_status_some

    def Cancel(self) -> None:
        """Withdraw a receive that has met no message. Sends go on."""
        self._live.cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Clear the handle; the operation goes on."""
        operation = self._live
        if operation.active and not operation.persistent:
            _unclaimed.append(operation)
            _unclaimed[:] = [kept for kept in _unclaimed if not kept.advance()]
        self._inner = None
        if operation.done and isinstance(operation, _General):
            operation.retire()


# Operations whose requests are freed, and buffered sends. Their memory must stay until they end.
_unclaimed: list[Operation] = []


def keep(operation: Operation) -> None:
    """Keep an operation that nobody waits for until it ends."""
    _unclaimed[:] = [kept for kept in _unclaimed if not kept.advance()]
    if not operation.advance():
        _unclaimed.append(operation)


def flush() -> None:
    """Wait for the operations that nobody waits for."""
    while _unclaimed:
        _unclaimed.pop().wait()


class Prequest(Request):
    """Persistent request."""

    __slots__ = ()

    def __new__(cls, request: Request | None = None) -> Any:
        """Return a handle of a persistent request."""
        return _narrowed(cls, Prequest, request)

    def Start(self) -> None:
        """Begin the operation."""
        self._live.start()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Begin several operations."""
        for request in requests:
            request.Start()

    def Pready(self, partition: int) -> None:
        """Refuse partitions."""
        _refuse_partitions()

    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """Refuse partitions."""
        _refuse_partitions()

    def Pready_list(self, partitions: Sequence[int]) -> None:
        """Refuse partitions."""
        _refuse_partitions()

    def Parrived(self, partition: int) -> bool:
        """Refuse partitions."""
        _refuse_partitions()
        return False


def _refuse_partitions() -> None:
    refuse("a partitioned message", "its engine sends whole messages", "Use Send_init, or Isend.")


def _narrowed(cls: Any, base: Any, request: Any) -> Any:
    """Return a handle of a subclass of Request; another subclass's handle is a TypeError."""
    if request is not None and not (isinstance(request, base) or type(request) is Request):
        raise TypeError(f"expected {base.__name__}, got {type(request).__name__}")
    return Handle.__new__(cls, request)


class Grequest(Request):
    """Request that the program itself completes."""

    __slots__ = ()

    def __new__(cls, request: Request | None = None) -> Any:
        """Return a handle of such a request."""
        return _narrowed(cls, Grequest, request)

    @classmethod
    def Start(
        cls, query_fn: Any = None, free_fn: Any = None, cancel_fn: Any = None, args: Any = None,
        kwargs: Any = None,
    ) -> Any:  # fmt: skip
        """Return a request with functions that fill its status, free it and cancel it."""
        return cls._of(_General(query_fn, free_fn, cancel_fn, args, kwargs))

    def Complete(self) -> None:
        """Complete the operation."""
        self.complete()

    def complete(self, obj: Any = None) -> None:
        """Complete the operation with an object."""
        operation = self._live
        operation.result, operation.done = obj, True


class _Matched(Inner):
    """Message that a probe has taken; ``posted`` is None for one from ``PROC_NULL``."""

    def __init__(self, mail: Any, answers: Any, posted: Any, loads: Callable[[Any], Any]) -> None:
        super().__init__()
        self.mail = mail
        self.answers = answers
        self.posted = posted
        self.loads = loads


class Message(Handle, kind=True):
    """Message that a matched probe has taken out of the queue."""

    __slots__ = ()
    null_error = CLASSES["ERR_REQUEST"]

    @classmethod
    def Probe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        """Wait for a message, and take it."""
        return cls(comm.Mprobe(source, tag, status))

    @classmethod
    def Iprobe(
        cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None
    ) -> Any:
        """Take a message, or return None."""
        message = comm.Improbe(source, tag, status)
        return None if message is None else cls(message)

    probe, iprobe = Probe, Iprobe

    def _taken(self) -> Any:
        matched, self._inner = self._live, None
        if matched.constant is not None:
            self._inner = None if matched.constant is not self else matched
        return matched

    def Irecv(self, buf: Any) -> Request:
        """Begin to receive the message into a buffer."""
        matched = self._taken()
        piece = simple(buf, True) if matched.posted is not None else None
        return _claimed(matched, piece, None)

    def irecv(self) -> Request:
        """Begin to receive the message's object."""
        matched = self._taken()
        return _claimed(matched, None, matched.loads)

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive the message into a buffer."""
        self.Irecv(buf).Wait(status)

    def recv(self, status: Status | None = None) -> Any:
        """Receive the message's object."""
        return self.irecv().wait(status)


def _claimed(matched: _Matched, piece: Piece | None, loads: Any) -> Request:
    """Return a complete request for a message that a probe has taken with its bytes."""
    posted = matched.posted
    if posted is None:
        return Request._of(empty(PROC_NULL))  # type: ignore[no-any-return]
    operation = empty()
    status = matched.mail.status(posted)
    operation.fields = (status.source, status.tag, _SUCCESS, status.nbytes, False)
    if piece is None:
        operation.result = loads(posted.data)
    else:
        piece.unpack(memoryview(posted.data)[: piece.nbytes])
        if status.nbytes > piece.nbytes:
            code = CLASSES["ERR_TRUNCATE"]
            operation.error = MPIError(
                code, f"the message has {status.nbytes} bytes, the buffer {piece.nbytes}"
            )
    answer(matched.answers, matched.mail, posted)
    return Request._of(operation)  # type: ignore[no-any-return]


REQUEST_NULL = Request._constant("REQUEST_NULL")
MESSAGE_NULL = Message._constant("MESSAGE_NULL")
MESSAGE_NO_PROC = Message._constant(
    "MESSAGE_NO_PROC", _Matched(None, None, None, lambda data: None)
)
