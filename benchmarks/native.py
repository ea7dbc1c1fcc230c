"""What the native core gives ``shm``: ``python benchmarks/native.py``.

All-reduces of ordinary memory, in place, by ranks on one host that have the core, and by the same
ranks on a second communicator that does without, in turns of a few milliseconds. Of a side's
turns the fastest and the median are told, of the slowest rank: where the cores are not free,
they differ. With ``--messages`` half a round trip between two ranks, in place of an all-reduce.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from collective import native
from collective.communicator import Communicator
from collective.testing import run_ranks
from collective.tools.bench.alternate import alternate, repeated
from collective.tools.bench.machine import measured
from collective.tools.show import (
    add_outputs,
    microseconds,
    names,
    parse_size,
    print_table,
    size_name,
)

_TURN_S = 4e-3


def measure(
    comm: Communicator, dtypes: Sequence[str], op: str | None, sizes: Sequence[int], turns: int
) -> list[dict[str, Any]]:
    """Return seconds a call, of each turn, with the core and without it; None is a message."""
    sides = {"core": comm.dup()}
    native.switch(False)
    sides["without"] = comm.dup()
    native.switch(True)
    found = []
    for dtype in dtypes:
        for nbytes in sizes:
            x = _array(dtype, nbytes)
            calls = {
                name: repeated(
                    partial(_round_trip, side, x, x.copy())
                    if op is None
                    else partial(side.all_reduce, x, op=op, out=x)
                )
                for name, side in sides.items()
            }
            taken = alternate(comm, calls, turns, _TURN_S, warm=2)
            if op is None:
                taken = {name: [each / 2 for each in turn] for name, turn in taken.items()}
            found.append({"dtype": dtype, "nbytes": x.nbytes, **taken})
    return found


def _round_trip(comm: Communicator, x: Any, out: Any) -> None:
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(out, 1)
    elif comm.rank == 1:
        comm.recv(out, 0)
        comm.send(x, 0)


def _array(dtype: str, nbytes: int) -> Any:
    if dtype != "bfloat16":
        return np.ones(nbytes // np.dtype(dtype).itemsize, dtype)
    import ml_dtypes

    return np.ones(nbytes // 2, ml_dtypes.bfloat16)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="What the native core gives shm.")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    parser.add_argument("--op", default="max", help="of an operator that changes no ones")
    parser.add_argument("--messages", action="store_true", help="half a round trip instead")
    parser.add_argument("--dtypes", type=names, default=["float32"])
    parser.add_argument(
        "--sizes", type=parse_size, nargs="+",
        default=[4 << (2 * power) for power in range(1, 13)],
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=30)
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)

    def measure_ranks() -> dict[str, Any]:
        found, *_ = run_ranks(
            options.n, measure, options.dtypes, None if options.messages else options.op,
            options.sizes, options.turns, backend="shm", timeout=600.0,
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
        f"{run['machine']['date']}, {run['machine']['cpu']}; native core {run['native']}; µs",
        ["dtype", "size", "fastest: core", "without", "×", "median: core", "without", "×"],
        rows,
        options.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
