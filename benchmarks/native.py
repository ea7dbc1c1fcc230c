"""Measurement of ``shm`` with and without the native core: ``python benchmarks/native.py``.

Ranks on one host make calls on ordinary float32 arrays. One communicator uses the core, a second
one of the same ranks does not, and they take turns of a few milliseconds. The calls are all-reduces
in place, or those of ``--operation``. A size is the size of the longest array of a call; for
``send_recv``, half a round trip is measured. The table shows the fastest turn and the median turn
of each side, of the slowest rank; they differ if the cores are not free. With ``--cpu``, the
figures are the processor time of the rank that takes most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from turns import alternate, repeated

from collective import native
from collective.communicator import Communicator
from collective.testing import run_ranks
from collective.tools.bench.libraries import Ours
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.operations import ALL, Prepared
from collective.tools.show import (
    add_outputs,
    add_sizes,
    microseconds,
    print_table,
    size_name,
)

_TURN_S = 4e-3
_CALLS = (
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "gather", "scatter", "all_gather",
    "all_to_all", "send_recv",
)  # fmt: skip


def measure(
    comm: Communicator, operation: str, sizes: Sequence[int], turns: int, cpu: bool
) -> list[dict[str, Any]]:
    """Return the seconds per call in each turn, with the core and without it."""
    sides = {"core": comm.dup()}
    native.switch(False)
    sides["without"] = comm.dup()
    native.switch(True)
    clock = time.process_time if cpu else time.perf_counter
    share = ALL[operation].share
    records = []
    for size in sizes:
        row = 4 * comm.size
        nbytes = max(row, size // row * row)  # the same number of elements for each rank
        calls = {
            name: repeated(Prepared(Ours(side), operation, nbytes).call)
            for name, side in sides.items()
        }
        times = alternate(comm, calls, turns, _TURN_S, warm=2, clock=clock)
        seconds = {name: [share * each for each in side] for name, side in times.items()}
        records.append({"nbytes": nbytes, **seconds})
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure shm with and without the native core.")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--operation", choices=_CALLS, default="all_reduce")
    parser.add_argument("--cpu", action="store_true", help="processor time instead")
    add_sizes(parser, "16 64 256 1K 4K 16K 64K 256K 1M 4M 16M 64M")
    parser.add_argument("--turns", type=int, default=30)
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)

    def measure_ranks() -> dict[str, Any]:
        found, *_ = run_ranks(
            options.n, measure, options.operation, options.sizes, options.turns, options.cpu,
            backend="shm", timeout=600.0,
        )  # fmt: skip
        return {"calls": found, "native": native.status()}

    run = measured(options, measure_ranks)
    rows = []
    for call in run["calls"]:
        row = [size_name(call["nbytes"])]
        for figure in (min, statistics.median):
            core, without = figure(call["core"]), figure(call["without"])
            row += [microseconds(core), microseconds(without), f"{without / core:.2f}"]
        rows.append(row)
    print_table(
        f"{headline(run['machine'])}; native core {run['native']}; µs",
        ["size", "fastest: core", "without", "×", "median: core", "without", "×"],
        rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
