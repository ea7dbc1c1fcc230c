"""Repeated messages of plain arrays: the path of ``send``, ``recv`` and ``sendrecv`` from C.

The bytes on the wire are those of the methods in Python: a head, which contains a short array, and
behind the head a longer array. This path makes nothing anew for a head. For each peer and tag it
keeps memory for a head, and a persistent MPI request (MPI 4.1, section 3.9) that sends or receives
the head. Each message starts this request once more. Python handles everything that is not plain.
Its messages and those of this path are interchangeable: either path may receive the other's.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.contract.waits import MessageCall
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.native import HEAD_BYTES, HEAD_ROOM, NOBODY

from .carrying import explained
from .library import leave_unfinished
from .messages import LONG_BYTES, MpiMessages
from .polling import finish, spin

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.backends.peers.wait import Wait
    from collective.native import Heads

_UINT8 = BY_NAME["uint8"]
_WORDS_BYTES = HEAD_BYTES - HEAD_ROOM
# Number of peers and tags that are remembered, for sends and for receives each. The number is
# bounded because a program may never use a tag twice.
_SLOTS = 64


class _HeadRequest:
    """A head to or from one rank, with one tag.

    Attributes:
        head: memory of the head.
        nbytes: number of bytes of the head that the request moves; 0 if there is no request yet.
        request: persistent MPI request.
        start, test: methods of the request.
    """

    __slots__ = ("head", "nbytes", "request", "start", "test")

    def __init__(self) -> None:
        self.head = np.empty(HEAD_BYTES, np.uint8)
        self.nbytes = 0

    def keep(self, request: Any, nbytes: int) -> None:
        """Use ``request`` to move the head from now on."""
        self.free()
        self.nbytes = nbytes
        self.request, self.start, self.test = request, request.Start, request.Test

    def free(self) -> None:
        """Free the request, which must not be in flight."""
        if self.nbytes:
            self.request.Free()
            self.nbytes = 0


#: Slots by peer and tag; the slots that were used last are at the end. A slot in use is not in the
#: dictionary, so two threads never have the same slot.
_HeadRequests = OrderedDict[tuple[int, int], _HeadRequest]


class PlainMessages:
    """Sends and receives plain arrays on one MPI communicator.

    Args:
        module: ``mpi4py.MPI``.
        comm: MPI communicator, which ``messages`` uses, too.
        channel: channel of the communicator.
        messages: object that sends and receives for Python, and for long arrays.
        heads: functions of the native core for heads.
    """

    def __init__(
        self, module: Any, comm: Any, channel: Channel, messages: MpiMessages, heads: Heads
    ) -> None:
        self._module = module
        self._comm = comm
        self._channel = channel
        self._messages = messages
        self._write_head, self._read_head = heads.write_head, heads.read_head
        self._room_in, self._view = heads.room_in, heads.view
        self._to: _HeadRequests = OrderedDict()
        self._from: _HeadRequests = OrderedDict()

    def exchange(
        self, x: Any, to: int, out: Any, source: int, tag: int, deadline: Deadline, heads: int
    ) -> Any:
        """Send, receive or both; see :func:`collective.native.messages`. Heads are always used."""
        if self._channel.failure is not None or self._messages.unread:
            return NotImplemented
        if out is None and source != NOBODY:  # the received array would have to be new
            return NotImplemented
        if not type(to) is type(source) is type(tag) is int:  # True is 1 to a dictionary
            return NotImplemented
        try:
            if out is None:
                return self._send(x, to, tag, deadline)
            if x is None:
                return self._receive(out, source, tag, deadline)
            return self._send_and_receive(x, to, out, source, tag, deadline)
        except self._module.Exception as error:
            what = "send" if out is None else "recv" if x is None else "sendrecv"
            raise explained(self._module, self._channel, what, error) from error

    def close(self) -> None:
        """Free all persistent requests; none of them may be in flight."""
        for slots in (self._to, self._from):
            while slots:
                slots.popitem()[1].free()

    # -- slots ----------------------------------------------------------------------------

    def _take(self, slots: _HeadRequests, rank: int, tag: int) -> _HeadRequest | None:
        """Return the slot of a rank and tag; None if Python has to handle or refuse the call."""
        slot = slots.pop((rank, tag), None)
        if slot is not None:
            return slot
        able = 0 <= rank < self._channel.size and rank != self._channel.rank and tag >= 0
        code = self._messages.direct(tag) if able else None
        if code is None:
            return None
        slot = _HeadRequest()
        if slots is self._from:
            buffer = slot.head, HEAD_BYTES, self._module.BYTE
            slot.keep(self._comm.Recv_init(buffer, rank, code), HEAD_BYTES)
        return slot

    def _give_back(self, slots: _HeadRequests, rank: int, tag: int, slot: _HeadRequest) -> None:
        if slots.setdefault((rank, tag), slot) is not slot:
            slot.free()  # two threads used the same rank and tag at once
        elif len(slots) > _SLOTS:
            slots.popitem(last=False)[1].free()

    def _have_sent(self, slot: _HeadRequest, to: int, tag: int, nbytes: int) -> None:
        """Give the slot a request that sends ``nbytes`` bytes of a head."""
        buffer = slot.head, nbytes, self._module.BYTE
        slot.keep(self._comm.Send_init(buffer, to, self._messages.direct(tag)), nbytes)

    # -- messages -------------------------------------------------------------------------

    def _send(self, x: Any, to: int, tag: int, deadline: Deadline) -> Any:
        slot = self._to.pop((to, tag), None) or self._take(self._to, to, tag)
        length = None if slot is None else self._write_head(x, slot.head)
        if slot is None or length is None:
            if slot is not None:
                self._give_back(self._to, to, tag, slot)
            return NotImplemented
        # A message may be shorter than the receiver's room, and MPI sends short messages faster.
        nbytes = _WORDS_BYTES + length if length <= HEAD_ROOM else _WORDS_BYTES
        if nbytes != slot.nbytes:
            self._have_sent(slot, to, tag, nbytes)
        following: list[Any] = []
        try:
            slot.start()
            tests = [slot.test]
            if length > HEAD_ROOM:
                following = self._post(x, to, tag, length)
                tests += [request.Test for request in following]
            for test in tests:
                if not test() and not spin(test):
                    finish(test, self._wait(MessageCall("send", tag, to, None), deadline))
        except BaseException:
            leave_unfinished((slot, following, x))
            with self._messages.kept_until_heard(length, to):
                raise
        self._give_back(self._to, to, tag, slot)
        return NOBODY

    def _post(self, x: Any, to: int, tag: int, length: int) -> list[Any]:
        """Begin to send the array that follows a head."""
        if length > LONG_BYTES:
            return self._messages.post(self._bytes(x), to, tag)
        buffer = self._memory(x), length, self._module.BYTE
        return [self._comm.Isend(buffer, to, self._messages.direct(tag))]

    def _receive(self, out: Any, source: int, tag: int, deadline: Deadline) -> Any:
        length = self._room_in(out)
        if length is None:
            return NotImplemented
        slot = self._from.pop((source, tag), None) or self._take(self._from, source, tag)
        if slot is None:
            return NotImplemented
        try:
            slot.start()
            if not slot.test() and not spin(slot.test):
                wait = self._wait(MessageCall("recv", tag, None, source), deadline)
                finish(slot.test, wait, moving=False)
        except BaseException:
            leave_unfinished(slot)
            raise
        fits = self._read_head(slot.head, out)
        if not fits:
            self._messages.unread[source, tag] = slot.head.copy()
        self._give_back(self._from, source, tag, slot)
        if not fits:
            return deadline
        if length > HEAD_ROOM:
            self._receive_rest(out, source, tag, length, deadline)
        return source

    def _receive_rest(
        self, out: Any, source: int, tag: int, length: int, deadline: Deadline
    ) -> None:
        """Receive the array that follows a head."""
        messages = self._messages
        if length > LONG_BYTES:
            messages.receive(self._bytes(out), source, tag, "recv", deadline)
        else:
            buffer = self._memory(out), length, self._module.BYTE
            request = self._comm.Irecv(buffer, source, messages.direct(tag))
            try:
                if not request.Test() and not spin(request.Test):
                    wait = self._wait(MessageCall("recv", tag, None, source), deadline)
                    finish(request.Test, wait, moving=False)
            except BaseException:
                leave_unfinished((request, out))
                raise
        messages.refuse_stale(length, "recv", tag)

    def _send_and_receive(
        self, x: Any, to: int, out: Any, source: int, tag: int, deadline: Deadline
    ) -> Any:
        """Exchange short arrays; return the deadline if the received one does not fit ``out``."""
        room = self._room_in(out)
        sending = receiving = length = None
        if room is not None and room <= HEAD_ROOM:
            sending = self._take(self._to, to, tag)
            receiving = self._take(self._from, source, tag)
        if sending is not None and receiving is not None:
            length = self._write_head(x, sending.head)
        if sending is None or receiving is None or length is None or length > HEAD_ROOM:
            for slots, rank, slot in ((self._to, to, sending), (self._from, source, receiving)):
                if slot is not None:
                    self._give_back(slots, rank, tag, slot)
            return NotImplemented
        if _WORDS_BYTES + length != sending.nbytes:
            self._have_sent(sending, to, tag, _WORDS_BYTES + length)
        try:
            receiving.start()
            sending.start()
            for test, ends in ((receiving.test, (None, source)), (sending.test, (to, None))):
                if not test() and not spin(test):
                    wait = self._wait(MessageCall("sendrecv", tag, *ends), deadline)
                    finish(test, wait, moving=False)
        except BaseException:
            leave_unfinished((sending, receiving))
            raise
        fits = self._read_head(receiving.head, out)
        if not fits:
            self._messages.unread[source, tag] = receiving.head.copy()
        self._give_back(self._to, to, tag, sending)
        self._give_back(self._from, source, tag, receiving)
        return source if fits else deadline

    def _wait(self, call: MessageCall, deadline: Deadline) -> Wait:
        """Return the :class:`Wait` of a call that still sends a message or receives one."""
        return self._messages.wait(call, deadline)

    # -- memory ---------------------------------------------------------------------------

    def _memory(self, array: Any) -> Any:
        """Return an object for a plain array that mpi4py accepts quickly."""
        if type(array) is np.ndarray:
            return array
        view = self._view(array)
        assert view is not None
        address, nbytes, *_ = view
        return self._module.buffer.fromaddress(address, nbytes)

    def _bytes(self, array: Any) -> Buffer:
        """Return a plain array as a buffer; the buffer does not keep the array alive."""
        return Buffer(np.frombuffer(self._memory(array), np.uint8), _UINT8)
