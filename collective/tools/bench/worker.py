"""Process of one rank of a contestant: makes the calls that the arena asks for.

:mod:`.arena` starts this module in the environment of the library that is measured, with the
library's name, the folder of its start line and the address of its control line. While another
contestant has its turn, the process is blocked in a read. :class:`StartLine` is the barrier before
each timed call, the same for every library.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collective.inner import Deadline, Participant
from collective.launch import rank_line
from collective.launch.ranks import Job

from .libraries import BenchLibrary, Unsupported, open_library
from .operations import Prepared

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


class Worker:
    """The methods that the arena can call on a rank.

    Args:
        library: the library, connected.
        folder: folder of the start line.
    """

    def __init__(self, library: BenchLibrary, folder: Path) -> None:
        self._library = library
        self._line = StartLine(folder / "startline", library.rank, library.size)
        self._prepared: dict[str, Prepared] = {}  # by side

    def close(self) -> None:
        """Drop the arrays, and end the library."""
        self._prepared.clear()
        self._library.close()

    def abort(self, reason: str) -> None:
        """Do nothing: a rank that hangs is a process, and the launcher ends it."""

    # -- requests of the arena -----------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the library's ``version``."""
        return {"version": self._library.version}

    def prepare(
        self,
        side: str,
        operation: str,
        nbytes: int,
        memory: str,
        dtype: str = "float32",
        framework: str | None = None,
    ) -> dict[str, Any]:
        """Allocate arrays for an operation, as :class:`Prepared` does.

        Args:
            side: name for further calls.
            operation, nbytes, memory, dtype: as in the class.
            framework: framework of the arrays; None for the library's own.

        Returns:
            ``nbytes``: size of the larger array.
        """
        if framework is not None:
            self._library.use(framework)
        prepared = Prepared(self._library, operation, nbytes, memory, dtype)
        self._prepared[side] = prepared
        return {"nbytes": prepared.nbytes}

    def attempt(self, side: str) -> dict[str, Any]:
        """Make a prepared call for the first time, which shows whether the library can do it."""
        try:
            self._prepared[side].call()
        except self._library.refusals as error:
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        return {}

    def release(self, side: str) -> dict[str, Any]:
        """Drop the arrays of a side, if there are any."""
        self._prepared.pop(side, None)
        return {}

    def measure(self, side: str, iterations: int, warmup: int, each: bool) -> dict[str, Any]:
        """Time a prepared call.

        Args:
            side: name of the prepared call.
            iterations: number of timed calls.
            warmup: number of untimed calls before them.
            each: if true, time each call by itself, from a common start; else all calls, back
                to back.

        Returns:
            ``seconds``: times of the calls, or one mean.
        """
        call = self._prepared[side].call
        done = self._library.synchronize if self._library.framework.on_gpu else None
        for _ in range(warmup):
            call()
        return {"seconds": self._line.seconds_of(call, iterations, each=each, done=done)}

    def check(self, side: str) -> dict[str, Any]:
        """Make a prepared call on data for which every element of the result can be computed.

        Returns:
            ``wrong``: number of wrong elements in this rank's result. For a barrier: number of
            ranks that had not come to it when it returned.
        """
        prepared = self._prepared[side]
        if prepared.x is None:
            self._line.step()
            prepared.call()
            return {"wrong": self._line.absent()}
        return {"wrong": prepared.count_wrong(self._line.wait)}


@dataclass(frozen=True)
class WorkerCall(Job):
    """Call of a method of :class:`Worker` on all ranks of a contestant.

    Attributes:
        do: name of the method.
        arguments: arguments of the method.
    """

    do: str
    arguments: Mapping[str, Any]

    def run(self, participant: Participant) -> dict[str, Any]:
        """Return the method's result, or ``unsupported``: why the library cannot do it."""
        try:
            answer: dict[str, Any] = getattr(participant.kept["worker"], self.do)(**self.arguments)
        except Unsupported as error:
            return {"unsupported": str(error)}
        except MemoryError as error:
            return {"unsupported": f"no memory: {error}"}
        return answer


def main() -> None:
    """Serve as the rank that the launcher names, until the arena closes the connection."""
    name, where, address = sys.argv[1:]
    folder = Path(where)
    library = open_library(name, folder)
    participant = Participant(library.rank, {"worker": Worker(library, folder)})
    rank_line.serve(participant, rank_line.call_back(address, library.rank), foreign=True)


if __name__ == "__main__":
    main()
