"""One rank of one contestant: does what the arena asks, and sleeps in between.

Started by :mod:`arena` in the environment of the library that is measured::

    python worker.py LIBRARY FOLDER

It connects to the socket ``FOLDER/../arena``, says who it is, and answers each line of
JSON with one. While another contestant has its turn it is blocked in a read.
"""

from __future__ import annotations

import json
import re
import resource
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from libraries import Call, Library, Unsupported, open_library
from startline import StartLine

Array = np.ndarray[Any, Any]


@dataclass
class _Prepared:
    """An operation on arrays that are allocated."""

    operation: str
    x: Any
    y: Any  # None where the operation works in place
    call: Call


class Worker:
    """Answers requests: each is the name of a method and its arguments.

    Args:
        library: connected.
        folder: where the start line is.
        whose: whose processor time a rank's is: ``resource.RUSAGE_SELF``, or
            ``RUSAGE_THREAD`` where ranks are threads.
    """

    def __init__(self, library: Library, folder: Path, whose: int) -> None:
        self._library = library
        self._line = StartLine(folder / "startline", library.rank, library.size)
        self._whose = whose
        self._prepared: dict[str, _Prepared] = {}  # by the kind of memory

    def serve(self, address: str) -> None:
        """Connect to the arena and work until it says that it is over, or is gone."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address)
            library = self._library
            say: dict[str, Any] = {"rank": library.rank, "version": library.version}
            connection.sendall(json.dumps(say).encode() + b"\n")
            with connection.makefile("r", encoding="utf-8") as requests:
                for line in requests:
                    say = self._answer(json.loads(line))
                    connection.sendall(json.dumps(say).encode() + b"\n")
        self._prepared.clear()
        library.close()

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        handle = getattr(self, request.pop("do"))
        try:
            answer: dict[str, Any] = handle(**request)
        except Unsupported as error:
            return {"unsupported": str(error)}
        except Exception:
            return {"error": traceback.format_exc()}
        return answer

    # -- requests -------------------------------------------------------------------------

    def prepare(self, operation: str, nbytes: int, memory: str) -> dict[str, Any]:
        """Allocate arrays for ``operation``, the larger of ``nbytes``, and write zeros.

        Zeros stay zeros however often they are summed in place. Further requests name
        the prepared operation by its ``memory``.
        """
        library = self._library
        part = max(1, -(-nbytes // (4 * library.size)))
        whole = part * library.size if operation in _CUT else max(1, nbytes // 4)
        x = library.new(part if operation == "all_gather" else whole, memory)
        library.numpy(x)[:] = 0
        y = None
        if operation not in _IN_PLACE:
            y = library.new(part if operation == "reduce_scatter" else whole, memory)
            library.numpy(y)[:] = 0
        call = library.call(operation, x, y)
        self._prepared[memory] = _Prepared(operation, x, y, call)
        return {"nbytes": 4 * whole}

    def release(self, memory: str) -> dict[str, Any]:
        """Drop the arrays."""
        del self._prepared[memory]
        return {}

    def measure(self, memory: str, iterations: int, warmup: int, each: bool) -> dict[str, Any]:
        """Time a prepared call.

        Args:
            memory: which one.
            iterations: timed calls.
            warmup: untimed calls before them.
            each: time each call by itself, from a common start; or all of them, back
                to back.

        Returns:
            ``seconds``: of each call, or one mean.
        """
        call, clock, wait = self._prepared[memory].call, time.perf_counter, self._line.wait
        for _ in range(warmup):
            call()
        seconds = []
        if each:
            for _ in range(iterations):
                wait()
                begin = clock()
                call()
                seconds.append(clock() - begin)
        else:
            wait()
            begin = clock()
            for _ in range(iterations):
                call()
            seconds.append((clock() - begin) / iterations)
        return {"seconds": seconds}

    def check(self, memory: str) -> dict[str, Any]:
        """Run a prepared call on data of which every element of the result is known."""
        library, made = self._library, self._prepared[memory]
        x = library.numpy(made.x)
        x[:] = _input(library.rank, x.size)
        self._line.wait()
        made.call()
        self._line.wait()
        result = x if made.y is None else library.numpy(made.y)
        expected = _expected(made.operation, library.rank, library.size, x.size)
        wrong = 0 if expected is None else int(np.count_nonzero(result != expected))
        if wrong:
            raise ValueError(f"{made.operation}: {wrong} of {result.size} elements are wrong")
        return {}

    def wait_for_late(self, memory: str, late: float) -> dict[str, Any]:
        """Measure what a prepared call costs while rank 1 is ``late`` seconds late.

        Returns:
            ``cpu`` and ``wall``: seconds of this rank, or nothing for the late one.
        """
        call = self._prepared[memory].call
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

    def memory_of(self, memory: str) -> dict[str, Any]:
        """Measure memory around a prepared call.

        Returns:
            ``mapped``: bytes of shared segments without those that hold the arrays;
            ``resident``: how many of them are in use; ``transient``: by how many bytes
            the call raised the process above what it held before.
        """
        made = self._prepared[memory]
        made.call()
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        made.call()
        transient = max(0, _status("VmHWM") - before)
        arrays = [self._library.numpy(array) for array in (made.x, made.y) if array is not None]
        mapped, resident = _segments(arrays)
        return {"mapped": mapped, "resident": resident, "transient": transient}


# Operations of which an array is cut into one part a rank, and those without an output.
_CUT = ("all_gather", "reduce_scatter", "all_to_all")
_IN_PLACE = ("all_reduce", "broadcast")


def _input(rank: int, count: int) -> Array:
    return (np.arange(count, dtype=np.int64) % 977 + 1000 * rank).astype(np.float32)


def _expected(operation: str, rank: int, size: int, count: int) -> Array | None:
    """Return the result for inputs of ``count`` elements, or None where there is none."""
    if operation == "broadcast":
        return _input(0, count)
    if operation == "copy":
        return _input(rank, count)
    if operation == "send_recv":
        return _input(rank ^ 1, count) if rank ^ 1 < size else None
    inputs = [_input(r, count) for r in range(size)]
    part = slice(rank * count // size, (rank + 1) * count // size)
    if operation == "all_gather":
        return np.concatenate(inputs)
    if operation == "all_to_all":
        return np.concatenate([x[part] for x in inputs])
    total: Array = np.add.reduce(inputs)
    return total[part] if operation == "reduce_scatter" else total


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


def main() -> None:
    """Be the rank that the launcher says."""
    name, where = sys.argv[1:]
    folder = Path(where)
    whose = resource.RUSAGE_THREAD if name == "threads" else resource.RUSAGE_SELF
    worker = Worker(open_library(name, folder), folder, whose)
    worker.serve(str(folder.parent / "arena"))


if __name__ == "__main__":
    main()
