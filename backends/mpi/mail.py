"""Posted messages over MPI: the engine of this package matches them, and MPI moves their bytes.

MPI cannot post a receive of unknown length, and its own tags are small. So all posted messages have
one tag of MPI, and begin with their length and their tag. A short message is one message of MPI.
The bytes of a longer one follow as messages with another tag.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from collective.backends.inbox import StreamLock
from collective.backends.mail import PythonMail
from collective.backends.matching import Matcher, Waiter, awaited, describe
from collective.contract.backend import ANY_SOURCE
from collective.contract.failure import Failure
from collective.contract.mail import EAGER_BYTES
from collective.deadline import Deadline

from .library import leave_unfinished
from .messages import BYTES_TAG, MAIL_TAG, parts
from .polling import finish, spin

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel

Array = np.ndarray[Any, Any]

_PREFIX = struct.Struct("<Qq")
# Bytes of the messages to one rank that MPI has not passed on. Beyond it a send waits.
_COPIED_BYTES = 64 << 20


class _MpiPrefix(NamedTuple):
    """Beginning of a message: its length and its tag, and the bytes of a short one."""

    nbytes: int
    tag: int
    content: Array


class _MpiCarrier:
    """Messages to and from one rank, as a :class:`~collective.backends.inbox.Carrier`."""

    def __init__(self, module: Any, comm: Any, channel: Channel, peer: int) -> None:
        self._module, self._comm, self._channel, self._peer = module, comm, channel, peer
        self.receiving = StreamLock()
        # Short messages that MPI has not passed on yet, with their bytes.
        self._sent: deque[tuple[Any, Array]] = deque()
        self._copied = 0
        self._next: _MpiPrefix | None = None

    def write(self, content: Array, tag: int) -> Iterator[None]:
        """Send a message; yield until MPI has done so with a long one."""
        comm, byte = self._comm, self._module.BYTE
        short = content.size <= EAGER_BYTES
        self._prune()
        while self._copied > _COPIED_BYTES:
            yield
            self._prune()
        head = np.empty(_PREFIX.size + (content.size if short else 0), np.uint8)
        _PREFIX.pack_into(head.data, 0, content.size, tag)
        if short:
            head[_PREFIX.size :] = content
        self._sent.append((comm.Isend((head, head.size, byte), self._peer, MAIL_TAG), head))
        self._copied += head.size
        if not short:
            isend, peer = comm.Isend, self._peer
            yield from _complete(
                [isend((part, part.size, byte), peer, BYTES_TAG) for part in parts(content)]
            )

    def _prune(self) -> None:
        while self._sent and self._sent[0][0].Test():
            self._copied -= self._sent.popleft()[1].size

    def prefix(self) -> _MpiPrefix | None:
        """Return the next prefix; None if there is none yet."""
        if self._next is None:
            status = self._module.Status()
            message = self._comm.Improbe(self._peer, MAIL_TAG, status)
            if message is None:
                return None
            head = np.empty(status.Get_count(self._module.BYTE), np.uint8)
            message.Recv((head, head.size, self._module.BYTE))
            if head.size < _PREFIX.size:
                self.refuse(f"a message of {head.size} bytes")
            nbytes, tag = _PREFIX.unpack_from(head.data)
            self._next = _MpiPrefix(nbytes, tag, head[_PREFIX.size :])
        return self._next

    def read(self, prefix: _MpiPrefix, out: Array) -> Iterator[None]:
        """Take a message; yield while bytes are missing."""
        self._next = None
        if prefix.nbytes <= EAGER_BYTES:
            if prefix.content.size != prefix.nbytes:
                self.refuse(f"{prefix.content.size} bytes in place of {prefix.nbytes}")
            out[:] = prefix.content
            return
        irecv, byte = self._comm.Irecv, self._module.BYTE
        yield from _complete([irecv((p, p.size, byte), self._peer, BYTES_TAG) for p in parts(out)])

    def leave(self) -> None:
        """Leave the messages to MPI that it has not passed on yet."""
        self._prune()
        for request, _ in self._sent:
            leave_unfinished(request)

    def spoil(self) -> None:
        """Do nothing: a message that is given up breaks the communicator."""

    def refuse(self, what: str) -> NoReturn:
        """Break the communicator, since the peer has sent damaged data."""
        text = f"rank {self._peer}'s messages to rank {self._channel.rank} are damaged: {what}"
        self._channel.abort(Failure("aborted", self._channel.rank, text))
        self._channel.check("recv", ())
        raise AssertionError(text)


def _complete(requests: list[Any]) -> Iterator[None]:
    """Yield until requests are over. MPI keeps the memory of those that are given up."""
    try:
        for request in requests:
            while not request.Test():
                yield
    except BaseException:
        for request in requests:
            leave_unfinished(request)
        raise


class _MpiMail(PythonMail):
    """Posted messages over MPI."""

    lines: Mapping[int, _MpiCarrier]

    def close(self) -> None:
        """End all operations; messages that MPI has not passed on keep their memory."""
        super().close()
        for line in self.lines.values():
            line.leave()


def mail_of(module: Any, comm: Any, channel: Channel) -> PythonMail:
    """Return the posted messages of one rank of an MPI communicator."""
    peers = [rank for rank in range(channel.size) if rank != channel.rank]
    lines = {peer: _MpiCarrier(module, comm, channel, peer) for peer in peers}
    engine = Matcher(lines, rank=channel.rank)

    def wait(waiter: Waiter, to: int, source: int, tag: int, deadline: Deadline) -> None:
        pending = 0

        def test() -> bool:
            nonlocal pending
            pending = waiter.advance()
            return not pending

        if not spin(test):
            any_of, where = source == ANY_SOURCE, describe(to, source, tag)
            ranks = awaited(pending, to, source, peers)
            finish(test, channel.wait(where, deadline, ranks, any_of), moving=False)

    def refuse(where: object) -> None:
        channel.check(where, ())
        channel.refuse_closed(where)

    mail = _MpiMail(
        engine, wait, refuse, lambda: channel.failure or channel.closed, lambda posted: posted.error
    )
    mail.lines = lines
    return mail
