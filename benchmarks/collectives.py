"""Compare operations at several sizes with MPI, Gloo and a plain memcpy.

::

    python benchmarks/collectives.py                            # all_reduce, 2 ranks
    python benchmarks/collectives.py --operations all -n 4
    python benchmarks/collectives.py --sizes 4 64K 16M --against mpich memcpy --json out.json

Times are microseconds; the last columns say how many times faster than the fastest MPI
ours are. See benchmarks/README.md for the method.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import peers
from arena import Arena, ArenaError, contestants
from measure import OPERATIONS, Pace, Record, compare, fastest_mpi, find
from report import Observer, Progress, duration, parse_size, print_table, size_name, write

__all__ = ["RIVALS", "add_options", "run", "show"]

RIVALS = (*peers.VENDORS, "gloo", "memcpy")
_SIZES = tuple(map(parse_size, "4 64 1K 8K 64K 256K 1M 4M 16M 64M".split()))


def run(
    arena: Arena,
    operations: Sequence[str],
    sizes: Sequence[int],
    pace: Pace,
    missing: dict[str, str],
) -> list[Record]:
    """Measure operations at sizes; what a library lacks is added to ``missing``."""
    progress = Progress()
    records: list[Record] = []

    def note(contestant: str, reason: str) -> None:
        missing[f"{contestant} {operation}"] = reason.strip().splitlines()[-1]

    for operation in operations:
        for nbytes in sizes:
            progress.show(f"{operation}, {size_name(nbytes)}, {arena.size} ranks")
            records.extend(compare(arena, operation, nbytes, pace, note))
    progress.clear()
    return records


def show(records: Sequence[Record], markdown: bool = False) -> None:
    """Print a table an operation and number of ranks."""
    for operation, ranks in dict.fromkeys((r.operation, r.ranks) for r in records):
        chosen = [r for r in records if (r.operation, r.ranks) == (operation, ranks)]
        sides = list(dict.fromkeys(record.side for record in chosen))
        ours = [side for side in sides if side.startswith(("shm", "threads"))]
        rows = []
        for nbytes in dict.fromkeys(record.nbytes for record in chosen):
            cells = [size_name(nbytes)]
            for side in sides:
                record = find(chosen, operation, ranks, nbytes, side)
                cells.append("–" if record is None else duration(record.seconds))
            best = fastest_mpi(chosen, operation, ranks, nbytes)
            for side in ours:
                record = find(chosen, operation, ranks, nbytes, side)
                ratio = best.seconds / record.seconds if best and record else None
                cells.append("–" if ratio is None else f"{ratio:.2f}")
            rows.append(cells)
        header = ["size", *sides, *(f"MPI / {side}" for side in ours)]
        print_table(f"{operation}, {ranks} ranks, µs", header, rows, markdown)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every comparison has."""
    peers.add_options(parser)
    parser.add_argument(
        "--against",
        nargs="*",
        choices=RIVALS,
        default=RIVALS,
        metavar="NAME",
        help=f"the rivals: {', '.join(RIVALS)} (default: all that are installed)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Compare operations with MPI, Gloo and a plain memcpy."
    )
    parser.add_argument(
        "--operations", nargs="+", choices=(*OPERATIONS, "all"), default=["all_reduce"]
    )
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=_SIZES, metavar="SIZE")
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument(
        "--ours", nargs="*", choices=("shm", "threads"), default=["shm"], help="our transports"
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    operations = OPERATIONS if "all" in options.operations else options.operations
    able, missing = contestants([*options.ours, *options.against], peers.find(options))
    observer = Observer()
    try:
        with Arena(able, options.n) as arena:
            pace = Pace.of(options.quick)
            records = run(arena, operations, options.sizes, pace, missing)
            versions = arena.versions
    except ArenaError as error:
        print(f"collectives: {error}", file=sys.stderr)
        return 1
    show(records)
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    write(
        options.json,
        {
            "machine": observer.machine(),
            "versions": versions,
            "missing": missing,
            "records": [record.as_json() for record in records],
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
