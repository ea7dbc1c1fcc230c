"""Messages between two ranks: the calls of ``MPI.Comm`` on buffers and on objects, and probes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

from numpy import ndarray

from collective import CollectiveError

from .exceptions import CLASSES, TRANSLATED, MPIError, translated
from .groups import PROC_NULL
from .handles import Handle, OpaqueObject
from .layouts import Piece
from .memory import bytes_of
from .messages import NOTHING, PLAIN, simple
from .operations import (
    ANY_SOURCE,
    ANY_TAG,
    Operation,
    Status,
    answer,
    await_posted,
    begun,
    flush,
    idle,
    keep,
)
from .pickling import loads, pickle
from .requests import MESSAGE_NO_PROC, NO_PARTS, Message, Request, forms

TAG_UB = 2**31 - 1


def _piece(buf: Any, peer: int, writable: bool) -> Piece:
    return NOTHING if peer == PROC_NULL else simple(buf, writable)


def _tag(tag: int, wild: bool = False) -> int:
    if 0 <= tag <= TAG_UB or (wild and tag == ANY_TAG):
        return tag
    raise MPIError(CLASSES["ERR_TAG"], f"tag {tag} (expected 0 to {TAG_UB})")


def _fill(status: Status | None, source: int, tag: int, nbytes: int) -> None:
    if status is not None:
        status.put((source, tag, CLASSES["SUCCESS"], nbytes, False))


def _of_object(send: Callable[..., Any]) -> Any:
    """Return the call that sends an object, given that which sends a buffer."""

    def call(self: Any, obj: Any, dest: int, tag: int = 0) -> Any:
        return send(self, pickle.dumps(obj), dest, tag)

    call.__doc__ = str(send.__doc__).replace("buffer", "object")
    return call


def _looking(call: str) -> Any:
    """Return the method that looks for a message.

    Args:
        call: the engine's call: ``probe``, after which the message stays, or ``match``, which
            takes it; with an ``i`` before if it does not wait.

    Returns:
        A method that returns, of ``probe`` and ``iprobe``, whether there is a message; of ``match``
        and ``imatch`` the ``Message`` or None.
    """
    takes = call.endswith("match")

    def look(
        self: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Any:
        """Look for a message."""
        context = self._live
        if source == PROC_NULL:
            _fill(status, PROC_NULL, ANY_TAG, 0)
            return Message._of(MESSAGE_NO_PROC._inner) if takes else True
        mail = context.points
        with TRANSLATED:
            message = getattr(mail, call)(self._peer(source, True), _tag(tag, True))
        if message is None:
            os.sched_yield()  # programs poll, and the sender may need this processor
            return None if takes else False
        _fill(status, *(mail.status(message) if takes else message))
        return Message._of(OpaqueObject(context=context, posted=message)) if takes else True

    return look


class MessageMethods(Handle):
    """Methods of communicators that send, receive and probe."""

    __slots__ = ()

    def _peer(self, rank: int, wild: bool = False) -> int:
        rank = int(rank)
        if 0 <= rank < self._live.size or (wild and rank == ANY_SOURCE):
            return rank
        raise MPIError(CLASSES["ERR_RANK"], f"rank {rank} of {self._live.size}")

    # -- what the forms of the calls do ------------------------------------------------------

    def _sending(
        self, packed: Callable[[], Any], dest: int, tag: int, synchronous: bool = False
    ) -> Operation:
        """Return a send of what ``packed`` returns; a synchronous one waits for its receive, too.

        The receiver of a synchronous message answers with an empty message of the same tag, once
        its receive is complete. As messages do not overtake each other, all earlier messages with
        this tag have met their receives by then, too: it does not matter which answer is whose.
        """
        context = self._live
        if dest == PROC_NULL:
            return idle(PROC_NULL)
        dest, tag = self._peer(dest), _tag(tag)

        def plan(operation: Operation) -> None:
            if synchronous:
                operation.posted.append(context.answers.receive(bytearray(), dest, tag))
            operation.send(packed(), dest, synchronous)

        return Operation(plan, context.points, tag)

    def _buffered(self, packed: Callable[[], Any], dest: int, tag: int) -> Operation:
        """Return an operation that is complete once it has begun a send."""
        sending = self._sending(packed, dest, tag)

        def plan(operation: Operation) -> None:
            keep(Operation(sending._plan, sending.mail, sending.tag).start())

        return Operation(plan)

    def _receiving(self, piece: Piece | None, source: int, tag: int) -> Operation:
        """Return a receive into a piece, or of an object."""
        context = self._live
        if source == PROC_NULL:
            return idle(PROC_NULL)
        source, tag = self._peer(source, True), _tag(tag, True)

        def plan(operation: Operation) -> None:
            operation.follow(operation.receive(piece, source), context.answers, piece is None)

        return Operation(plan, context.points, tag)

    @staticmethod
    def _both(sending: Operation, receiving: Operation) -> Operation:
        """Return an operation that is both a send and a receive, with the receive's status."""
        if receiving.mail is None:  # from PROC_NULL
            sending.fields = receiving.fields
            return sending

        def plan(operation: Operation) -> None:
            receiving._plan(operation)  # type: ignore[misc]
            operation.posted += sending.start().posted

        return Operation(plan, receiving.mail, receiving.tag)

    # -- buffers -----------------------------------------------------------------------------

    def _Send(self, buf: Any, dest: int, tag: int = 0) -> Operation:
        """Send a buffer."""
        return self._sending(_piece(buf, dest, False).packed, dest, tag)

    def _Ssend(self, buf: Any, dest: int, tag: int = 0) -> Operation:
        """Send a buffer; complete once its receive has begun."""
        return self._sending(_piece(buf, dest, False).packed, dest, tag, True)

    def _Bsend(self, buf: Any, dest: int, tag: int = 0) -> Operation:
        """Send a copy of a buffer."""
        piece = _piece(buf, dest, False)
        return self._buffered(lambda: piece.packed().copy(), dest, tag)

    def _Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Operation:
        """Receive into a buffer."""
        return self._receiving(_piece(buf, source, True), source, tag)

    def _Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG,
    ) -> Operation:  # fmt: skip
        """Send one buffer and receive into another."""
        sending = self._Send(sendbuf, dest, sendtag)
        return self._both(sending, self._Recv(recvbuf, source, recvtag))

    def _Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Operation:  # fmt: skip
        """Send a buffer and receive into the same."""
        piece = NOTHING if dest == source == PROC_NULL else simple(buf, True)
        data = piece.packed().copy()
        sending = self._sending(lambda: data, dest, sendtag)
        return self._both(sending, self._receiving(piece, source, recvtag))

    _, _, Send_init = forms(_Send)
    Ssend, Issend, Ssend_init = forms(_Ssend)
    Bsend, Ibsend, Bsend_init = forms(_Bsend)
    _, _, Recv_init = forms(_Recv)
    _, Isendrecv, _ = forms(_Sendrecv)
    Sendrecv_replace, Isendrecv_replace, _ = forms(_Sendrecv_replace)
    Psend_init = Precv_init = NO_PARTS

    # -- plain arrays and objects, which the engine takes as they are ------------------------

    def _sent(self, data: Any, dest: Any, tag: Any) -> Any:
        """Post a send of a plain array or of bytes.

        Return None if the general way must read the arguments, or raise their error.
        """
        context = self._inner
        if (
            (type(data) is bytes or (type(data) is ndarray and data.dtype in PLAIN))
            and type(dest) is type(tag) is int
            and context is not None
            and 0 <= dest < context.size
            and 0 <= tag <= TAG_UB
        ):
            mail = context.points
            try:
                sent = context.post_send(data, mail.places[dest], mail.bits | tag)
            except CollectiveError as error:
                raise translated(error) from error
            except (BufferError, ValueError):  # the array is not contiguous
                return None
            return None if sent is NotImplemented else sent
        return None

    def _received(self, memory: Any, source: Any, tag: Any, waits: bool = True) -> Any:
        """Post a receive into a plain array, or (None) of an object; see :meth:`_sent`."""
        context = self._inner
        if (
            (memory is None or (type(memory) is ndarray and memory.dtype in PLAIN))
            and type(source) is type(tag) is int
            and context is not None
            and ANY_SOURCE <= source < context.size
            and ANY_TAG <= tag <= TAG_UB
        ):
            mail = context.points
            bits, mask = mail.bits, mail.ANY
            if tag >= 0:
                bits, mask = bits | tag, mail.ONE
            if source >= 0:
                source = mail.places[source]
            try:
                received = context.post_receive(memory, source, bits, mask, waits)
            except CollectiveError as error:
                raise translated(error) from error
            except (BufferError, ValueError):
                return None
            return None if received is NotImplemented else received
        return None

    def _end(self, received: Any, status: Status | None) -> None:
        """Wait for a posted receive, answer it and fill a status."""
        context = self._inner
        mail = context.points
        if not received.whole:
            with TRANSLATED:
                await_posted(mail, received)
        if received.tag & mail.WANTS_ANSWER:
            answer(mail, context.answers, received)
        if status is not None:
            _fill(status, *mail.status(received))

    def _leave(self, sent: Any) -> None:
        """Wait for a posted send."""
        with TRANSLATED:
            await_posted(self._inner.points, sent)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer."""
        sent = self._sent(buf, dest, tag)
        if sent is None:
            self._Send(buf, dest, tag).run()
        elif not sent.done:
            self._leave(sent)

    def Recv(
        self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> None:
        """Receive into a buffer."""
        received = None if buf is None else self._received(buf, source, tag)
        if received is None:
            self._Recv(buf, source, tag).run(status)
        else:
            self._end(received, status)

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send one buffer and receive into another."""
        # A wrong receive must be an error before anything is sent.
        plain = (
            type(recvbuf) is ndarray
            and recvbuf.dtype in PLAIN
            and recvbuf.flags.carray
            and type(source) is type(recvtag) is int
            and ANY_SOURCE <= source < self._live.size
            and ANY_TAG <= recvtag <= TAG_UB
        )
        sent = self._sent(sendbuf, dest, sendtag) if plain else None
        if sent is None:
            self._Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag).run(status)
            return
        received = self._received(recvbuf, source, recvtag)
        if received is None:  # the communicator has broken since
            self._Recv(recvbuf, source, recvtag).run(status)
            return
        # The receive first, since its sender may wait for the answer before it takes what is sent.
        try:
            self._end(received, status)
        finally:
            if not sent.done:
                self._leave(sent)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send a buffer."""
        sent = self._sent(buf, dest, tag)
        if sent is None:
            return Request._of(self._Send(buf, dest, tag).start())  # type: ignore[no-any-return]
        return Request._of(begun(self._inner, sent))  # type: ignore[no-any-return]

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive into a buffer."""
        received = None if buf is None else self._received(buf, source, tag, False)
        if received is None:
            return Request._of(self._Recv(buf, source, tag).start())  # type: ignore[no-any-return]
        return Request._of(begun(self._inner, received, True))  # type: ignore[no-any-return]

    Rsend, Irsend, Rsend_init = Send, Isend, Send_init

    # -- objects -----------------------------------------------------------------------------

    # An object travels as its pickle, by the calls that send buffers.
    send, isend = _of_object(Send), _of_object(Isend)
    ssend, issend = _of_object(Ssend), _of_object(Issend)
    bsend, ibsend = _of_object(Bsend), _of_object(Ibsend)

    def recv(
        self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG,
        status: Status | None = None,
    ) -> Any:  # fmt: skip
        """Receive an object. ``buf`` is not used."""
        if buf is not None:
            warnings.warn("recv: the buffer is not used", UserWarning, stacklevel=2)
        received = self._received(None, source, tag)
        if received is None:
            return self._receiving(None, source, tag).run(status)
        self._end(received, status)
        return loads(received.data)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive an object. ``buf`` is not used."""
        received = self._received(None, source, tag, False)
        if received is None:
            return Request._of(self._receiving(None, source, tag).start())  # type: ignore[no-any-return]
        return Request._of(begun(self._inner, received, True, True))  # type: ignore[no-any-return]

    def _sendrecv(
        self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG,
    ) -> Operation:  # fmt: skip
        """Send one object and receive another. ``recvbuf`` is not used."""
        sending = self._Send(pickle.dumps(sendobj), dest, sendtag)
        return self._both(sending, self._receiving(None, source, recvtag))

    sendrecv, _, _ = forms(_sendrecv)

    # -- probes ------------------------------------------------------------------------------

    Probe = probe = _looking("probe")
    Iprobe = iprobe = _looking("iprobe")
    Mprobe = mprobe = _looking("match")
    Improbe = improbe = _looking("imatch")

    # -- buffered sends ----------------------------------------------------------------------

    def Attach_buffer(self, buf: Any) -> None:
        """Keep a buffer for buffered sends. They need none, and take what memory they need."""
        bytes_of(buf, True)
        self._live.attached = buf

    def Detach_buffer(self) -> Any:
        """Wait for buffered sends, and return the buffer."""
        flush()
        return self._live.__dict__.pop("attached", None)

    def Flush_buffer(self) -> None:
        """Wait for buffered sends."""
        flush()

    def Iflush_buffer(self) -> Request:
        """Wait for buffered sends; the request is complete."""
        flush()
        return Request._of(idle().start())  # type: ignore[no-any-return]
