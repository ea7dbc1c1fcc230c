"""The barrier before each timed call: the same for every library."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from collective.deadline import Deadline

__all__ = ["StartLine"]

_LINE = 64  # words between two ranks' counters, to keep them off one cache line
_POLLS = 50  # before the processor is yielded, for more ranks than cores
_PATIENCE_S = 60.0


class StartLine:
    """Words in a shared file: a rank writes how often it came, and waits for the others'.

    A library's own barrier would let its ranks go at different times, and charge the
    difference to the operation that follows.

    Args:
        path: a file of :meth:`create`, the same on all ranks.
        rank, size: which of how many this is.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._mine = rank * _LINE
        self._others = [other * _LINE for other in range(size) if other != rank]
        self._count = 0

    @staticmethod
    def create(path: Path, size: int) -> None:
        """Make the file."""
        path.write_bytes(bytes(size * _LINE * 8))

    def step(self) -> None:
        """Let the others know that this rank is at the line again, and wait for nobody."""
        self._count += 1
        self._words[self._mine] = self._count

    def absent(self) -> int:
        """Return how many ranks have come less often than this one."""
        return sum(self._words[other] < self._count for other in self._others)

    def wait(self) -> None:
        """Wait until all ranks have come here as often as this one.

        Raises:
            TimeoutError: one of them has not, for a minute.
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
            call: is called by all ranks.
            iterations: how often.
            each: whether every call begins at the line.
            done: waits until what a call has enqueued is done.
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
