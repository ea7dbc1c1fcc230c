"""Messages over one connection, in both directions."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from collective.backends.flow import Flow
from collective.backends.inbox import Array, StreamLock
from collective.control.link import Records

_PREFIX = struct.Struct("<Qqq")
# Bytes that one system call moves at most: both directions take turns, and the caches keep what a
# fold is about to read.
_PART_BYTES = 256 << 10
# Bytes that are read before a message is known. Longer parts go straight to the receiver's array.
_AHEAD_BYTES = 4 << 10


class TcpPrefix(NamedTuple):
    """Beginning of a message on the wire: 24 bytes, little endian.

    Attributes:
        nbytes: length of the message, without the prefix.
        tag: tag of the message.
        mark: digest of the collective call; number of a message that is only announced; or 0.
    """

    nbytes: int
    tag: int
    mark: int


class TcpStream:
    """Connection to one peer, as a :class:`~collective.backends.inbox.Carrier`.

    Args:
        sock: connected socket, which does not block.
        early: bytes that the peer has sent already, as plain text.
        refuse: function that breaks the communicator; its argument says what is wrong.

    Attributes:
        sock: the socket.
        flow: flow control of the messages.
        sending: lock of the stream to the peer, held from the beginning of a frame to its end.
    """

    def __init__(
        self, sock: socket.socket, early: bytes, refuse: Callable[[str], NoReturn]
    ) -> None:
        self.sock = sock
        self.sending, self.receiving = StreamLock(), StreamLock()
        self.flow = Flow(self)
        self._refuse = refuse
        self._due = b""  # the rest of a control frame, or of several
        self._ahead = bytearray(max(_AHEAD_BYTES, len(early)))
        self._ahead[: len(early)] = early
        # The part of _ahead that holds bytes which no receiver has taken yet.
        self._start, self._end = 0, len(early)

    def refuse(self, what: str) -> NoReturn:
        """Break the communicator, since the peer has sent damaged data."""
        self._refuse(what)

    def early(self) -> bytes:
        """Return the bytes that have come before anybody asked for them."""
        return bytes(self._ahead[self._start : self._end])

    # -- the carrier --------------------------------------------------------------------------

    def write(self, content: Array, tag: int, mark: int = 0) -> Iterator[None]:
        """Send a message; yield while the socket takes no more."""
        yield from self.write_due(self.flow)
        left = content.data
        prefix = _PREFIX.pack(left.nbytes, tag, mark)
        while prefix or left:
            try:
                sent = self._send(prefix, left[:_PART_BYTES])
            except BlockingIOError:
                yield
                continue
            left = left[max(0, sent - len(prefix)) :]
            prefix = prefix[sent:]

    def announce(self, nbytes: int, tag: int, number: int) -> Iterator[None]:
        """Send the prefix of a message, whose bytes the peer may ask for by the number."""
        yield from self.write_due(self.flow)
        self._due = _PREFIX.pack(nbytes, tag, number)
        yield from self.write_due(self.flow)

    def write_due(self, flow: Flow) -> Iterator[None]:
        """Send the control frames that are due; yield while the socket takes no more."""
        while self._due or flow.due:
            while flow.due:
                self._due += _PREFIX.pack(*flow.due.pop(0))
            try:
                self._due = self._due[self._send(b"", memoryview(self._due)) :]
            except BlockingIOError:
                yield

    def prefix(self) -> TcpPrefix | None:
        """Return the next prefix and leave it in the stream; None if there is no prefix yet.

        Raises:
            EOFError: the connection has ended, or failed.
        """
        while self._end - self._start < _PREFIX.size:
            if self._start:
                # Move the beginning of a prefix to the front, where there is room for the rest.
                rest = self._ahead[self._start : self._end]
                self._ahead[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            count = self._receive(memoryview(self._ahead)[self._end :])
            if not count:
                return None
            self._end += count
        return TcpPrefix(*_PREFIX.unpack_from(self._ahead, self._start))

    def read(self, prefix: TcpPrefix, out: Array) -> Iterator[None]:
        """Take a prefix and its message off the stream; yield while bytes are missing."""
        self._start += _PREFIX.size
        left = out.data
        ahead = min(left.nbytes, self._end - self._start)
        left[:ahead] = memoryview(self._ahead)[self._start : self._start + ahead]
        self._start += ahead
        left = left[ahead:]
        while left:
            count = self._receive(left[:_PART_BYTES])
            if count:
                left = left[count:]
            else:
                yield

    @property
    def is_due(self) -> bool:
        """Whether control frames have not left."""
        return bool(self._due or self.flow.due)

    # -- bytes --------------------------------------------------------------------------------

    def _send(self, prefix: bytes, part: memoryview) -> int:
        return self.sock.sendmsg((prefix, part) if prefix else (part,))

    def _receive(self, room: memoryview) -> int:
        """Read into ``room``; return the number of bytes, or 0 if none are there yet.

        Raises:
            EOFError: the connection has ended, or failed.
        """
        try:
            count = self.sock.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise EOFError(f"the connection failed: {error}") from error
        if not count:
            raise EOFError("the peer has closed the connection")
        return count

    # -- the end ------------------------------------------------------------------------------

    def cut(self) -> None:
        """End both directions: every thread that waits here or at the peer wakes up."""
        with contextlib.suppress(OSError):  # the peer was faster
            self.sock.shutdown(socket.SHUT_RDWR)

    #: A message stays incomplete. What would follow it on the connection is no prefix.
    spoil = cut


class _EncryptedStream(TcpStream):
    """Connection to one peer inside of TLS. Python's OpenSSL makes the records.

    Args:
        sock, early, refuse: as for :class:`TcpStream`.
        records: the TLS records of the connection, after the handshake.
    """

    def __init__(
        self, sock: socket.socket, early: bytes, refuse: Callable[[str], NoReturn], records: Records
    ) -> None:
        super().__init__(sock, early, refuse)
        self._records = records
        # Encrypted bytes that the socket has not taken yet.
        self._unsent = memoryview(b"")

    def write(self, content: Array, tag: int, mark: int = 0) -> Iterator[None]:
        """Send a message; yield while the socket takes no more."""
        yield from super().write(content, tag, mark)
        yield from self._flush_all()

    def write_due(self, flow: Flow) -> Iterator[None]:
        """Send the control frames that are due; yield while the socket takes no more."""
        yield from super().write_due(flow)
        yield from self._flush_all()

    @property
    def is_due(self) -> bool:
        """Whether control frames have not left."""
        return bool(self._unsent) or super().is_due

    def _flush_all(self) -> Iterator[None]:
        while self._unsent:
            try:
                self._flush()
            except BlockingIOError:
                yield

    def _send(self, prefix: bytes, part: memoryview) -> int:
        """Encrypt all of it; return its length. The socket may take it later.

        Raises:
            BlockingIOError: the socket has not taken the bytes before it, so nothing was done.
        """
        while self._unsent:
            self._flush()
        encrypted = self._records.put(prefix) if prefix else b""
        self._unsent = memoryview(encrypted + self._records.put(part))
        with contextlib.suppress(BlockingIOError):
            self._flush()
        return len(prefix) + part.nbytes

    def _flush(self) -> None:
        self._unsent = self._unsent[self.sock.send(self._unsent) :]

    def _receive(self, room: memoryview) -> int:
        """Read plain text into ``room``; see :meth:`TcpStream._receive`."""
        try:
            while not (count := self._records.fill(room)):
                chunk = self.sock.recv(_PART_BYTES)
                if not chunk:
                    raise EOFError("the peer has closed the connection")
                self._records.add(chunk)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise EOFError(f"the connection failed: {error}") from error
        return count


def stream_of(
    sock: socket.socket, early: bytes, records: Records | None, refuse: Callable[[str], NoReturn]
) -> TcpStream:
    """Return the stream of a new connection; see :class:`TcpStream` and :class:`Records`."""
    if records is None:
        return TcpStream(sock, early, refuse)
    return _EncryptedStream(sock, early, refuse, records)
