"""Messages between the ranks outside the transport: JSON over one authenticated connection.

A connection begins with a proof on both sides that the other knows the job's key (HMAC-SHA256,
RFC 2104): on a shared machine or network anybody can connect, and must not be able to join or to
speak. Until then nothing is parsed: each side sends a fixed number of bytes, and whoever sends
others is not heard any further. Afterwards every message is a JSON object, preceded by its
length.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

    from collective.contract.world import Tls
    from collective.deadline import Deadline

__all__ = [
    "Challenge", "Link", "Message", "ProofError", "close_in_children", "connect", "encoded",
    "listen", "parse",
]  # fmt: skip

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
# A length is believed before its bytes are there, and what has come of them is kept meanwhile:
# without a bound one word of a peer's would have 4 GiB kept for it.
_LIMIT = 1 << 26
# A peer that is stopped or cut off must not stop whoever writes to it.
_SEND_S = 2.0
# A host that vanished without a word is noticed after about this many seconds.
_SILENCE_S = 5
# What the listening side says first: whoever meets another program there can say so.
_GREETING = b"collective 1\n"
_NONCE_BYTES = _PROOF_BYTES = 32


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


class ProofError(ConnectionError):
    """The other side has not proved that it knows the key."""


# Those that a forked child has to let go of.
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Link:
    """One end of a connection. Any thread may send; one receives.

    Args:
        sock: connected.
        tls: what it is encrypted with, from :attr:`collective.start.certificates.Tls.connecting` or
            ``listening``; None for plain text.
        longest: how many bytes a message of the peer may have.

    Attributes:
        received: how many bytes have come from the peer, of whatever kind.
    """

    def __init__(
        self, sock: socket.socket, tls: ssl.SSLContext | None = None, longest: int = _LIMIT
    ) -> None:
        self.received = 0
        self._longest = longest
        self._socket = sock
        close_in_children(sock)
        self._records = None
        if tls is not None:
            # Here and not above: most programs need no OpenSSL.
            from .records import Records

            self._records = Records(tls)
        self._received = bytearray()
        self._unread: list[Message] = []
        self._sending = threading.Lock()
        self._deferred: deque[Message] = deque()
        # What post() has to send, and the peer has not taken yet.
        self._backlog = bytearray()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_S))
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Probes find a host that vanished while nothing is said. While something that was sent
            # is not acknowledged the kernel sends none, but that once more, for a quarter of an
            # hour: hence the last of these, too (tcp(7)).
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def read(self) -> bytes:
        """Return what is there, waiting for something; with TLS that may be nothing yet.

        Raises:
            EOFError: the peer has closed its end, or is gone.
            OSError: the connection failed.
        """
        try:
            chunk = self._socket.recv(1 << 16)
        except ConnectionResetError:
            # A socket of this host that is closed with something unread resets the connection,
            # and we hear of that before what was sent last. It is there still: a goodbye, maybe,
            # without which its rank would be taken for lost.
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
                self._socket.send(self._records.alert())  # the peer is to know why
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
                self._backlog += travelling  # what was sent first has to arrive first
                return
            try:
                self._socket.sendall(travelling)
            except OSError:
                # A part may be on its way, so that nothing after it can be read.
                self.cut()
                raise
        self._send_deferred()

    def send(self, message: Message) -> None:
        """Send ``message``; raises as :meth:`write`."""
        self.write(encoded(message))

    def post(self, message: Message) -> None:
        """Send as much of ``message`` as the peer takes at once, and leave the rest to ``flush``.

        Raises:
            OSError: the peer is gone, or reads nothing and asks for more and more.
        """
        data = encoded(message)
        with self._sending:
            if len(self._backlog) > self._longest:
                raise OSError(errno.ENOBUFS, "the peer does not read what it is sent")
            self._backlog += self._records.put(data) if self._records else data
        self.flush()

    def flush(self) -> bool:
        """Send what the peer takes now of what was posted; return whether that is all of it.

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
        """Send ``message`` now, or as soon as whoever is sending has done so; never waits for that.

        Raises:
            OSError: as :meth:`send`.
        """
        # In this order: whoever is sending looks at the queue once it has let go of the lock, so
        # that what is queued before the lock was seen taken is sent by it.
        self._deferred.append(message)
        self._send_deferred()

    def _send_deferred(self) -> None:
        with contextlib.suppress(IndexError):  # nothing is left, or another thread took it
            while not self._sending.locked():
                self.send(self._deferred.popleft())

    def receive(self) -> list[Message]:
        """Return the messages that are complete after one read, which may wait.

        Raises:
            EOFError, OSError: as :meth:`read`.
            ValueError: what was received is no message.
        """
        if self._unread:
            found, self._unread = self._unread, []
            return found
        self._received += self.read()
        found = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > self._longest:
                raise ValueError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            found.append(parse(bytes(self._received[_LENGTH.size : end])))
            del self._received[:end]
        return found

    def expect(self, deadline: Deadline) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: it was not there before the deadline.
            EOFError, OSError, ValueError: as :meth:`receive`.
        """
        found: list[Message] = []
        while not found:
            with self._until(deadline):
                found = self.receive()
        self._unread += found[1:]
        return found[0]

    def _exactly(self, count: int, deadline: Deadline) -> bytes:
        """Return the next ``count`` bytes of a connection that carries no messages yet."""
        while len(self._received) < count:
            with self._until(deadline):
                self._received += self.read()
        found = bytes(self._received[:count])
        del self._received[:count]
        return found

    @contextlib.contextmanager
    def _until(self, deadline: Deadline) -> Any:
        # Anew for each read: whoever sends a byte now and then must not hold us for ever.
        self._socket.settimeout(deadline.left())
        try:
            yield
        except BlockingIOError:
            # With no time left the socket does not block: what is there is read all the same.
            raise TimeoutError("timed out") from None
        finally:
            self._socket.settimeout(None)

    def prove(self, key: bytes, deadline: Deadline) -> None:
        """Take part in the proof on the connecting side.

        Raises:
            ProofError: the other side is no listener of ours, does not know ``key``, or does
                not believe that we do.
            OSError: the connection failed, or the deadline passed.
        """
        try:
            greeting = self._exactly(len(_GREETING) + _NONCE_BYTES, deadline)
        except EOFError:
            raise ProofError("it closed the connection without a greeting") from None
        if not greeting.startswith(_GREETING):
            raise ProofError("what listens there is another program")
        mine = secrets.token_bytes(_NONCE_BYTES)
        nonces = greeting[len(_GREETING) :] + mine
        self.write(mine + _proof(key, b"connecting", nonces))
        try:
            answer = self._exactly(_PROOF_BYTES, deadline)
        except EOFError:
            raise ProofError("it closed the connection: it has another key, or is over") from None
        if not hmac.compare_digest(answer, _proof(key, b"listening", nonces)):
            raise ProofError("it does not know this job's key")

    def cut(self) -> None:
        """End the connection: both sides read its end, a thread that waits in receive() too."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. A second close does nothing."""
        self.cut()
        self._socket.close()


class Challenge:
    """The listening side of one proof.

    Attributes:
        greeting: what to send first.
        length: how many bytes :meth:`answer` takes.
    """

    length = _NONCE_BYTES + _PROOF_BYTES

    def __init__(self) -> None:
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.greeting = _GREETING + self._nonce

    def answer(self, key: bytes, received: bytes) -> bytes:
        """Return our own proof to somebody whose first bytes were ``received``.

        Raises:
            ProofError: they are not what somebody sends who knows ``key``.
        """
        nonces = self._nonce + received[:_NONCE_BYTES]
        wanted = _proof(key, b"connecting", nonces)
        if not hmac.compare_digest(received[_NONCE_BYTES:], wanted):
            raise ProofError("it does not know this job's key")
        return _proof(key, b"listening", nonces)


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    # Of both nonces and of the side: nobody can be made to answer for somebody else.
    return hmac.digest(key, side + nonces, "sha256")


def encoded(message: Message) -> bytes:
    """Return ``message`` as it travels, for :meth:`Link.write`."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def parse(text: bytes) -> Message:
    """Return the message of ``text``.

    Raises:
        ValueError: it is no JSON object, or none that every reader reads alike.
    """
    try:
        message = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError(f"a message that is a {type(message).__name__}")
    return message


def _distinct(pairs: list[tuple[str, Any]]) -> Message:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a message with a key twice")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"a message with {constant}")


def listen(host: str | None) -> tuple[socket.socket, str]:
    """Return a listening socket, and what :func:`connect` takes to reach it.

    Args:
        host: an address of this host, for ranks on several; None for this host alone: then
            the socket has a random name in the kernel's abstract space, which no other host
            can reach and which vanishes with it (unix(7)).
    """
    bound: Any
    if host is None:
        address = f"collective-{secrets.token_hex(16)}"
        sock, bound = socket.socket(socket.AF_UNIX), f"\0{address}"
    else:
        family, *_, bound = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
    close_in_children(sock)
    try:
        sock.bind(bound)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock, address if host is None else f"{host} {sock.getsockname()[1]}"


def connect(address: str, key: bytes, deadline: Deadline, tls: Tls | None = None) -> Link:
    """Return a link to ``address``, both of whose ends know ``key``.

    Args:
        address: from :func:`listen`.
        key: both sides'.
        deadline: moment by which both sides must have proved that.
        tls: for a connection that leaves this host.

    Raises:
        ProofError: whoever listens there does not, or does not believe that we do.
        OSError: nobody listens there, or nobody answers before the deadline.
    """
    sock = _connected(address, deadline)
    try:
        sock.settimeout(None)
        # Addresses of TCP alone have a space: what stays on this host is not encrypted.
        link = Link(sock, tls.connecting if tls and " " in address else None)
        link.write(b"")  # TLS begins at this side
        link.prove(key, deadline)
    except BaseException:
        sock.close()
        raise
    return link


def _connected(address: str, deadline: Deadline) -> socket.socket:
    host, _, port = address.partition(" ")
    try:
        if port:
            return socket.create_connection((host, int(port)), deadline.left())
        return _connected_here(host, deadline)
    except BlockingIOError:
        # No time was left to connect in, or the listener's queue was full until the deadline.
        raise TimeoutError("timed out") from None
    except (OverflowError, ValueError) as error:  # a host in no encoding is one, too
        raise OSError(errno.EINVAL, f"{address!r} is no address: {error}") from error


def _connected_here(name: str, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # The kernel's own deadline: with one of Python's a full queue would not be waited for.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline.left()))
        sock.connect(f"\0{name}")
    except BaseException:
        sock.close()
        raise
    return sock


def close_in_children(sock: socket.socket) -> None:
    """Let go, in forked children, of a socket of the parent's, without ending the connection.

    As long as somebody has it open, whoever is at the other end does not see that the parent
    has died.
    """
    _sockets.add(sock)


def _disown() -> None:
    for sock in list(_sockets):
        # Not cut(): a shutdown would be of the connection, which is the parent's, too.
        sock.close()


os.register_at_fork(after_in_child=_disown)
