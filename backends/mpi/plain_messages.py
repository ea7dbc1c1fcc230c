"""Messages of plain arrays, again and again: the way of ``send``, ``recv`` and ``sendrecv`` in C.

What travels is what the methods in Python send and receive: a head, with a short array inside, and
behind it an array that is longer. Here nothing is made anew for it. A head has its memory, and
MPI's persistent request (MPI 4.1, section 3.9) that sends or receives it, by peer and tag: a
message is one more start of that. Whatever is not plain is left to Python, in whose messages these
may be received, and the other way round.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.native import HEAD_BYTES, HEAD_ROOM, NOBODY

from .carrying import explained
from .library import leave_unfinished
from .messages import LONG_BYTES, MpiMessages
from .polling import finish, spin

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel, Wait
    from collective.native import Heads

__all__ = ["PlainMessages"]

Array = np.ndarray[Any, Any]

_UINT8 = BY_NAME["uint8"]
_WORDS_BYTES = HEAD_BYTES - HEAD_ROOM
# Peers and tags that are remembered, of what is sent and of what is received. A program may never
# use a tag twice.
_SLOTS = 64


class _HeadRequest:
    """A head to one rank, or from it, with one tag.

    Attributes:
        head: its memory.
        nbytes: as many of them as the request moves; 0 if there is none yet.
        request: MPI's.
        start, test: the request's methods.
    """

    __slots__ = ("head", "nbytes", "request", "start", "test")

    def __init__(self) -> None:
        self.head = np.empty(HEAD_BYTES, np.uint8)
        self.nbytes = 0

    def keep(self, request: Any, nbytes: int) -> None:
        """Have the head moved by ``request`` from now on."""
        self.free()
        self.nbytes = nbytes
        self.request, self.start, self.test = request, request.Start, request.Test

    def free(self) -> None:
        """Have MPI forget the request, which is not under way."""
        if self.nbytes:
            self.request.Free()
            self.nbytes = 0


#: By peer and tag, those that were used last at the end. A slot in use is not in it, so that two
#: threads never have the same.
_HeadRequests = OrderedDict[tuple[int, int], _HeadRequest]


class PlainMessages:
    """Sends and receives plain arrays on one MPI communicator.

    Args:
        module: ``mpi4py.MPI``.
        comm: on which ``messages`` go, too.
        channel: of the communicator.
        messages: what sends and receives for Python, and what is long.
        heads: the native core's.
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
        self, x: Any, to: int, out: Any, source: int, tag: int, deadline: Deadline, heads: bool
    ) -> Any:
        """Send, receive or both; see :func:`collective.native.messages`. There are always heads."""
        if self._channel.failure is not None or self._messages.unread:
            return NotImplemented
        if out is None and source != NOBODY:  # what comes is to be new
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
        """Free what MPI holds; nothing is under way."""
        for slots in (self._to, self._from):
            while slots:
                slots.popitem()[1].free()

    # -- slots ----------------------------------------------------------------------------

    def _take(self, slots: _HeadRequests, rank: int, tag: int) -> _HeadRequest | None:
        """Return the slot of a direction; None if it is for Python to say what is wrong with it."""
        slot = slots.pop((rank, tag), None)
        if slot is not None:
            return slot
        able = 0 <= rank < self._channel.size and rank != self._channel.rank and tag >= 0
        code = self._messages.direct(tag) if able else None
        if code is None:
            return None
        slot = _HeadRequest()
        if slots is self._from:
            given = slot.head, HEAD_BYTES, self._module.BYTE
            slot.keep(self._comm.Recv_init(given, rank, code), HEAD_BYTES)
        return slot

    def _give_back(self, slots: _HeadRequests, rank: int, tag: int, slot: _HeadRequest) -> None:
        if slots.setdefault((rank, tag), slot) is not slot:
            slot.free()  # two threads sent to one rank with one tag
        elif len(slots) > _SLOTS:
            slots.popitem(last=False)[1].free()

    def _have_sent(self, slot: _HeadRequest, to: int, tag: int, nbytes: int) -> None:
        """Have a request that sends so many bytes of a head."""
        given = slot.head, nbytes, self._module.BYTE
        slot.keep(self._comm.Send_init(given, to, self._messages.direct(tag)), nbytes)

    # -- messages -------------------------------------------------------------------------

    def _send(self, x: Any, to: int, tag: int, deadline: Deadline) -> Any:
        slot = self._to.pop((to, tag), None) or self._take(self._to, to, tag)
        length = None if slot is None else self._write_head(x, slot.head)
        if slot is None or length is None:
            if slot is not None:
                self._give_back(self._to, to, tag, slot)
            return NotImplemented
        # MPI takes less than the receiver has room for, and short ones are sent faster.
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
                    finish(test, self._wait("send", tag, to, deadline))
        except BaseException:
            leave_unfinished((slot, following, x))
            with self._messages.kept_until_heard(length, to):
                raise
        self._give_back(self._to, to, tag, slot)
        return NOBODY

    def _post(self, x: Any, to: int, tag: int, length: int) -> list[Any]:
        """Begin to send what follows a head."""
        if length > LONG_BYTES:
            return self._messages.post(self._bytes(x), to, tag)
        given = self._memory(x), length, self._module.BYTE
        return [self._comm.Isend(given, to, self._messages.direct(tag))]

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
                finish(slot.test, self._wait("recv", tag, source, deadline), moving=False)
        except BaseException:
            leave_unfinished(slot)
            raise
        fits = self._read_head(slot.head, out)
        if not fits:
            self._messages.unread[source, tag] = slot.head.copy()
        self._give_back(self._from, source, tag, slot)
        if not fits:
            return NotImplemented
        if length > HEAD_ROOM:
            self._receive_rest(out, source, tag, length, deadline)
        return source

    def _receive_rest(
        self, out: Any, source: int, tag: int, length: int, deadline: Deadline
    ) -> None:
        """Receive what follows a head."""
        messages = self._messages
        if length > LONG_BYTES:
            messages.receive(self._bytes(out), source, tag, "recv", deadline)
        else:
            given = self._memory(out), length, self._module.BYTE
            request = self._comm.Irecv(given, source, messages.direct(tag))
            try:
                if not request.Test() and not spin(request.Test):
                    wait = self._wait("recv", tag, source, deadline)
                    finish(request.Test, wait, moving=False)
            except BaseException:
                leave_unfinished((request, out))
                raise
        messages.refuse_stale(length, "recv", tag)

    def _send_and_receive(
        self, x: Any, to: int, out: Any, source: int, tag: int, deadline: Deadline
    ) -> Any:
        """Exchange what is short; return None if ``out`` does not take what has come."""
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
            for test, rank in ((receiving.test, source), (sending.test, to)):
                if not test() and not spin(test):
                    wait = self._wait("sendrecv", tag, rank, deadline)
                    finish(test, wait, moving=False)
        except BaseException:
            leave_unfinished((sending, receiving))
            raise
        fits = self._read_head(receiving.head, out)
        if not fits:
            self._messages.unread[source, tag] = receiving.head.copy()
        self._give_back(self._to, to, tag, sending)
        self._give_back(self._from, source, tag, receiving)
        return source if fits else None

    def _wait(self, what: str, tag: int, rank: int, deadline: Deadline) -> Wait:
        """Return what a call needs that waits for ``rank``."""
        return self._messages.wait(what, tag, deadline, (rank,))

    # -- memory ---------------------------------------------------------------------------

    def _memory(self, array: Any) -> Any:
        """Return what mpi4py takes quickly for a plain array."""
        if type(array) is np.ndarray:
            return array
        seen = self._view(array)
        assert seen is not None
        address, nbytes, *_ = seen
        return self._module.buffer.fromaddress(address, nbytes)

    def _bytes(self, array: Any) -> Buffer:
        """Return a plain array as a buffer, which does not hold it."""
        return Buffer(np.frombuffer(self._memory(array), np.uint8), _UINT8)
