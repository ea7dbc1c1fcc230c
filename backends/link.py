"""Messages between the ranks outside the transport: JSON over one authenticated socket.

Every message is a JSON object, preceded by its length. A connection begins with a proof
on both sides that the other knows the job's key (HMAC-SHA256 over a nonce, RFC 2104): on a
shared machine or network anybody can connect, and must not be able to join or to speak.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from typing import Any

__all__ = ["Link", "Message", "connect", "listen", "proof"]

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
# Before a peer has proved that it knows the key, it is not listened to at length.
_STRANGER_LIMIT = 1 << 12
_LIMIT = 1 << 26
# A peer that is stopped or cut off must not stop whoever writes to it.
_SEND_S = 2
# A host that vanished without a word is noticed after about this many seconds.
_SILENCE_S = 5


class Link:
    """One end of a connection. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.trusted = False
        self._socket = sock
        self._received = bytearray()
        self._unread: list[Message] = []
        self._sending = threading.Lock()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send ``message``.

        Raises:
            OSError: the peer is gone, or does not read.
        """
        text = json.dumps(message).encode()
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(text)) + text)
            except OSError:
                # Half a message may be on its way, so that nothing after it can be read.
                self.cut()
                raise

    def receive(self) -> list[Message]:
        """Return the messages that are complete after one read, which may wait.

        Raises:
            EOFError: the peer has closed its end, or is gone.
            OSError, ValueError: the connection failed, or what came is no message.
        """
        if self._unread:
            found, self._unread = self._unread, []
            return found
        chunk = self._socket.recv(1 << 16)
        if not chunk:
            raise EOFError("the peer has closed the connection")
        self._received += chunk
        found = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > (_LIMIT if self.trusted else _STRANGER_LIMIT):
                raise ValueError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            message = json.loads(bytes(self._received[_LENGTH.size : end]))
            if not isinstance(message, dict):
                raise ValueError(f"a message that is a {type(message).__name__}")
            del self._received[:end]
            found.append(message)
        return found

    def expect(self, timeout: float) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: none came within ``timeout`` seconds.
            EOFError, OSError, ValueError: as :meth:`receive`.
        """
        self._socket.settimeout(max(0.001, timeout))
        try:
            while not (found := self.receive()):
                pass
        finally:
            self._socket.settimeout(None)
        self._unread += found[1:]
        return found[0]

    def cut(self) -> None:
        """End the connection: both sides read its end, a thread that waits in receive() too."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. A second close does nothing."""
        self.cut()
        self._socket.close()


def listen(address: str | None) -> tuple[socket.socket, str]:
    """Return a listening socket, and what :func:`connect` takes to reach it.

    Args:
        address: of this host, for ranks on several; None for this host alone: then the
            socket has a random name in the kernel's abstract space, which no other host
            can reach and which vanishes with it (unix(7)).
    """
    bound: Any
    if address is None:
        place = f"collective-{secrets.token_hex(16)}"
        sock, bound = socket.socket(socket.AF_UNIX), f"\0{place}"
    else:
        family, *_, bound = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
    try:
        sock.bind(bound)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock, place if address is None else f"{address} {sock.getsockname()[1]}"


def connect(place: str, timeout: float) -> Link:
    """Return a link to ``place``.

    Raises:
        OSError: nobody listens there, or nobody answers within ``timeout`` seconds.
    """
    host, _, port = place.partition(" ")
    if not port:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect(f"\0{host}")
        except BaseException:
            sock.close()
            raise
    else:
        sock = socket.create_connection((host, int(port)), timeout)
    sock.settimeout(None)
    return Link(sock)


def proof(key: str, nonce: str) -> str:
    """Return what only somebody who knows ``key`` can answer to ``nonce``."""
    return hmac.new(key.encode(), nonce.encode(), hashlib.sha256).hexdigest()
