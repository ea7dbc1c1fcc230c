"""Measurement of calls on JAX arrays against the same calls on NumPy arrays.

::

    make .jax/.done && .jax/bin/python benchmarks/jax_arrays.py --sizes 1K 64K 16M

Both sides live in the same processes and take turns, A B A B …. Each call makes a new result. The
third side makes a JAX array over NumPy's memory, and nothing else. This is XLA's own part, and no
call on JAX arrays can cost less. The figures are medians of the turns on the slowest rank, and
"added" is the median difference of neighbouring turns.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax_main
import numpy as np

from collective.communicator import Communicator
from collective.memory.arrays import adapter_like
from collective.memory.dtypes import BY_NAME
from collective.tools.bench.alternate import alternate, median_excess, repeated
from collective.tools.bench.machine import headline
from collective.tools.bench.measure import Pace
from collective.tools.show import microseconds, print_table, size_name

_SIZES = "1K 64K 1M 16M"
# Promised bound: microseconds that a call of 1 KiB on a JAX array may take beside NumPy's.
_ADDED_US, _SMALL = 5.0, 1 << 10


def compared(
    comm: Communicator, _: Path, sizes: Sequence[int], quick: bool
) -> list[dict[str, Any]]:
    """Measure as one of the ranks; return the figures."""
    jnp: Any = importlib.import_module("jax.numpy")
    pace, adapter, dtype = Pace.of(quick), adapter_like("jax"), BY_NAME["float32"]
    records = []
    for nbytes in sizes:
        x = np.ones(nbytes // 4, np.float32)
        y, memory = jnp.asarray(x), adapter.empty(x.shape, dtype, None)
        memory[...] = 1
        assert np.array_equal(comm.all_reduce(y), comm.all_reduce(x))
        sides = {
            "numpy": repeated(partial(comm.all_reduce, x)),
            "jax": repeated(partial(comm.all_reduce, y)),
            "made": repeated(partial(adapter.wrap, memory, dtype)),
        }
        seconds = alternate(comm, sides, pace.rounds, pace.turn)
        medians = {name: statistics.median(turns) for name, turns in seconds.items()}
        added = median_excess(seconds["jax"], seconds["numpy"])
        records.append({"nbytes": nbytes, **medians, "added": added})
    return records


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print the table of a run."""
    print(f"{headline(run['machine'])}; {run['ranks']} ranks\n")
    rows = [
        [
            size_name(record["nbytes"]),
            *(microseconds(record[side]) for side in ("numpy", "jax", "made")),
            f"{record['added'] * 1e6:.2f}",
            "" if record["nbytes"] > _SMALL
            else "kept" if record["added"] * 1e6 <= _ADDED_US else "missed",
        ]
        for record in run["records"]
    ]  # fmt: skip
    header = ["size", "NumPy µs", "JAX µs", "XLA's part µs", "added µs", "verdict"]
    print_table(f"all_reduce on arrays of JAX {run['version']}", header, rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return jax_main.run(
        "Compare calls on JAX's arrays with NumPy's.", compared, _SIZES, show, arguments
    )


if __name__ == "__main__":
    import jax_arrays  # the ranks import their function by this name

    sys.exit(jax_arrays.main())
