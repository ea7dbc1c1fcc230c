"""What the native core gives ``shm``: ``python benchmarks/native.py``.

All-reduces of ordinary memory, in place, by ranks on one host that have the core, and by the same
ranks on a second communicator that does without, in turns of a few milliseconds. Of a side's
turns the fastest and the median are told, of the slowest rank: where the cores are not free,
they differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from collective import native
from collective.communicator import Communicator
from collective.testing import run_ranks
from collective.tools.bench.machine import Observer
from collective.tools.show import (
    add_outputs,
    microseconds,
    names,
    parse_size,
    print_table,
    size_name,
    write,
)

_TURN_S = 4e-3


def measure(
    comm: Communicator, dtypes: Sequence[str], op: str, sizes: Sequence[int], turns: int
) -> list[dict[str, Any]]:
    """Return seconds a call, of each turn, with the core and without it."""
    sides = {"core": comm.dup()}
    native.switch(False)
    sides["without"] = comm.dup()
    native.switch(True)
    found = []
    for dtype in dtypes:
        for nbytes in sizes:
            x = _array(dtype, nbytes)
            taken: dict[str, list[float]] = {side: [] for side in sides}
            once = [_turn(comm, side, x, op, 2) for side in sides.values()]
            calls = max(1, int(_TURN_S / max(once)))
            for _ in range(turns):
                for name, side in sides.items():
                    taken[name].append(_turn(comm, side, x, op, calls))
            found.append({"dtype": dtype, "nbytes": x.nbytes, **taken})
    return found


def _array(dtype: str, nbytes: int) -> Any:
    if dtype != "bfloat16":
        return np.ones(nbytes // np.dtype(dtype).itemsize, dtype)
    import ml_dtypes

    return np.ones(nbytes // 2, ml_dtypes.bfloat16)


def _turn(comm: Communicator, side: Communicator, x: Any, op: str, calls: int) -> float:
    """Return the seconds of a call, of the slowest rank, the same on all of them."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        side.all_reduce(x, op=op, out=x)
    taken = np.array([(time.perf_counter() - start) / calls])
    return float(comm.all_reduce(taken, op="max")[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="What the native core gives shm.")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--op", default="max", help="of an operator that changes no ones")
    parser.add_argument("--dtypes", type=names, default=["float32"])
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+",
        default=[4 << (2 * power) for power in range(1, 13)],
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=30)
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)
    if options.earlier is not None:
        run = json.loads(options.earlier.read_text())
    else:
        observer = Observer()
        found, *_ = run_ranks(
            options.n, measure, options.dtypes, options.op, options.sizes, options.turns,
            backend="shm", timeout=600.0,
        )  # fmt: skip
        run = {"calls": found, "native": native.status(), "machine": observer.machine()}
        write(options.json, run)
    rows = []
    for each in run["calls"]:
        row = [each["dtype"], size_name(each["nbytes"])]
        for figure in (min, statistics.median):
            core, without = figure(each["core"]), figure(each["without"])
            row += [microseconds(core), microseconds(without), f"{without / core:.2f}"]
        rows.append(row)
    print_table(
        f"{run['machine']['date']}, {run['machine']['cpu']}; native core {run['native']}; µs",
        ["dtype", "size", "fastest: core", "without", "×", "median: core", "without", "×"],
        rows,
        options.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
