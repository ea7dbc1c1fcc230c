"""One rank of one contestant: does what the arena asks, and sleeps in between.

Started by :mod:`.arena` in the environment of the library that is measured, with the library's
name, the folder of its start line and the address of its control line. While another contestant
has its turn it is blocked in a read.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collective.launch import control
from collective.launch.ranks import Job, Participant

from .libraries import Array, BenchLibrary, Call, Unsupported
from .prepared import Prepared
from .rivals import open_library
from .startline import StartLine

__all__ = ["Worker", "WorkerCall", "main"]


class Worker:
    """What a rank can be asked to do: its methods.

    Args:
        library: connected.
        folder: where the start line is.
        whose: whose processor time a rank's is: ``resource.RUSAGE_SELF``, or
            ``RUSAGE_THREAD`` where ranks are threads.
    """

    def __init__(self, library: BenchLibrary, folder: Path, whose: int) -> None:
        self._library = library
        self._line = StartLine(folder / "startline", library.rank, library.size)
        self._whose = whose
        self._prepared: dict[str, Prepared] = {}  # by the side that it is measured as
        self._steps: dict[str, Call] = {}  # the parts of a training step
        self._parameters: list[Array] = []  # of the model that is trained

    def close(self) -> None:
        """Drop the arrays, and end the library."""
        self._prepared.clear()
        self._steps.clear()
        self._library.close()

    def abort(self, reason: str) -> None:
        """Do nothing: what hangs is a process, and is ended."""

    # -- what is asked -------------------------------------------------------------------------

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
        """Allocate arrays for an operation: see :class:`~collective.tools.bench.prepared.Prepared`.

        Args:
            side: a name, by which further calls name what is prepared.
            operation, nbytes, memory, dtype: as there.
            framework: whose arrays; None for the library's own.

        Returns:
            ``nbytes``: of the larger array.
        """
        if framework is not None:
            self._library.use(framework)
        made = Prepared(self._library, operation, nbytes, memory, dtype)
        self._prepared[side] = made
        return {"nbytes": made.nbytes}

    def attempt(self, side: str) -> dict[str, Any]:
        """Make a prepared call for the first time, which tells whether the library can."""
        try:
            self._prepared[side].call()
        except self._library.refusals as error:
            raise Unsupported(f"{type(error).__name__}: {error}") from error
        return {}

    def release(self, side: str) -> dict[str, Any]:
        """Drop the arrays, if there are any."""
        self._prepared.pop(side, None)
        self._steps.pop(side, None)
        return {}

    def measure(self, side: str, iterations: int, warmup: int, each: bool) -> dict[str, Any]:
        """Time a prepared call.

        Args:
            side: which one.
            iterations: timed calls.
            warmup: untimed calls before them.
            each: time each call by itself, from a common start; or all of them, back
                to back.

        Returns:
            ``seconds``: of each call, or one mean.
        """
        call = self._steps.get(side) or self._prepared[side].call
        done = self._library.synchronize if self._library.framework.on_gpu else None
        for _ in range(warmup):
            call()
        return {"seconds": self._line.seconds_of(call, iterations, each=each, done=done)}

    def check(self, side: str) -> dict[str, Any]:
        """Run a prepared call on data of which every element of the result is known.

        Returns:
            ``wrong``: how many elements of this rank's result are not what they must be. After a
            barrier: how many ranks had not come to it.
        """
        made = self._prepared[side]
        if made.x is None:
            self._line.step()
            made.call()
            return {"wrong": self._line.absent()}
        return {"wrong": made.count_wrong(self._line.wait)}

    def prepare_steps(self, framework: str, model: str) -> dict[str, Any]:
        """Make the parts of a training step; further calls name one as their ``side``.

        Returns:
            ``parts``: their names.
        """
        self._library.use(framework)
        module = importlib.import_module(f"collective.tools.models.{framework}")
        calls, self._parameters = module.steps(self._library, model)
        # Ready for the first step: buckets are laid out, weights are rank 0's.
        for part in sorted(calls):
            calls[part]()
            self._steps[part] = calls[part]
        return {"parts": sorted(calls)}

    def digest(self) -> dict[str, Any]:
        """Return ``digests``: of each parameter that the last steps have updated."""
        parameters, self._parameters = self._parameters, []
        return {"digests": [hashlib.sha256(each.tobytes()).hexdigest() for each in parameters]}

    def wait_for_late(self, side: str, late: float) -> dict[str, Any]:
        """Measure what a prepared call costs while rank 1 is ``late`` seconds late.

        Returns:
            ``cpu`` and ``wall``: seconds of this rank, or nothing for the late one.
        """
        call = self._prepared[side].call
        call()
        self._line.wait()
        if self._library.rank == 1:
            time.sleep(late)
            call()
            return {}
        begin, before = time.perf_counter(), resource.getrusage(self._whose)
        call()
        after, wall = resource.getrusage(self._whose), time.perf_counter() - begin
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"cpu": cpu, "wall": wall}

    def memory_of(self, side: str) -> dict[str, Any]:
        """Measure memory around a prepared call.

        Returns:
            ``mapped``: bytes of shared segments without those that hold the arrays;
            ``resident``: how many of them are in use; ``transient``: by how many bytes
            the call raised the process above what it held before.
        """
        made = self._prepared[side]
        made.call()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        made.call()
        transient = max(0, _status("VmHWM") - before)
        arrays = [self._library.numpy(array) for array in (made.x, made.y) if array is not None]
        mapped, resident = _segments(arrays)
        return {"mapped": mapped, "resident": resident, "transient": transient}


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return 0 if found is None else int(found[1]) << 10


def _segments(arrays: list[Array]) -> tuple[int, int]:
    """Return mapped and resident bytes of collective's segments that hold none of ``arrays``."""
    addresses = [int(array.__array_interface__["data"][0]) for array in arrays]
    mapped = resident = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)", line)
        if head is not None:
            low, high = int(head[1], 16), int(head[2], 16)
            ours = "collective" in head[3].rpartition("/")[2]
            ours = ours and not any(low <= address < high for address in addresses)
        elif ours and line.startswith("Size:"):
            mapped += int(line.split()[1]) << 10
        elif ours and line.startswith("Rss:"):
            resident += int(line.split()[1]) << 10
    return mapped, resident


@dataclass(frozen=True)
class WorkerCall(Job):
    """What all ranks of a contestant do once.

    Attributes:
        do: the name of a method of :class:`Worker`.
        arguments: for that.
    """

    do: str
    arguments: Mapping[str, Any]

    def run(self, participant: Participant) -> dict[str, Any]:
        """Return what the method does, or ``unsupported``: why the library cannot."""
        try:
            answer: dict[str, Any] = getattr(participant.kept["worker"], self.do)(**self.arguments)
        except Unsupported as error:
            return {"unsupported": str(error)}
        except MemoryError as error:
            return {"unsupported": f"no memory: {error}"}
        return answer


def main() -> None:
    """Be the rank that the launcher says, until the arena has no more to ask."""
    name, where, address = sys.argv[1:]
    folder = Path(where)
    whose = resource.RUSAGE_THREAD if name == "threads" else resource.RUSAGE_SELF
    library = open_library(name, folder)
    participant = Participant(library.rank, {"worker": Worker(library, folder, whose)})
    control.serve(participant, control.call_back(address, library.rank), foreign=True)


if __name__ == "__main__":
    main()
