"""Deadline of an operation that takes several steps."""

from __future__ import annotations

import math
import time

# The longest wait that left() offers. poll(2), and so a socket's timeout, counts milliseconds in
# 31 bits: 24.8 days. The locks of Python's threads take 292 years, and nothing takes math.inf.
_LONGEST_S = 2e6


class Deadline:
    """Moment by which all steps of an operation must be over.

    The public methods make a deadline from ``timeout`` and pass it down. Every step waits until the
    same moment. A step that begins after the deadline still checks once whether its peers are
    there.

    Args:
        seconds: time from now on, in seconds; a deadline of ``math.inf`` never expires.

    Attributes:
        seconds: the same value, for error texts.
    """

    # The native core sets these slots without calling __init__: that call would take as long as a
    # small collective call.
    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @classmethod
    def since(cls, began: float, seconds: float) -> Deadline:
        """Return the deadline of an operation that began earlier.

        Args:
            began: value of ``time.monotonic()`` when the operation began.
            seconds: time from then on, in seconds.
        """
        deadline = cls(seconds)
        deadline._end = began + seconds
        return deadline

    @classmethod
    def of(cls, limit: float | Deadline) -> Deadline:
        """Return the deadline of an operation.

        Args:
            limit: seconds from now on; or the deadline, if a part of the operation is over.
        """
        return limit if isinstance(limit, Deadline) else cls(limit)

    @classmethod
    def never(cls) -> Deadline:
        """Return a deadline that does not expire."""
        return cls(math.inf)

    def __repr__(self) -> str:
        return f"<Deadline of {self.seconds:g} s, {self._end - time.monotonic():.3g} s left>"

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Return the remaining seconds, for one wait: 0.0 after the deadline, 2e6 at most.

        ``Condition.wait``, sockets and ``poll`` all accept values up to that bound. So a wait that
        returns must check :attr:`expired` before it gives up.
        """
        left = self._end - time.monotonic()
        return 0.0 if left < 0.0 else left if left < _LONGEST_S else _LONGEST_S

    def at_most(self, seconds: float) -> float:
        """Return ``seconds``, or the time left if that is less, for a sleep between two polls."""
        return min(seconds, self.left())

    def within(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and one ``seconds`` from now."""
        sooner = Deadline(seconds)
        return sooner if sooner._end < self._end else self
