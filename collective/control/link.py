"""Messages between the ranks outside the transport: JSON over one authenticated connection.

A connection begins with a handshake, in which each side proves that it knows the job's key
(HMAC-SHA256, RFC 2104). On a shared machine or network any program can connect, but it must not be
able to join or to speak. During the handshake nothing is parsed: each side sends a fixed number of
bytes, and a side that sends other bytes gets no further. Afterwards every message is a JSON object,
preceded by its length.
"""

# Nothing is parsed before a proof, because one odd byte of a stranger used to end the listening
# thread. The proof covers the nonces of both sides, so it cannot be replayed, and names the side,
# so it cannot be sent back to its maker.
#
# TLS hides the messages, and the secret decides who may join: so TLS needs the secret as well, and
# any certificate of the job's authority will do. Keys for TLS derived from the secret (PSK) need
# Python 3.13. TLS runs beside the socket (Records) and not around it: ssl.SSLSocket holds a lock
# while it waits for bytes, and another thread could not send meanwhile.
#
# Each side bounds what the other can cost it: the length of a message, the time of a write, and the
# bytes of a backlog. A peer that is stopped must not stop the threads that write to it.

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from collective.platform import bound_locally, connected_locally, notice_silence

from .ports import QUEUE, Ports, listening

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from collective.deadline import Deadline

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
# Longest message in bytes. The receiver reads the length first, and keeps the bytes that have come
# until all are there. Without a bound one word of a peer could make it keep 4 GiB.
_LIMIT = 1 << 26
# Timeout of a write: a peer that is stopped or cut off must not stop the threads that write to it.
_SEND_S = 2.0
# After about this many seconds the kernel notices that a host has vanished without a word.
_SILENCE_S = 5
# How often a side that connects checks whether the other side is known to be gone.
_LOOK_S = 0.1
# First bytes of the listening side. A rank that meets another program there can say so.
_GREETING = b"collective 1\n"
_NONCE_BYTES = _PROOF_BYTES = 32


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


class ProofError(ConnectionError):
    """The other side has not proved that it knows the key."""


class KeyDiffersError(ProofError):
    """The other side is a listener of this library, and most likely has another key."""


class AnotherKeyError(KeyDiffersError):
    """A listener of this library has answered that it has another key."""


class Tls(NamedTuple):
    """TLS contexts of both sides of the control connections between ranks of several hosts."""

    connecting: ssl.SSLContext
    listening: ssl.SSLContext


# Sockets that a forked child has to close.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Link:
    """One end of a connection. Any thread may send; only one thread receives.

    Args:
        sock: a connected socket.
        tls: TLS context that encrypts the connection, one of a :class:`Tls`; None for plain text.
        longest: number of bytes that a message of the peer may have.

    Attributes:
        received: number of bytes that have come from the peer, of any kind.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None = None, longest: int = _LIMIT
    ) -> None:
        self.received = 0
        self._longest = longest
        self._socket = sock
        close_in_children(sock)
        self._records = None if tls is None else Records(tls)
        self._received = bytearray()
        self._unread: list[Message] = []
        self._sending = threading.Lock()
        self._deferred: deque[Message] = deque()
        # Bytes from post() that the peer has not taken yet.
        self._backlog = bytearray()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_S))
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_silence(sock, _SILENCE_S)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def read(self) -> bytes:
        """Wait for bytes and return those that are there; with TLS the result may be empty.

        Raises:
            EOFError: the peer has closed its end, or is gone.
            OSError: the connection failed.
        """
        try:
            chunk = self._socket.recv(1 << 16)
        except ConnectionResetError:
            # If a peer on this host closes its socket with unread data, the kernel resets the
            # connection. This side sees the reset before the bytes that the peer sent last, but
            # these bytes are still there. They may be a goodbye: without it the rank would count as
            # lost.
            chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise EOFError("the peer has closed the connection")
        self.received += len(chunk)
        if self._records is None:
            return chunk
        try:
            plain = self._records.take(chunk)
        except OSError:
            with contextlib.suppress(OSError):
                self._socket.send(self._records.alert())  # tell the peer the reason
            raise
        if self._records.waiting:
            self.write(b"")
        return plain

    def write(self, data: bytes) -> None:
        """Send ``data``.

        Raises:
            OSError: the peer is gone, or does not read.
        """
        with self._sending:
            travelling = self._records.put(data) if self._records else data
            if self._backlog:
                self._backlog += travelling  # keep the order: the backlog has to arrive first
                return
            try:
                self._socket.sendall(travelling)
            except OSError:
                # A part of the data may be in flight, so the peer could not parse what follows it.
                self.cut()
                raise
        self._send_deferred()

    def send(self, message: Message) -> None:
        """Send ``message``; raise the errors of :meth:`write`."""
        self.write(encoded(message))

    def post(self, message: Message) -> None:
        """Send as much of ``message`` as the peer takes at once, and leave the rest to ``flush``.

        Raises:
            OSError: the peer is gone, or keeps asking and reads no answers.
        """
        data = encoded(message)
        with self._sending:
            if len(self._backlog) > self._longest:
                raise OSError(errno.ENOBUFS, "the peer does not read its answers")
            self._backlog += self._records.put(data) if self._records else data
        self.flush()

    def flush(self) -> bool:
        """Send as much of the posted bytes as the peer takes now; return whether that was all.

        Raises:
            OSError: the peer is gone.
        """
        with self._sending:
            while self._backlog:
                try:
                    sent = self._socket.send(self._backlog, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                del self._backlog[:sent]
        return True

    def send_when_free(self, message: Message) -> None:
        """Send ``message`` now, or leave it to the thread that is sending; do not wait for it.

        Raises:
            OSError: as :meth:`send`.
        """
        # First queue the message, then look at the lock. The thread that is sending looks at the
        # queue after it has released the lock. So if this thread finds the lock taken, that thread
        # sends the message.
        self._deferred.append(message)
        self._send_deferred()

    def _send_deferred(self) -> None:
        with contextlib.suppress(IndexError):  # the queue is empty, or another thread emptied it
            while not self._sending.locked():
                self.send(self._deferred.popleft())

    def receive(self) -> list[Message]:
        """Return the messages that are complete after one read, which may block.

        Raises:
            EOFError, OSError: as :meth:`read`.
            ValueError: the received bytes are not a message.
        """
        if self._unread:
            messages, self._unread = self._unread, []
            return messages
        self._received += self.read()
        messages = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > self._longest:
                raise ValueError(f"a message of {length} bytes; the limit is {self._longest}")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(parse(bytes(self._received[_LENGTH.size : end])))
            del self._received[:end]
        return messages

    def arrived(self) -> list[Message]:
        """Return the messages that have come; do not wait for more.

        Raises:
            EOFError, OSError, ValueError: as :meth:`receive`.
        """
        messages: list[Message] = []
        arrivals = select.poll()
        arrivals.register(self._socket, select.POLLIN)
        while self._unread or arrivals.poll(0):
            messages += self.receive()
        return messages

    def expect(self, deadline: Deadline) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: no message was complete before the deadline.
            EOFError, OSError, ValueError: as :meth:`receive`.
        """
        messages: list[Message] = []
        while not messages:
            with self._until(deadline):
                messages = self.receive()
        self._unread += messages[1:]
        return messages[0]

    def exactly(
        self, count: int, deadline: Deadline, look: Callable[[], object] = lambda: None
    ) -> bytes:
        """Return the next ``count`` bytes of a connection that carries no messages yet.

        Args:
            count: number of bytes.
            deadline, look: as for :func:`connect`.

        Raises:
            EOFError, OSError: as :meth:`read`; ``TimeoutError`` if the deadline passes.
        """
        while len(self._received) < count:
            look()
            try:
                with self._until(deadline.within(_LOOK_S)):
                    self._received += self.read()
            except TimeoutError as error:
                # The kernel's own timeout, which has a number, means that the peer is gone.
                if deadline.expired or error.errno is not None:
                    raise
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    @contextlib.contextmanager
    def _until(self, deadline: Deadline) -> Any:
        # Set the timeout anew for each read: a peer that sends a byte now and then must not hold
        # this thread past the deadline.
        self._socket.settimeout(deadline.left())
        try:
            yield
        except BlockingIOError:
            # With no time left the socket does not block: it returns the bytes that are there, or
            # raises this.
            raise TimeoutError("timed out") from None
        finally:
            self._socket.settimeout(None)

    def prove(
        self, key: bytes, deadline: Deadline, look: Callable[[], object] = lambda: None
    ) -> None:
        """Take part in the handshake on the connecting side; ``look`` is as for :func:`connect`.

        Raises:
            ProofError: the other side is not a listener of this library, does not know ``key``, or
                does not accept this side's proof.
            AnotherKeyError: the other side has another key. So the listener that had this address
                before no longer listens there: of two sockets only one can.
            OSError: the connection failed, or the deadline passed.
        """
        try:
            greeting = self.exactly(len(_GREETING) + _NONCE_BYTES, deadline, look)
        except EOFError:
            raise ProofError("it closed the connection without a greeting") from None
        if not greeting.startswith(_GREETING):
            raise ProofError("another program listens there")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        nonces = greeting[len(_GREETING) :] + nonce
        self.write(nonce + _proof(key, b"connecting", nonces))
        try:
            answer = self.exactly(_PROOF_BYTES, deadline, look)
        except EOFError:
            raise KeyDiffersError(
                "it closed the connection: its key differs, or it has ended"
            ) from None
        if not hmac.compare_digest(answer, _proof(key, b"listening", nonces)):
            raise AnotherKeyError("its key differs: it does not know this job's key")

    def cut(self) -> None:
        """End the connection: both sides then read its end, even a thread that is in receive()."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def hand_over(self) -> tuple[socket.socket, bytes, Records | None]:
        """Return the socket, the bytes behind all that was read, and the TLS records; end the link.

        The caller owns the socket. It does not block, and forked children close it. If there are
        records, the bytes are plain text, and all later bytes must pass through the records.
        """
        if self._socket.family != socket.AF_UNIX:
            # The peer of a link reads at once. The new owner's peer may leave bytes unread for
            # hours, while it computes. The kernel would take that for silence, although the other
            # kernel answers its probes. Keep-alive stays, for a connection without unread bytes.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._socket.setblocking(False)
        return self._socket, bytes(self._received), self._records

    def close(self) -> None:
        """Close the connection. Closing twice is harmless."""
        self.cut()
        self._socket.close()


class Records:
    """One side of a TLS connection: bytes in, bytes out, and no socket.

    So a thread that waits in recv(2) holds no lock that a sending thread needs. Any thread may
    call the methods.

    Args:
        context: one of a :class:`Tls`; its protocol tells whether this is the listening side.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        import ssl  # imported here and not above, because most programs need no OpenSSL

        self._incomplete = ssl.SSLWantReadError
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        listening = context.protocol == ssl.PROTOCOL_TLS_SERVER
        # The type stubs know no read() into a buffer.
        self._tls: Any = context.wrap_bio(self._incoming, self._outgoing, server_side=listening)
        # Reentrant: a finalizer may send in the same thread, between two steps of take().
        self._lock = threading.RLock()
        self._shaken = False
        self._early = b""  # plain text to send after the handshake

    def take(self, chunk: bytes) -> bytes:
        """Return the plain text that ``chunk`` completes."""
        with self._lock:
            self._incoming.write(chunk)
            parts = []
            with contextlib.suppress(self._incomplete):
                self._shake()
                while part := self._tls.read(1 << 16):
                    parts.append(part)
            return b"".join(parts)

    def add(self, chunk: bytes) -> None:
        """Take bytes of the peer, for :meth:`fill`."""
        with self._lock:
            self._incoming.write(chunk)

    def fill(self, room: memoryview) -> int:
        """Write plain text to ``room``; return its length, or 0 if no record is complete.

        Raises:
            EOFError: the peer has ended the connection.
            OSError: the bytes of the peer are not valid.
        """
        filled = 0
        with self._lock, contextlib.suppress(self._incomplete):
            while filled < len(room):
                count = self._tls.read(len(room) - filled, room[filled:])
                if not count:
                    break
                filled += count
            if not filled:
                raise EOFError("the peer has closed the connection")
        return filled

    def put(self, data: bytes | memoryview) -> bytes:
        """Return the bytes to send for ``data``, and for the handshake."""
        with self._lock:
            if self._shaken and not self._early:
                if data:  # OpenSSL refuses to write nothing
                    self._tls.write(data)
                return self._outgoing.read()
            self._early += bytes(data)
            with contextlib.suppress(self._incomplete):
                self._shake()
                if self._early:
                    self._tls.write(self._early)
                    self._early = b""
            return self._outgoing.read()

    @property
    def waiting(self) -> bool:
        """Whether TLS itself has bytes to send, which :meth:`put` would return."""
        return bool(self._outgoing.pending or (self._shaken and self._early))

    def alert(self) -> bytes:
        """Return the bytes to send after :meth:`take` has raised."""
        with self._lock:
            return self._outgoing.read()

    def _shake(self) -> None:
        if not self._shaken:
            self._tls.do_handshake()
            self._shaken = True


class Challenge:
    """The listening side of one handshake.

    Attributes:
        greeting: bytes to send first.
        length: number of bytes that :meth:`answer` takes.
        refusal: answer to a proof of another key, which proves nothing. A peer that is turned away
            for another reason gets no answer.
    """

    length = _NONCE_BYTES + _PROOF_BYTES
    refusal = bytes(_PROOF_BYTES)

    def __init__(self) -> None:
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.greeting = _GREETING + self._nonce

    def answer(self, key: bytes, received: bytes) -> bytes:
        """Return this side's proof for a peer whose first bytes were ``received``.

        Raises:
            ProofError: these bytes do not prove that the peer knows ``key``.
        """
        nonces = self._nonce + received[:_NONCE_BYTES]
        expected = _proof(key, b"connecting", nonces)
        if not hmac.compare_digest(received[_NONCE_BYTES:], expected):
            raise ProofError("it does not know this job's key")
        return _proof(key, b"listening", nonces)


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    # The proof covers both nonces and the side, so that no program can have a rank answer the
    # challenge that the program itself was given.
    return hmac.digest(key, side + nonces, "sha256")


def encoded(message: Message) -> bytes:
    """Return the bytes of ``message`` on the wire, for :meth:`Link.write`."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def parse(text: bytes) -> Message:
    """Return the message of ``text``.

    Raises:
        ValueError: the text is not a JSON object, or readers may differ in how they read it.
    """
    try:
        message = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message that is a {type(message).__name__}")
    return message


def _distinct(pairs: list[tuple[str, Any]]) -> Message:
    message = dict(pairs)
    if len(message) != len(pairs):
        raise ValueError("a message with a key twice")
    return message


def _refuse(constant: str) -> Any:
    raise ValueError(f"a message with {constant}")


def listen(host: str | None, ports: Ports | None = None) -> tuple[socket.socket, str]:
    """Return a listening socket, and its address for :func:`connect`.

    Args:
        host: an address of this host, if ranks are on several hosts; None for this host alone.
            Then no other host can reach the socket.
        ports: ports of ``host`` that the socket may have; None for any.

    Raises:
        ConfigError: none of ``ports`` is free.
        OSError: the address is not one of this host.
    """
    if host is None:
        sock, address = bound_locally()
        sock.listen(QUEUE)
    else:
        family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = listening(family, place) if ports is None else ports.listen(family, place)
        address = f"{host} {sock.getsockname()[1]}"
    close_in_children(sock)
    return sock, address


def connect(
    address: str,
    key: bytes,
    deadline: Deadline,
    tls: Tls | None = None,
    look: Callable[[], object] = lambda: None,
) -> Link:
    """Return a link to ``address``, after both sides have proved that they know ``key``.

    Args:
        address: address from :func:`listen`.
        key: secret key of both sides.
        deadline: moment by which both sides must have proved that they know it.
        tls: TLS contexts for a connection that leaves this host, or None.
        look: called repeatedly meanwhile. It raises if the other side is known to be gone, which
            the network may not tell: a host without power does not answer.

    Raises:
        ProofError: the listening side does not know the key, or does not accept this side's proof.
        OSError: no program listens there, or none answers before the deadline.
    """
    sock = _connected(address, deadline, look)
    try:
        sock.settimeout(None)
        # Only TCP addresses contain a space. Other connections stay on this host, and are not
        # encrypted.
        link = Link(sock, tls.connecting if tls and " " in address else None)
        link.write(b"")  # with TLS, this side begins
        link.prove(key, deadline, look)
    except BaseException:
        sock.close()
        raise
    return link


def _connected(address: str, deadline: Deadline, look: Callable[[], object]) -> socket.socket:
    host, _, port = address.partition(" ")
    try:
        if port:
            return _dialled(host, int(port), deadline, look)
        return connected_locally(host, deadline.left())
    except BlockingIOError:
        # The deadline had passed before the connection, or the listener's queue stayed full.
        raise TimeoutError("timed out") from None
    # A host name that cannot be encoded raises UnicodeError, which is a ValueError.
    except (OverflowError, ValueError) as error:
        raise OSError(errno.EINVAL, f"{address!r} is not an address: {error}") from error


def _dialled(host: str, port: int, deadline: Deadline, look: Callable[[], object]) -> socket.socket:
    """Return a socket that is connected over TCP, as ``socket.create_connection`` does."""
    refusal: OSError | None = None
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            code = sock.connect_ex(place)
            answers = select.poll()
            answers.register(sock, select.POLLOUT)
            while code == errno.EINPROGRESS:
                look()
                # With no time left, this looks once whether the answer is there.
                if answers.poll(1000 * deadline.at_most(_LOOK_S)):
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                elif deadline.expired:
                    raise TimeoutError("timed out")
            if code:
                raise OSError(code, os.strerror(code))
            return sock
        except OSError as error:
            sock.close()
            refusal = error
        except BaseException:
            sock.close()
            raise
    raise refusal or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")


def close_in_children(sock: socket.socket) -> None:
    """Have forked children close ``sock``, which is their parent's, but not end its connection.

    As long as any process has the socket open, the peer does not see that the parent has died.
    """
    _sockets.add(sock)


def _disown() -> None:
    for sock in list(_sockets):
        # Not cut(): a shutdown would end the connection, which the parent still uses.
        sock.close()


os.register_at_fork(after_in_child=_disown)
