"""Test of whether each host reaches all others, at the addresses that the ranks will use."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from collective.deadline import Deadline
from collective.start.network import address_of
from collective.start.rendezvous import Endpoint
from collective.start.resolver import own_address_toward

__all__ = ["Listener", "reached"]

# Long enough for a lost packet, which is sent again after a second.
_CONNECT_S = 2.0
# Each attempt has a thread, so that dead addresses do not wait for one another.
_AT_ONCE = 1024


class Listener:
    """Listening socket at this host's address, which sends a token to all who connect.

    The token shows that a connection has reached this host, and not another one with the same
    address, such as that of a bridge that exists on every host. After :meth:`rest` the kernel still
    accepts connections, which shows that this host and its network live.

    Args:
        interface: network interface that the ranks will use; empty for the one toward the store.
        store: host and port at which the ranks meet.
        token: text to send.

    Attributes:
        address, port: address of the socket.

    Raises:
        ConfigError: there is no such interface.
        OSError: the address cannot be used.
    """

    def __init__(self, interface: str, store: tuple[str, int], token: str) -> None:
        endpoint = Endpoint(store[0], store[1], "the launcher's address")
        self.address = address_of(interface) if interface else own_address_toward(endpoint)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._socket = socket.socket(family)
        try:
            self._socket.bind((self.address, 0))
            self._socket.listen(socket.SOMAXCONN)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._token = token.encode()
        self._over = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def rest(self) -> None:
        """End the thread, and send no more tokens; the socket keeps listening."""
        self._over = True
        own = self.address, self.port
        with contextlib.suppress(OSError), socket.create_connection(own, _CONNECT_S):
            self._thread.join(_CONNECT_S)
        self._socket.setblocking(False)

    def dismiss(self) -> None:
        """Close the connections that have come after :meth:`rest`."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def _serve(self) -> None:
        while not self._over:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_CONNECT_S)
                connection.sendall(self._token)


def reached(peers: Sequence[Sequence[str | int]]) -> list[list[str]]:
    """Connect to all ``peers`` at once; return the name of each that fails, and the reason.

    Args:
        peers: name, address, port and token of each. A peer without a token need not send it.
    """
    if not peers:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(peers))) as pool:
        reasons = pool.map(lambda peer: _reason(str(peer[1]), int(peer[2]), str(peer[3])), peers)
        return [
            [str(peer[0]), reason] for peer, reason in zip(peers, reasons, strict=True) if reason
        ]


def _reason(address: str, port: int, token: str) -> str:
    """Return why a peer cannot be reached; "" if it can."""
    deadline = Deadline(_CONNECT_S)
    try:
        with socket.create_connection((address, port), deadline.left()) as connection:
            expected, answer = token.encode(), b""
            while len(answer) < len(expected):
                connection.settimeout(max(deadline.left(), 0.001))  # 0 would be: do not wait
                chunk = connection.recv(len(expected) - len(answer))
                if not chunk:
                    break
                answer += chunk
    except TimeoutError:
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return "" if answer == expected else "another host or program answers there"
