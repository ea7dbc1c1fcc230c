"""Signs of life of a host, by which the supervisor tells a busy host from one that is cut off."""

from __future__ import annotations

import errno
import math
import socket
import time

from .agent import BEAT_S

__all__ = ["Knocks", "Pulse"]

# A host that is silent for so long is gone, whatever its kernel answers.
_SILENCE_S = 10.0
# A host is cut off if its agent has been silent for five beats, and its kernel has answered none of
# three knocks. Knocks begin after two beats without a sign of life. Beats alone would not do: an
# agent that is stopped or swapped out for a second sends none, while the kernel still answers. TCP
# sends a lost beat again after about 0.2 s, and each knock is a connection of its own, so a lost
# packet does not end a host. The other ranks go on within two seconds (docs/measurements/hosts.md).
_DOUBT_S, _CUT_OFF_S, _KNOCKS = 2 * BEAT_S, 5 * BEAT_S, 3


class Pulse:
    """Signs of life of one host, whose agent sends a beat four times a second.

    Attributes:
        knocks: connections by which to learn whether the host's kernel answers; None as long as it
            is unknown where the host listens, and on this host.
    """

    def __init__(self) -> None:
        self.knocks: Knocks | None = None
        self._heard = time.monotonic()

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
        if self.knocks is None:
            return False
        seconds = time.monotonic() - max(self._heard, self.knocks.answered)
        if seconds <= _DOUBT_S:
            return False
        enough = seconds > _CUT_OFF_S and self.knocks.unanswered >= _KNOCKS
        # The answer to an earlier knock may have come by now, even to the last one.
        return not self.knocks.knock() and enough

    def forget(self) -> None:
        """Close the knocks."""
        if self.knocks is not None:
            self.knocks.forget()


class Knocks:
    """Connections to a host that are only begun, to learn whether its kernel answers.

    A kernel answers for processes that are stopped, swapped out or starved, too. So an answer shows
    that a host is only busy. No method blocks.

    Args:
        address, port: where the host listens.

    Attributes:
        answered: moment of the last answer, by ``time.monotonic()``; at first minus infinity.
    """

    def __init__(self, address: str, port: int) -> None:
        self.answered = -math.inf
        self._place = address, port
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: list[socket.socket] = []

    @property
    def unanswered(self) -> int:
        """Number of connections that were begun since the last answer."""
        return len(self._open)

    def knock(self) -> bool:
        """Begin another connection; return whether the host has answered it or an earlier one."""
        attempt = socket.socket(self._family)
        attempt.setblocking(False)
        # A kernel that has no such listener answers as well, by a refusal.
        refused = attempt.connect_ex(self._place) == errno.ECONNREFUSED
        self._open.append(attempt)
        answered = refused or any(map(_is_answered, self._open))
        if answered:
            self.answered = time.monotonic()
            self.forget()
        return answered

    def forget(self) -> None:
        """Close the connections."""
        for attempt in self._open:
            attempt.close()
        self._open.clear()


def _is_answered(attempt: socket.socket) -> bool:
    if attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
        return True
    try:
        attempt.getpeername()
    except OSError:  # it is not connected
        return False
    return True
