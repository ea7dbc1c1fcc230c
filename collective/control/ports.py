"""Ports that ranks may listen at, if the setting ``port`` bounds them.

Each listener takes the lowest port that is free, so the listeners of a host have consecutive ports
without talking to each other.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from typing import NamedTuple, Self

from collective.errors import ConfigError
from collective.platform import port_holder

#: Number of connections that may wait for a listener.
QUEUE = 1024
_RANGE = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", re.ASCII)
# The ports whose holders an error lists.
_LISTED = 4


class Ports(NamedTuple):
    """A range of TCP ports; the text of one is such as ``29600-29663``, or ``29600``."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the range that ``text`` describes.

        Raises:
            ValueError: the text is not a port or two, or the ports are not in order.
        """
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a range of ports")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 0 < first <= last < 1 << 16:
            raise ValueError(f"{text!r} is not a range of ports")
        return cls(first, last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def listen(self, family: int, place: tuple[object, ...]) -> socket.socket:
        """Return a socket that listens at the lowest port that is free.

        Args:
            family: family of the address.
            place: address as for ``bind``, whose port does not count.

        Raises:
            ConfigError: all ports are in use, or this process may not use them. The text names
                the ports and their holders.
            OSError: the address is not one of this host.
        """
        refusals: dict[int, OSError] = {}
        for port in range(self.first, self.last + 1):
            try:
                return listening(family, (place[0], port, *place[2:]))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                refusals[port] = error
        raise self._refused(str(place[0]), refusals)

    def _refused(self, address: str, refusals: dict[int, OSError]) -> ConfigError:
        forbidden = [port for port, error in refusals.items() if error.errno == errno.EACCES]
        listed = []
        for port in list(refusals)[:_LISTED]:
            if port in forbidden:
                listed.append(f"port {port} is not permitted to user {os.geteuid()}")
            else:
                holder = port_holder(port)
                listed.append(f"port {port} is in use" + (f" by {holder}" if holder else ""))
        if further := len(refusals) - len(listed):
            listed.append(f"{further} further ports are not free, either")
        remedy = (
            "Give the ranks of this host a port each, and some more: see the table of ports in "
            "docs/how-to/several-hosts.md. Choose a longer range, or end those processes."
        )
        if len(forbidden) == len(refusals):
            remedy = (
                "Linux keeps the ports below 1024 for processes with the capability "
                "CAP_NET_BIND_SERVICE (sysctl net.ipv4.ip_unprivileged_port_start). Choose ports "
                "from 1024 on."
            )
        return ConfigError(
            f"port: no port of COLLECTIVE_PORT={self} is free at {address} on "
            f"{socket.gethostname()}: {', '.join(listed)}. {remedy}"
        )


def listening(family: int, place: tuple[object, ...]) -> socket.socket:
    """Return a socket that listens at ``place``, an address and a port as for ``bind``."""
    sock = socket.socket(family)
    try:
        if place[1]:
            # Ranks stay connected to the last listener of the port, and the kernel remembers ended
            # connections for a minute. Neither keeps another listener away. If two processes have
            # bound the port, it belongs to the one that listens first.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(QUEUE)
    except BaseException:
        sock.close()
        raise
    return sock
