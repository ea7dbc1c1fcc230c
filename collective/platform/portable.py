"""Counterparts of :mod:`.linux` for other systems, which need nothing but POSIX."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["held_port"]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a TCP port that was free a moment ago; another program may take it meanwhile.

    On BSD systems a second socket cannot listen at a port that is bound already, even with
    ``SO_REUSEADDR``. So the port cannot be held for a server in another process.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    yield port
