"""Measurement of calls by the place of the array in its page: ``python benchmarks/alignment.py``.

Two ranks make calls over ``shm`` on arrays that begin 0, 16, 32 … bytes behind the beginning of a
page. NumPy's long arrays begin 16 bytes behind it, and PyTorch's at a multiple of 64. The places
take turns. The table shows the fastest and the median call of the slower rank at each place, and
the median as a multiple of that of the fastest place. The multiples should be near 1;
docs/decisions/0243-copies-without-string-instruction.md tells what made them larger.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.testing import run_ranks
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, add_sizes, microseconds, print_table, size_name

_PAGE = 4096
_PLACES = (0, 16, 32, 48, 64, 128, 1024, 2048, 4080)
_OPERATIONS = ("all_reduce", "broadcast", "sendrecv")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure calls by the place of the array.")
    add_sizes(parser, "64K 1M 16M")
    parser.add_argument("--turns", type=int, default=15)
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)

    def measure_ranks() -> dict[str, Any]:
        ranks = run_ranks(2, measure, options.sizes, options.turns, backend="shm", timeout=600.0)
        return {"calls": [_slower(*of_ranks) for of_ranks in zip(*ranks, strict=True)]}

    run = measured(options, measure_ranks)
    medians = [statistics.median(call["seconds"]) for call in run["calls"]]
    rows = []
    for call, median in zip(run["calls"], medians, strict=True):
        same = [
            other_median
            for other, other_median in zip(run["calls"], medians, strict=True)
            if (other["operation"], other["nbytes"]) == (call["operation"], call["nbytes"])
        ]
        rows.append(
            [call["operation"], size_name(call["nbytes"]), str(call["place"]),
             microseconds(min(call["seconds"])), microseconds(median), f"{median / min(same):.2f}"]
        )  # fmt: skip
    print_table(
        f"{headline(run['machine'])}; µs",
        ["operation", "size", "bytes behind a page", "fastest", "median", "×"],
        rows,
        options.markdown,
    )
    return 0


def _slower(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the longer of the two ranks' seconds for each call."""
    pairs = zip(first["seconds"], second["seconds"], strict=True)
    return {**first, "seconds": [max(pair) for pair in pairs]}


def measure(comm: Communicator, sizes: Sequence[int], turns: int) -> list[dict[str, Any]]:
    """Return this rank's seconds of each call, by operation, size and place."""
    records = []
    for operation in _OPERATIONS:
        for nbytes in sizes:
            memory = np.zeros(nbytes + 2 * _PAGE, np.uint8)
            page = -memory.ctypes.data % _PAGE
            other = np.zeros(nbytes // 4, np.float32)
            arrays = {
                place: memory[page + place :][: other.nbytes].view(np.float32) for place in _PLACES
            }
            seconds: dict[int, list[float]] = {place: [] for place in _PLACES}
            for x in arrays.values():
                _call(comm, operation, x, other)  # the first call at a place makes the plan
            for _ in range(turns):
                for place, x in arrays.items():
                    comm.barrier()
                    begin = time.perf_counter()
                    _call(comm, operation, x, other)
                    seconds[place].append(time.perf_counter() - begin)
            records += [
                {"operation": operation, "nbytes": nbytes, "place": place, "seconds": times}
                for place, times in seconds.items()
            ]
    return records


def _call(comm: Communicator, operation: str, x: Any, other: Any) -> None:
    if operation == "all_reduce":
        comm.all_reduce(x, op="max", out=x)
    elif operation == "broadcast":
        comm.broadcast(x)
    else:
        comm.sendrecv(other, 1 - comm.rank, 1 - comm.rank, out=x)


if __name__ == "__main__":
    sys.exit(main())
