"""Measurement of the calls of tensor-parallel inference: ``python benchmarks/inference.py``.

The inference runs on CPUs. The calls are all-reduces and all-gathers of bfloat16 and float16, from
10 KiB to 32 MiB, between 2 to 4 ranks of one host, on PyTorch's tensors. Our calls use ordinary
tensors of PyTorch and tensors from ``comm.empty``. They are compared with torch.distributed over
Gloo, with MPI through mpi4py, and with float32 of as many bytes. The sides take turns, as in all
these benchmarks. Ratios are medians over neighbouring turns.

MPI has no bfloat16. mpi4py treats such a tensor as bytes. MPICH refuses to add bytes, and Open MPI
adds them, so that 1.5 + 1.5 is 8.5e37. A user of MPI has to convert to float32 and back. This is
represented here by float32 of as many *numbers*; the two conversions themselves are not counted. A
gather only moves bytes, whatever they represent, so it is compared with MPI's float16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import sittings
from promises import fastest
from reach import Ratio

from collective.tools.bench.machine import headline, measured
from collective.tools.bench.measure import Pace, Record, Task
from collective.tools.bench.run import Results
from collective.tools.show import counts, microseconds, parse_size, print_table, size_name

_OPERATIONS = ("all_reduce", "all_gather")
_DTYPES = ("bfloat16", "float16", "float32")
_SIZES, _QUICK = "10K 64K 256K 1M 8M 32M", "10K 1M 32M"
_PEERS = ("torch", "mpi4py")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements and return the data for the JSON file."""
    session = sittings.Sittings(options)
    sizes = options.sizes or [parse_size(s) for s in (_QUICK if options.quick else _SIZES).split()]
    for ranks in options.n:
        pace = Pace.of(options.quick)
        session.sit(ranks, _tasks(sizes), pace, framework="torch", without=["memcpy"])
    return session.as_json()


def _tasks(sizes: Sequence[int]) -> list[Task]:
    """Return the measurements, with float32 of as many bytes, and of as many numbers."""
    tasks = [Task(o, nbytes, dtype) for o in _OPERATIONS for nbytes in sizes for dtype in _DTYPES]
    tasks += [Task("all_reduce", 2 * nbytes, "float32") for nbytes in sizes]
    return list(dict.fromkeys(tasks))


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print a table for each operation and number of ranks."""
    records = Results.from_json(run).records
    print(f"{headline(run['machine'])}\n")
    kinds = dict.fromkeys((r.operation, r.ranks) for r in records)
    for operation, ranks in kinds:
        here = [r for r in records if (r.operation, r.ranks) == (operation, ranks)]
        sizes = sorted({r.nbytes for r in here if r.dtype == "bfloat16"})
        header = ["size", "bfloat16 µs", "comm.empty", "float16", "float32", "Gloo bfloat16"]
        header += ["MPI float16", *["MPI via float32"] * (operation == "all_reduce")]
        header += ["× float32's time", "× the fastest peer"]
        rows = [_row(here, operation, nbytes) for nbytes in sizes]
        print_table(f"{operation}, {ranks} ranks, µs", header, rows, markdown)
    sittings.show_contestants(run, markdown)


def _row(here: Sequence[Record], operation: str, nbytes: int) -> list[str]:
    of = {dtype: [r for r in here if r.dtype == dtype] for dtype in _DTYPES}

    def ours(dtype: str, memory: str = "ordinary") -> Record | None:
        found = [r for r in of[dtype] if (r.contestant, r.memory) == ("shm", memory)]
        return next((r for r in found if r.nbytes == nbytes), None)

    mine, full = ours("bfloat16"), ours("float32")
    gloo, half = (
        fastest(of[d], nbytes, library) for d, library in zip(("bfloat16", "float16"), _PEERS)
    )
    wide = fastest(of["float32"], 2 * nbytes, "mpi4py")
    rivals = [gloo, wide if operation == "all_reduce" else half]
    shown = [mine, ours("bfloat16", "symmetric"), ours("float16"), full, gloo, half]
    shown += [wide] * (operation == "all_reduce")
    best = min(filter(None, rivals), key=lambda record: record.seconds, default=None)
    slower = "–" if mine is None or full is None else f"{1 / Ratio(mine, full).value:.2f}"
    faster = "–" if mine is None or best is None else f"{Ratio(mine, best).value:.2f}"
    cells = ["–" if record is None else microseconds(record.seconds) for record in shown]
    return [size_name(nbytes), *cells, slower, faster]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Measure all-reduces and all-gathers of 16-bit numbers."
    )
    parser.add_argument(
        "-n", type=counts, default=(2, 3, 4), metavar="N,…", help="ranks (default: 2,3,4)"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, metavar="SIZE", help="sizes of an array"
    )
    sittings.add_options(parser)
    options = parser.parse_args(arguments)
    run = measured(options, lambda: measure(options))
    show(run, options.markdown)
    return sittings.exit_code("inference", run)


if __name__ == "__main__":
    sys.exit(main())
