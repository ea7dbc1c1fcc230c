"""Sets of moments: what was going on at the same time as what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["Intervals"]

Vector = np.ndarray[Any, np.dtype[np.float64]]


class Intervals:
    """The union of some intervals of time.

    Args:
        parts: beginnings and ends, in any order, overlapping or not.
    """

    def __init__(self, parts: Iterable[tuple[float, float]]) -> None:
        pairs = np.array(sorted(parts), float).reshape(-1, 2)
        ends = np.maximum.accumulate(pairs[:, 1]) if len(pairs) else pairs[:, 1]
        # A new one begins where everything before is over.
        first = np.concatenate(([True], pairs[1:, 0] > ends[:-1]))[: len(pairs)]
        self.starts: Vector = pairs[first, 0]
        self.ends: Vector = ends[np.concatenate((first[1:], [True]))[: len(pairs)]]
        self._before = np.concatenate(([0.0], np.cumsum(self.ends - self.starts)))

    def __and__(self, other: Intervals) -> Intervals:
        parts = []
        i = j = 0
        while i < len(self.starts) and j < len(other.starts):
            start = max(self.starts[i], other.starts[j])
            end = min(self.ends[i], other.ends[j])
            if start < end:
                parts.append((float(start), float(end)))
            if self.ends[i] < other.ends[j]:
                i += 1
            else:
                j += 1
        return Intervals(parts)

    def until(self, moments: Any) -> Vector:
        """Return how much of the union lies before each of ``moments``."""
        at = np.asarray(moments, float)
        index = np.searchsorted(self.starts, at, side="right") - 1
        whole = self._before[np.maximum(index, 0)]
        if not len(self.starts):
            return np.zeros_like(at)
        inside = np.minimum(at, self.ends[index]) - self.starts[index]
        return np.where(index < 0, 0.0, whole + inside)

    def within(self, start: Any, end: Any) -> Vector:
        """Return how much of the union lies between ``start`` and ``end``."""
        return self.until(end) - self.until(start)
