"""Measurement of the memory that a communicator of ``shm`` takes beside the user's arrays.

::

    python benchmarks/memory.py                      # 2, 4 and 8 ranks, 1 MiB and 64 MiB

The operations use ordinary arrays of two sizes. The figures are the shared mappings, how much of
them is in use, and by how much the memory of the process grows during the call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from collective.tools.bench.arena import Arena, ArenaError
from collective.tools.bench.contestants import Contestant
from collective.tools.bench.machine import measured
from collective.tools.show import Progress, add_outputs, add_sizes, print_table, size_name

__all__ = ["OPERATIONS", "Footprint", "run", "show"]

#: The operations with promised bounds.
OPERATIONS = "all_reduce broadcast all_gather reduce_scatter all_to_all send_recv".split()


@dataclass(frozen=True)
class Footprint:
    """Memory of the rank that takes most.

    Attributes:
        operation, ranks, nbytes: the call; ``nbytes`` is the size of the larger array of a rank.
        mapped: bytes of shared segments, without arrays of ``comm.empty()``.
        resident: bytes of these segments that this rank has touched.
        transient: bytes by which the memory of the process grew during the call.
    """

    operation: str
    ranks: int
    nbytes: int
    mapped: int
    resident: int
    transient: int


def run(ranks: int, sizes: Sequence[int]) -> list[Footprint]:
    """Measure all operations.

    Raises:
        ArenaError: the ranks did not start, or failed.
    """
    progress = Progress()
    footprints = []
    with Arena([Contestant("shm", ranks)]) as arena:
        for nbytes in sizes:
            for operation in OPERATIONS:
                progress.show(f"memory: {operation}, {size_name(nbytes)}, {ranks} ranks")
                call = {"operation": operation, "nbytes": nbytes, "memory": "ordinary"}
                arena.ask("shm", "prepare", side="shm", **call)
                answers = arena.ask("shm", "memory_of", side="shm")
                arena.ask("shm", "release", side="shm")
                assert not isinstance(answers, str)
                most = {key: max(answer[key] for answer in answers) for key in answers[0]}
                footprints.append(Footprint(operation, ranks, nbytes, **most))
    progress.clear()
    return footprints


def show(footprints: Sequence[Footprint], markdown: bool = False) -> None:
    """Print the table; each cell is for the operation that takes most."""
    sizes = list(dict.fromkeys(f.nbytes for f in footprints))
    columns = {"mapped": "mapped", "in use": "resident", "during a call": "transient"}
    header = ["ranks", *(f"{c}, {size_name(nbytes)}" for c in columns for nbytes in sizes)]
    rows = []
    for ranks in dict.fromkeys(f.ranks for f in footprints):
        cells = [str(ranks)]
        for field in columns.values():
            for nbytes in sizes:
                found = [f for f in footprints if (f.ranks, f.nbytes) == (ranks, nbytes)]
                cells.append(size_name(max(getattr(f, field) for f in found)))
        rows.append(cells)
    print_table("Memory per rank beside the arrays, shm", header, rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the memory that shm takes.")
    parser.add_argument("-n", nargs="+", type=int, default=[2, 4, 8], metavar="N", help="ranks")
    add_sizes(parser, "1M 64M")
    add_outputs(parser)
    options = parser.parse_args(arguments)

    def measure() -> dict[str, Any]:
        return {"memory": [asdict(f) for ranks in options.n for f in run(ranks, options.sizes)]}

    try:
        found = measured(options, measure)
    except ArenaError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 1
    show([Footprint(**fields) for fields in found["memory"]], options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
