"""Whether hosts reach each other: a test before the run, and signs of life during the run.

Each host listens at the address that its ranks will use. Before the run the other hosts connect
there. During the run the supervisor knocks there, to tell a busy host from one that is cut off.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from collective.inner import Deadline
from collective.start.rendezvous import Endpoint
from collective.start.resolver import listen_toward

from ..agent_line import BEAT_S

# Long enough for a lost packet, which is sent again after a second.
_CONNECT_S = 2.0
# Each attempt has a thread, so that dead addresses do not wait for one another.
_AT_ONCE = 1024
# A host that is silent for so long is gone, whatever its kernel answers.
_SILENCE_S = 10.0
# A host is cut off if its agent has been silent for five beats, and its kernel has answered none of
# three knocks. Knocks begin after two beats without a sign of life. Beats alone would not do: an
# agent that is stopped or swapped out for a second sends none, while the kernel still answers. TCP
# sends a lost beat again after about 0.2 s, and each knock is a connection of its own, so a lost
# packet does not end a host. The other ranks go on within two seconds (docs/measurements/hosts.md).
_DOUBT_S, _CUT_OFF_S, _KNOCKS = 2 * BEAT_S, 5 * BEAT_S, 3


class ReachableSocket:
    """Listening socket at this host's address, which sends a token to all who connect.

    The token shows that a connection has reached this host, and not another one with the same
    address, such as that of a bridge that exists on every host. After :meth:`rest` the kernel still
    accepts connections, which shows that this host and its network live.

    Args:
        interface: network interface that the ranks will use; empty for the one toward the store.
        store: host and port at which the ranks meet.
        token: text to send.
        ports: text of the setting ``port``: the ports that the socket may have; empty for any.

    Attributes:
        address, port: address of the socket.

    Raises:
        ConfigError: there is no such interface, or none of the ports is free.
        OSError: the address cannot be used.
    """

    def __init__(self, interface: str, store: tuple[str, int], token: str, ports: str = "") -> None:
        endpoint = Endpoint(store[0], store[1], "the launcher's address")
        self._socket, self.address = listen_toward(endpoint, interface, ports)
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


class Pulse:
    """Signs of life of one host: beats of its agent, four in a second, and answers of its kernel.

    The supervisor knocks at a host that sends no beats: it begins connections, and never uses them.
    A kernel answers for processes that are stopped, swapped out or starved, too. So an answer shows
    that a host is only busy. No method blocks.

    Attributes:
        place: address and port at which the host listens; None as long as they are unknown, and for
            this host.
    """

    def __init__(self) -> None:
        self.place: tuple[str, int] | None = None
        self._heard = time.monotonic()
        self._answered = -math.inf
        self._knocks: list[socket.socket] = []  # since the last answer

    def hear(self) -> None:
        """Note a sign of life of the agent."""
        self._heard = time.monotonic()
        self.forget()

    def is_silent(self) -> bool:
        """Return whether the agent has been silent for so long that the host is lost."""
        return time.monotonic() - self._heard > _SILENCE_S

    def is_cut_off(self) -> bool:
        """Return whether neither the agent nor the host's kernel gives a sign of life.

        Call it at every beat: each call knocks at a host that has been silent for a while.
        """
        seconds = time.monotonic() - max(self._heard, self._answered)
        if self.place is None or seconds <= _DOUBT_S:
            return False
        enough = seconds > _CUT_OFF_S and len(self._knocks) >= _KNOCKS
        attempt = socket.socket(socket.AF_INET6 if ":" in self.place[0] else socket.AF_INET)
        attempt.setblocking(False)
        # A kernel that has no such listener answers as well, by a refusal.
        refused = attempt.connect_ex(self.place) == errno.ECONNREFUSED
        self._knocks.append(attempt)
        # The answer to an earlier knock may have come by now, even to the last one.
        if refused or any(map(_is_answered, self._knocks)):
            self._answered = time.monotonic()
            self.forget()
            return False
        return enough

    def forget(self) -> None:
        """Close the connections."""
        for attempt in self._knocks:
            attempt.close()
        self._knocks.clear()


def _is_answered(attempt: socket.socket) -> bool:
    if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
        return True
    try:
        attempt.getpeername()
    except OSError:  # it is not connected
        return False
    return True
