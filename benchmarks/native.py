"""What the native core gives ``shm``: ``python benchmarks/native.py``.

Calls on ordinary memory by ranks on one host that have the core, and by the same ranks on a second
communicator that does without, in turns of a few milliseconds: ``--operation gather``, by default
all-reduces in place. A size is that of the longest array of a call; of ``send_recv`` it is half a
round trip. Of a side's turns the fastest and the median are told, of the slowest rank: where the
cores are not free, they differ. With ``--cpu`` it is processor time, of the rank that takes most.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from collective import native
from collective.communicator import Communicator
from collective.memory.dtypes import BY_NAME
from collective.testing import run_ranks
from collective.tools.bench.alternate import alternate, repeated
from collective.tools.bench.libraries import Call, Ours
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.operations import ALL
from collective.tools.bench.prepared import Prepared
from collective.tools.show import (
    add_outputs,
    add_sizes,
    microseconds,
    names,
    print_table,
    size_name,
)

__all__ = ["seconds_of"]

_TURN_S = 4e-3
_CALLS = (
    "all_reduce", "reduce", "reduce_scatter", "broadcast", "gather", "scatter", "all_gather",
    "all_to_all", "send_recv",
)  # fmt: skip


def measure(
    comm: Communicator,
    operation: str,
    dtypes: Sequence[str],
    op: str,
    sizes: Sequence[int],
    turns: int,
    cpu: bool,
) -> list[dict[str, Any]]:
    """Return seconds a call, of each turn, with the core and without it."""
    sides = {"core": comm.dup()}
    native.switch(False)
    sides["without"] = comm.dup()
    native.switch(True)
    found = []
    for dtype in dtypes:
        share = BY_NAME[dtype].itemsize * comm.size
        for size in sizes:
            nbytes = max(share, size // share * share)  # as many elements for each rank
            taken = seconds_of(comm, sides, operation, nbytes, turns, dtype=dtype, op=op, cpu=cpu)
            found.append({"dtype": dtype, "nbytes": nbytes, **taken})
    return found


class _Folding(Ours):
    """Ours, whose reductions have an operator."""

    def __init__(self, comm: Communicator, op: str) -> None:
        super().__init__(comm)
        self._op: Any = op

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        comm, op = self.comm, self._op
        return super().calls(x, y) | {
            "all_reduce": lambda: comm.all_reduce(x, op=op, out=x),
            "reduce": lambda: comm.reduce(x, op=op, out=y),
            "reduce_scatter": lambda: comm.reduce_scatter(x, op=op, out=y),
        }


def seconds_of(
    comm: Communicator,
    sides: Mapping[str, Communicator],
    operation: str,
    nbytes: int,
    turns: int,
    *,
    dtype: str = "float32",
    op: str = "max",
    cpu: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds a call, of each turn, by side: communicators of the same ranks.

    Args:
        nbytes: of the longest array of a call; of ``send_recv`` it is half a round trip.
        op: of a reduction.
        cpu: whether processor time is meant.
    """
    calls = {
        name: repeated(Prepared(_Folding(side, op), operation, nbytes, dtype=dtype).call)
        for name, side in sides.items()
    }
    clock = time.process_time if cpu else time.perf_counter
    found = alternate(comm, calls, turns, _TURN_S, warm=2, clock=clock)
    share = ALL[operation].share
    return {name: [share * seconds for seconds in each] for name, each in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="What the native core gives shm.")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--op", default="max", help="name of an operator")
    parser.add_argument("--operation", choices=_CALLS, default="all_reduce")
    parser.add_argument("--cpu", action="store_true", help="processor time instead")
    parser.add_argument("--dtypes", type=names, default=["float32"])
    add_sizes(parser, "16 64 256 1K 4K 16K 64K 256K 1M 4M 16M 64M")
    parser.add_argument("--turns", type=int, default=30)
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)

    def measure_ranks() -> dict[str, Any]:
        found, *_ = run_ranks(
            options.n, measure, options.operation, options.dtypes, options.op, options.sizes,
            options.turns, options.cpu, backend="shm", timeout=600.0,
        )  # fmt: skip
        return {"calls": found, "native": native.status()}

    run = measured(options, measure_ranks)
    rows = []
    for each in run["calls"]:
        row = [each["dtype"], size_name(each["nbytes"])]
        for figure in (min, statistics.median):
            core, without = figure(each["core"]), figure(each["without"])
            row += [microseconds(core), microseconds(without), f"{without / core:.2f}"]
        rows.append(row)
    print_table(
        f"{headline(run['machine'])}; native core {run['native']}; µs",
        ["dtype", "size", "fastest: core", "without", "×", "median: core", "without", "×"],
        rows,
        options.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
