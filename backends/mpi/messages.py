"""Messages between two ranks: 64-bit tags over MPI's smaller tags, and any length."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collective.contract.backend import ANY_SOURCE, COLLECTIVE_TAG, Turns
from collective.contract.failure import Failure
from collective.contract.waits import MessageCall
from collective.deadline import Deadline

from .library import leave_unfinished
from .polling import finish, settle, spin

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.backends.peers.wait import Wait
    from collective.memory.buffer import Buffer

T = TypeVar("T")
Array = np.ndarray[Any, Any]

#: Largest number of bytes in one MPI call: counts are C integers before MPI 4.
MOST_BYTES = 2**31 - 1
# MPI's tags: one for the algorithms' messages, one for announcements, two for posted messages, then
# the tags of users, then those of announced messages.
_ALGORITHMS, _ANNOUNCEMENT, MAIL_TAG, BYTES_TAG, _USER = range(5)
#: A longer message is matched first, and received only once it is there.
LONG_BYTES = 64 << 10
#: A message of at most this length has left the sender's array when the send completes, with every
#: implementation. Open MPI's limit is the lowest, 4 KiB with its own header.
EAGER_BYTES = 2 << 10


class MpiMessages:
    """Sends and receives on one MPI communicator.

    MPI guarantees only tags up to 32767, and implementations stop at 2**29 or so. A message with a
    larger tag is announced: a short message comes first, with the tag, and with the MPI tag under
    which the contents follow.

    Attributes:
        unread: messages that were received already but have to be received again, by source and
            tag.
    """

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        self._module = module
        self._comm = comm
        self._channel = channel
        # MPI attaches this attribute only to COMM_WORLD (MPI 4.1, section 9.1.2).
        self._most_tag = int(module.COMM_WORLD.Get_attr(module.TAG_UB))
        # Half of the tags are for users, the other half for announced messages.
        self._most_user = self._most_tag // 2
        self._lock = threading.Lock()
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._announced: dict[tuple[int, int], deque[int]] = {}
        self._turns = Turns()  # of announced messages; MPI chooses among all others
        self.unread: dict[tuple[int, int], Array] = {}

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        """Send ``src``; return when the caller may change ``src``."""
        self._refuse_broken("send", tag)
        with self.kept_until_heard(src.nbytes, dst):
            self._settle(self.post(src, dst, tag), MessageCall("send", tag, dst, None), deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        """Receive into ``dst``; return the sender."""
        self._refuse_broken("recv", tag)
        source = self.receive(dst, src, tag, "recv", deadline)
        self.refuse_stale(dst.nbytes, "recv", tag)
        return source

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        """Send and receive at once; polling for one of the two makes both progress."""
        self._refuse_broken("sendrecv", tag)
        with self.kept_until_heard(src.nbytes, to):
            sending = self.post(src, to, tag)
            try:
                self.receive(dst, source, tag, "sendrecv", deadline)
            except BaseException:
                for request in sending:
                    leave_unfinished(request)
                raise
            self.refuse_stale(dst.nbytes, "sendrecv", tag)
            self._settle(sending, MessageCall("sendrecv", tag, to, None), deadline)

    # -- sending --------------------------------------------------------------------------

    def post(self, src: Buffer, dst: int, tag: int) -> list[Any]:
        """Begin to send ``src``."""
        isend, byte = self._comm.Isend, self._module.BYTE
        array, nbytes = src.array, src.nbytes
        requests = []
        code = self.direct(tag)
        if code is None:
            code = self._code_of_next(dst)
            requests.append(isend(np.array([tag, code], np.int64), dst, _ANNOUNCEMENT))
        if nbytes <= MOST_BYTES:
            requests.append(isend((array, nbytes, byte), dst, code))
        else:
            requests += [isend((part, part.size, byte), dst, code) for part in parts(array)]
        return requests

    def direct(self, tag: int) -> int | None:
        """Return MPI's tag for ``tag``, or None if the message has to be announced."""
        if 0 <= tag <= self._most_user - _USER:
            return tag + _USER
        return _ALGORITHMS if tag == COLLECTIVE_TAG else None

    def _code_of_next(self, dst: int) -> int:
        """Return MPI's tag for the next announced message to ``dst``.

        The tags are used in turn. A tag is used again only after thousands of messages to one rank;
        should both messages be in flight, they are received in the order in which they were sent.
        """
        with self._lock:
            number = self._sent[dst]
            self._sent[dst] = number + 1
        return self._most_user + 1 + number % (self._most_tag - self._most_user)

    # -- receiving ------------------------------------------------------------------------

    def receive(self, dst: Buffer, src: int, tag: int, what: str, deadline: Deadline) -> int:
        """Receive into ``dst`` for the call ``what``; return the sender."""
        for source, other in list(self.unread):
            if other == tag and src in (source, ANY_SOURCE):
                dst.array[:] = self.unread.pop((source, tag))
                return source
        call = MessageCall(what, tag, None, src)
        code = self.direct(tag)
        if code is None:
            src, code = self._find(lambda: self._announcement(src, tag), call, deadline)
        irecv, byte = self._comm.Irecv, self._module.BYTE
        array, nbytes = dst.array, dst.nbytes
        # A short message is received at once: if it never comes, MPI keeps only a short array for
        # good. A long message is matched first, so that MPI owns its array only while it fills it.
        if nbytes <= LONG_BYTES and src != ANY_SOURCE:
            request = irecv((array, nbytes, byte), src, code)
            self._settle([request], call, deadline, moving=False)
            return src
        match = functools.partial(self._match, src, code)
        src, message = self._find(match, call, deadline)
        # The handle belongs to the first part. The other parts follow from the same rank with the
        # same tag, and MPI keeps their order.
        first, *rest = parts(array)
        requests = [message.Irecv((first, first.size, byte))]
        requests += [irecv((part, part.size, byte), src, code) for part in rest]
        self._settle(requests, call._replace(source=src), deadline)
        return src

    def _match(self, src: int, code: int) -> tuple[int, Any] | None:
        """Return the sender and MPI's handle of a message that is there, or None."""
        status = self._module.Status()
        message = self._comm.Improbe(_any(self._module, src), code, status)
        return None if message is None else (status.Get_source(), message)

    def _announcement(self, src: int, tag: int) -> tuple[int, int] | None:
        """Return the sender and MPI's tag of an announced message, or None."""
        sources = range(self._channel.size) if src == ANY_SOURCE else (src,)
        with self._lock:
            while (match := self._match(src, _ANNOUNCEMENT)) is not None:
                words = np.empty(2, np.int64)
                match[1].Recv(words)
                self._announced.setdefault((match[0], int(words[0])), deque()).append(int(words[1]))
            for rank in self._turns.of(sources, tag):
                codes = self._announced.get((rank, tag))
                if codes:
                    self._turns.serve(sources, rank, tag)
                    code = codes.popleft()
                    if not codes:
                        del self._announced[rank, tag]
                    return rank, code
        return None

    # -- waiting --------------------------------------------------------------------------

    def _find(self, look: Callable[[], T | None], call: MessageCall, deadline: Deadline) -> T:
        """Call ``look()`` until its result is not None, and return the result."""
        results: list[T] = []

        def test() -> bool:
            result = look()
            if result is not None:
                results.append(result)
            return result is not None

        if not spin(test):
            finish(test, self.wait(call, deadline), moving=False)
        return results[0]

    def _settle(
        self, requests: list[Any], call: MessageCall, deadline: Deadline, moving: bool = True
    ) -> None:
        settle(requests, lambda: self.wait(call, deadline), moving)

    def wait(self, call: MessageCall, deadline: Deadline) -> Wait:
        """Return the :class:`Wait` of a call that still sends a message or receives one."""
        # A receive from any rank waits for the first sender.
        return self._channel.wait(call, deadline, self._awaited(call), any_of=True)

    def _awaited(self, call: MessageCall) -> Sequence[int]:
        rank = call.source if call.to is None else call.to
        if rank is not None and rank != ANY_SOURCE:
            return (rank,)
        return [rank for rank in range(self._channel.size) if rank != self._channel.rank]

    def _refuse_broken(self, what: str, tag: int) -> None:
        if self._channel.failure is not None:
            self._channel.check(f"{what}(tag={tag})")

    @contextlib.contextmanager
    def kept_until_heard(self, nbytes: int, dst: int) -> Iterator[None]:
        """Delay a failure of the body until the message's receiver has acknowledged the failure.

        The owner must not get the array back earlier: MPI cannot cancel a send that has begun, and
        reads the array when the receiver comes.
        """
        try:
            yield
        except BaseException as error:
            if nbytes > EAGER_BYTES:
                if not isinstance(error, Exception):  # a KeyboardInterrupt, unknown to the peers
                    self._channel.abort(Failure.caused_by(self._channel.rank, error))
                self._channel.await_heard((dst,))
            raise

    def refuse_stale(self, nbytes: int, what: str, tag: int) -> None:
        """Raise if the received data may be wrong, because the sender may have given up."""
        if nbytes > EAGER_BYTES:
            self._refuse_broken(what, tag)


def _any(module: Any, src: int) -> int:
    return int(module.ANY_SOURCE) if src == ANY_SOURCE else src


def parts(array: Array) -> list[Array]:
    """Cut an array into parts that fit into one MPI call each; there is at least one part."""
    raw = array.view(np.uint8)
    return [raw[start : start + MOST_BYTES] for start in range(0, raw.size, MOST_BYTES)] or [raw]
