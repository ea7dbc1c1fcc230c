"""The deadline of a call that takes several steps."""

from __future__ import annotations

import time

__all__ = ["Deadline"]

# What is left when nothing is: a transport that is asked for nothing at all would not look whether
# its peers have come.
_LEAST_S = 1e-3


class Deadline:
    """Some seconds for all steps of a call together, counted from its first step.

    Args:
        seconds: how many.
    """

    __slots__ = ("_end", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end: float | None = None

    def left(self) -> float:
        """Return the seconds that are left for the step that begins now."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
            return self._seconds  # as given: errors tell it
        return max(_LEAST_S, self._end - now)
