"""``MPI.Request`` and ``MPI.Message``, and the three forms of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

from .exceptions import CLASSES, MPIError, refusing
from .groups import PROC_NULL, UNDEFINED
from .handles import Handle, OpaqueObject
from .info import Info
from .layouts import Piece
from .messages import simple
from .operations import (
    ANY_SOURCE,
    ANY_TAG,
    EMPTY,
    General,
    Operation,
    Status,
    idle,
    keep,
    progress,
    wait_for,
)

#: Function that refuses a call on parts of messages.
NO_PARTS = refusing("a partitioned message", "its engine sends whole messages", "Use Send_init.")


# Classes of the errors after which a communicator is broken.
_LOSSES = CLASSES["ERR_PROC_FAILED"], CLASSES["ERR_PROC_ABORTED"]


def _lengthened(statuses: Any, count: int) -> Sequence[Status]:
    if statuses is None:
        return ()
    if isinstance(statuses, list):
        statuses += [Status() for _ in range(count - len(statuses))]
    return statuses  # type: ignore[no-any-return]


def _complete(
    requests: Sequence[Request], waits: bool
) -> tuple[dict[int, Operation], list[int]]:  # fmt: skip
    """Move requests, or wait for one; return the active ones and the indices of complete ones."""
    live = {
        index: request._inner
        for index, request in enumerate(requests)
        if request._inner is not None and request._inner.active
    }
    if waits and live:
        wait_for(list(live.values()), any)
    elif live:
        progress(list(live.values()))
    return live, [index for index, operation in live.items() if operation.advance()]


def _settle_each(requests: Sequence[Request], statuses: Iterable[Status], keeps: bool) -> list[Any]:
    """Settle all requests, and then raise an error if there are some.

    Raises:
        MPIError: of the class ``ERR_PROC_FAILED`` or ``ERR_PROC_ABORTED`` if a rank is lost, after
            which no call on the communicator works; otherwise ``ERR_IN_STATUS``, and the statuses
            have the errors.
    """
    results, errors = [], []
    for request, status in zip(requests, chain(statuses, repeat(None))):
        try:
            results.append(request._settle(status, keeps))
        except MPIError as error:
            errors.append(error)
    losses = [error for error in errors if error.Get_error_class() in _LOSSES]
    if losses:
        raise losses[0]
    if errors:
        raise MPIError(
            CLASSES["ERR_IN_STATUS"],
            f"MPI_ERR_IN_STATUS: {len(errors)} of {len(requests)} operations failed, and the "
            f"statuses have their errors. The first one: {errors[0]}",
        ) from errors[0]
    return results


def _several(
    call: Any, pick: Callable[[Any], Any], waits: bool = False, keeps: bool = False
) -> Any:  # fmt: skip
    """Return a call on several requests.

    Args:
        call: method that makes it.
        pick: function of what the method returns; its result is that of the call.
        waits, keeps: whether it waits, and whether the requests stay.
    """

    def of_one(cls: Any, requests: Sequence[Request], status: Status | None = None) -> Any:
        return pick(call(requests, status, waits, keeps))

    def of_each(cls: Any, requests: Sequence[Request], statuses: Any = None) -> Any:
        return pick(call(requests, statuses, waits, keeps))

    several = of_one if call.__name__ == "_any" else of_each
    several.__doc__ = call.__doc__
    return classmethod(several)


class Request(Handle, kind=True):
    """Operation that has begun."""

    __slots__ = ()
    null_error = CLASSES["ERR_REQUEST"]

    def _settle(self, status: Status | None, keeps: bool = False) -> Any:
        """Fill the status, clear the handle and return the object, or raise the error.

        Args:
            status: a status, or None.
            keeps: if true, only fill the status.
        """
        operation = self._inner
        if operation is None or not operation.active:
            if status is not None:
                status.put(EMPTY)
            return None
        if keeps:
            return operation.fill(Status() if status is None else status)
        operation.active = False
        if not operation.persistent:
            self._inner = None
        return operation.settle(status)

    # Each of the next three methods makes several of the calls below: those that wait, those that
    # test, and those that only fill the statuses, after which the requests stay. Calls in lower
    # case return the received objects, too.

    @staticmethod
    def _any(requests: Sequence[Request], status: Any, waits: bool, keeps: bool) -> Any:
        """Return the index of a complete request, whether there is one, and its object."""
        live, complete = _complete(requests, waits)
        if not live:
            return UNDEFINED, True, Request()._settle(status)
        if not complete:
            return UNDEFINED, False, None
        return complete[0], True, requests[complete[0]]._settle(status, keeps)

    @staticmethod
    def _all(requests: Sequence[Request], statuses: Any, waits: bool, keeps: bool) -> Any:
        """Return whether all requests are complete, and if so their objects."""
        statuses = _lengthened(statuses, len(requests))
        if waits:
            for request in requests:
                operation = request._inner
                if operation is not None and operation.active:
                    operation.wait()
        else:
            live, complete = _complete(requests, False)
            if len(complete) < len(live):
                return False, None
        return True, _settle_each(requests, statuses, keeps)

    @staticmethod
    def _some(requests: Sequence[Request], statuses: Any, waits: bool, keeps: bool) -> Any:
        """Return the indices of the complete requests, and their objects."""
        live, complete = _complete(requests, waits)
        if not live:
            return None, None
        statuses = _lengthened(statuses, len(complete))
        return complete, _settle_each([requests[index] for index in complete], statuses, keeps)

    def wait(self, status: Status | None = None) -> Any:
        """Wait, and return the received object."""
        operation = self._inner
        if operation is not None and operation.active:
            operation.wait()
        return self._settle(status)

    def Wait(self, status: Status | None = None) -> bool:
        """Wait."""
        Request.wait(self, status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return whether it is complete, and the received object."""
        operation = self._inner
        if operation is not None and operation.active:
            progress([operation])
            if not operation.advance():
                return False, None
        return True, self._settle(status)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether it is complete."""
        return Request.test(self, status)[0]

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether it is complete; the request stays."""
        return bool(self.Get_status_all([self], None if status is None else [status]))

    get_status = Get_status
    waitany = _several(_any, itemgetter(0, 2), waits=True)
    Waitany = _several(_any, itemgetter(0), waits=True)
    testany = _several(_any, itemgetter(0, 1, 2))
    Testany = _several(_any, itemgetter(0, 1))
    Get_status_any = get_status_any = _several(_any, itemgetter(0, 1), keeps=True)
    waitall = _several(_all, itemgetter(1), waits=True)
    Waitall = _several(_all, itemgetter(0), waits=True)
    testall = _several(_all, itemgetter(0, 1))
    Testall = _several(_all, itemgetter(0))
    Get_status_all = get_status_all = _several(_all, itemgetter(0), keeps=True)
    waitsome = _several(_some, itemgetter(0, 1), waits=True)
    Waitsome = _several(_some, itemgetter(0), waits=True)
    testsome = _several(_some, itemgetter(0, 1))
    Testsome = _several(_some, itemgetter(0))
    Get_status_some = get_status_some = _several(_some, itemgetter(0), keeps=True)

    def Cancel(self) -> None:
        """Withdraw a receive that has met no message. Sends go on."""
        self._live.cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Clear the handle; the operation goes on."""
        operation = self._live
        if operation.posted:
            keep(operation)
        if operation.done:
            operation.retire()
        self._inner = None


class _Narrow(Request):
    """Request of a kind, whose handle another kind's does not become."""

    __slots__ = ()

    def __new__(cls, request: Request | None = None) -> Any:
        """Return a handle of such a request."""
        kind = next(base for base in cls.__mro__ if _Narrow in base.__bases__)
        if request is not None and not (isinstance(request, kind) or type(request) is Request):
            raise TypeError(f"expected {kind.__name__}, got {type(request).__name__}")
        return super().__new__(cls, request)


class Prequest(_Narrow):
    """Persistent request."""

    __slots__ = ()

    def Start(self) -> None:
        """Begin the operation."""
        self._live.start()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Begin several operations."""
        for request in requests:
            request.Start()

    Pready = Pready_range = Pready_list = Parrived = NO_PARTS


class Grequest(_Narrow):
    """Request that the program itself completes."""

    __slots__ = ()

    @classmethod
    def Start(
        cls, query_fn: Any = None, free_fn: Any = None, cancel_fn: Any = None, args: Any = None,
        kwargs: Any = None,
    ) -> Any:  # fmt: skip
        """Return a request with functions that fill its status, free it and cancel it."""
        return cls._of(General(query_fn, free_fn, cancel_fn, args, kwargs))

    def Complete(self) -> None:
        """Complete the operation."""
        self.complete()

    def complete(self, obj: Any = None) -> None:
        """Complete the operation with an object."""
        operation = self._live
        operation.result, operation.done = obj, True


class Message(Handle, kind=True):
    """Message that a matched probe has taken out of the queue.

    It names the context of its communicator, and the posted message; None for that of PROC_NULL.
    """

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

    def _receive(self, buf: Any, is_object: bool = False) -> Request:
        """Return a complete request for the message, which has come with its bytes."""
        matched = self._live
        if matched.constant is not self:
            self._inner = None
        operation = idle(PROC_NULL)
        if matched.posted is not None:
            piece = None if is_object else simple(buf, True)

            def plan(operation: Operation) -> None:
                operation.follow(matched.posted, matched.context.answers, is_object)
                if piece is not None:
                    operation.then(lambda: _copy(matched, piece))

            operation = Operation(plan, matched.context.points)
        operation.start().advance()
        return Request._of(operation)  # type: ignore[no-any-return]

    def Irecv(self, buf: Any) -> Request:
        """Begin to receive the message into a buffer."""
        return self._receive(buf)

    def irecv(self) -> Request:
        """Begin to receive the message's object."""
        return self._receive(None, True)

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive the message into a buffer."""
        self._receive(buf).wait(status)

    def recv(self, status: Status | None = None) -> Any:
        """Receive the message's object."""
        return self._receive(None, True).wait(status)


def _copy(matched: Any, piece: Piece) -> None:
    """Copy a message into a piece."""
    memory: Any = bytearray(piece.nbytes) if piece.direct is None else piece.direct
    matched.context.points.read(matched.posted, memory)
    if piece.direct is None:
        piece.unpack(memory[: matched.posted.nbytes])


REQUEST_NULL = Request._constant("REQUEST_NULL")
MESSAGE_NULL = Message._constant("MESSAGE_NULL")
MESSAGE_NO_PROC = Message._constant("MESSAGE_NO_PROC", OpaqueObject(posted=None))


def forms(prepare: Callable[..., Operation]) -> tuple[Any, Any, Any]:
    """Return the blocking, the non-blocking and the persistent form of a call.

    Args:
        prepare: method that reads the arguments and returns the operation. A status, which the
            blocking form may take, comes after the arguments.
    """
    count = prepare.__code__.co_argcount  # with self

    def blocking(self: Any, *args: Any, status: Status | None = None, **options: Any) -> Any:
        if len(args) == count:
            *args, status = args  # type: ignore[assignment]
        return prepare(self, *args, **options).run(status)

    def started(self: Any, *args: Any, **options: Any) -> Request:
        return Request._of(prepare(self, *args, **options).start())  # type: ignore[no-any-return]

    def initialised(self: Any, *args: Any, info: Any = None, **options: Any) -> Prequest:
        if args and isinstance(args[-1], Info):
            args = args[:-1]
        operation = prepare(self, *args, **options)
        operation.persistent = True
        return Prequest._of(operation)  # type: ignore[no-any-return]

    for form in (blocking, started, initialised):
        form.__doc__ = prepare.__doc__
    return blocking, started, initialised
