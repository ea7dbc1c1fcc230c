"""Transport between ranks on any hosts, over TCP connections of its own.

``connecting.py`` connects each pair of ranks of a communicator, and no other process.
``compiled.py`` moves messages and whole calls in C. Without the core, and for encrypted
connections, ``stream.py`` moves messages over one connection, and ``messages.py`` waits for them;
:mod:`collective.backends.matching` matches them. ``transport.py`` has the transport.
"""

from __future__ import annotations

from .transport import TcpBackend

__all__ = ["TcpBackend"]
