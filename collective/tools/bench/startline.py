"""The barrier before each timed call, the same for every library."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from collective.deadline import Deadline

__all__ = ["StartLine"]

_LINE = 64  # words between the counters of two ranks, so that they do not share a cache line
_POLLS = 50  # polls before the rank yields its processor, for more ranks than cores
_PATIENCE_S = 60.0


class StartLine:
    """Barrier in a shared file: each rank counts its arrivals, and waits for the others' counts.

    A library's own barrier would release its ranks at different times, and the difference would
    count as time of the operation that follows.

    Args:
        path: file that :meth:`create` made, the same on all ranks.
        rank, size: this rank, and number of ranks.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._mine = rank * _LINE
        self._others = [other * _LINE for other in range(size) if other != rank]
        self._count = 0

    @staticmethod
    def create(path: Path, size: int) -> None:
        """Create the file."""
        path.write_bytes(bytes(size * _LINE * 8))

    def step(self) -> None:
        """Count an arrival of this rank at the line, without waiting for other ranks."""
        self._count += 1
        self._words[self._mine] = self._count

    def absent(self) -> int:
        """Return the number of ranks that have come less often than this rank."""
        return sum(self._words[other] < self._count for other in self._others)

    def wait(self) -> None:
        """Wait until all ranks have come to the line as often as this rank.

        Raises:
            TimeoutError: a rank has not come for a minute.
        """
        words = self._words
        self._count = step = self._count + 1
        words[self._mine] = step
        for other in self._others:
            if words[other] < step:
                self._wait_for(other, step)

    def seconds_of(
        self,
        call: Callable[[], object],
        iterations: int,
        *,
        each: bool,
        done: Callable[[], object] | None = None,
    ) -> list[float]:
        """Return the seconds of each call by itself, or the mean of all of them, back to back.

        Args:
            call: function that all ranks call.
            iterations: number of calls.
            each: if true, every call begins at the line and is timed by itself.
            done: function that waits until the work that a call has enqueued is done.
        """
        clock, seconds = time.perf_counter, []
        if each:
            for _ in range(iterations):
                self.wait()
                begin = clock()
                call()
                if done is not None:
                    done()
                seconds.append(clock() - begin)
            return seconds
        if done is not None:
            done()
        self.wait()
        begin = clock()
        for _ in range(iterations):
            call()
        if done is not None:
            done()
        return [(clock() - begin) / iterations]

    def _wait_for(self, other: int, step: int) -> None:
        words = self._words
        deadline = Deadline(_PATIENCE_S)
        while True:
            for _ in range(_POLLS):
                if words[other] >= step:
                    return
            os.sched_yield()
            if deadline.expired:
                raise TimeoutError(f"rank {other // _LINE} did not come to the start line")
