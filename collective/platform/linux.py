"""Calls that only Linux offers. :mod:`.portable` has the same functions for other systems."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

__all__ = ["held_port"]


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yield a free TCP port, and keep it from other programs until the context ends.

    A socket stays bound to the port, on all addresses of this host. So the kernel gives the port
    to no program that asks for any port, and no program can bind it without ``SO_REUSEADDR``. A
    server that sets ``SO_REUSEADDR`` can bind the port and listen there, since the socket does not
    listen (socket(7)). Torch's TCPStore, asyncio and this library set it.
    """
    with _any_port() as holder:
        port: int = holder.getsockname()[1]
        yield port


def _any_port() -> socket.socket:
    """Return a socket that is bound to a free port of all addresses, and does not listen."""
    if socket.has_ipv6:
        with contextlib.suppress(OSError):  # the kernel has no IPv6, or it is switched off
            return _bound(socket.AF_INET6, "::")
    return _bound(socket.AF_INET, "0.0.0.0")


def _bound(family: socket.AddressFamily, address: str) -> socket.socket:
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # The port is held for IPv4, too. Some systems switch that off by default.
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind((address, 0))
    except BaseException:
        holder.close()
        raise
    return holder
