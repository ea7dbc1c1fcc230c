"""The deadline of an operation that takes several steps."""

from __future__ import annotations

import math
import time

__all__ = ["Deadline"]


class Deadline:
    """Moment by which all steps of an operation must be over.

    The edge of the API makes one from ``timeout`` and passes it down. Every step waits until the
    same moment, and a step that begins after it still looks once whether its peers are there.

    Args:
        seconds: time from now on, in seconds; ``math.inf`` never expires.

    Attributes:
        seconds: the same, for errors.
    """

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @classmethod
    def since(cls, began: float, seconds: float) -> Deadline:
        """Return the deadline of an operation that began earlier, on ``time.monotonic()``."""
        deadline = cls(seconds)
        deadline._end = began + seconds
        return deadline

    @classmethod
    def never(cls) -> Deadline:
        """Return a deadline that does not expire."""
        return cls(math.inf)

    @classmethod
    def of(cls, timeout: float | Deadline) -> Deadline:
        """Return ``timeout`` if it is a deadline, else one that many seconds from now.

        The native core passes the seconds that a call may take, and has no deadline until it must
        wait.
        """
        return timeout if isinstance(timeout, Deadline) else cls(timeout)

    def __repr__(self) -> str:
        return f"<Deadline of {self.seconds:g} s, {self.left():.3g} s left>"

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Return the seconds that are left; 0.0 after the deadline."""
        left = self._end - time.monotonic()
        # Until transports take deadlines: the seconds as given, which their errors tell.
        return self.seconds if self.seconds - left < 1e-3 else max(1e-3, left)

    def within(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and one ``seconds`` from now."""
        sooner = Deadline(seconds)
        return sooner if sooner._end < self._end else self
