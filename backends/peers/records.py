"""TLS between a link and its socket."""

from __future__ import annotations

import contextlib
import ssl
import threading

__all__ = ["Records"]


class Records:
    """One side of a TLS connection: bytes in, bytes out, and no socket.

    So a thread that waits in recv(2) holds no lock that a sending thread needs.

    Args:
        context: TLS context from :class:`collective.start.certificates.Tls`; its protocol tells
            whether this is the listening or the connecting side.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        listening = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=listening)
        # Reentrant: a finalizer may send in the same thread, between two steps of take().
        self._lock = threading.RLock()
        self._shaken = False
        self._early = b""  # plain text to send after the handshake

    def take(self, chunk: bytes) -> bytes:
        """Return the plain text that ``chunk`` completes."""
        with self._lock:
            self._incoming.write(chunk)
            parts = []
            with contextlib.suppress(ssl.SSLWantReadError):
                self._shake()
                while part := self._tls.read(1 << 16):
                    parts.append(part)
            return b"".join(parts)

    def put(self, data: bytes) -> bytes:
        """Return the bytes to send for ``data``, and for the handshake."""
        with self._lock:
            self._early += data
            with contextlib.suppress(ssl.SSLWantReadError):
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
