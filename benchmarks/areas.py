"""How long areas and rings of ``shm`` should be: ``python benchmarks/areas.py``.

Ranks of one host make communicators whose areas, and then whose rings, are of several lengths, and
make the same calls on all of them in turns of a few milliseconds: all-reduces and broadcasts of
ordinary memory go through areas, messages (half a round trip) through rings. What is told is the
fastest turn of each length, of the slowest rank, in microseconds; ``--json`` has all turns. Areas
of 64 KiB take long calls from 16 KiB on, since a quarter of an area is the least.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from native import seconds_of

from collective import native
from collective.backends.shm import compiled, layout
from collective.communicator import Communicator
from collective.testing import run_ranks
from collective.tools.bench.machine import headline, measured
from collective.tools.show import add_outputs, add_sizes, microseconds, print_table, size_name

_LONG_CALL = 24 << 10
_AREAS = "64K 128K 256K 512K 1M 2M 4M"
_RINGS = "64K 256K 512K 1M 2M 4M 8M"
_SIZES = "4K 16K 64K 256K 1M 4M"
_CALLS = {"areas": ("all_reduce", "broadcast"), "rings": ("send_recv",)}


def _with_areas(comm: Communicator, nbytes: int) -> Communicator:
    """Return a communicator of the same ranks whose areas are of ``nbytes``."""
    lengths: dict[str, Any] = dict.fromkeys(("_AREA_BYTES", "_LEAST_AREA_BYTES"), nbytes)
    lengths["_AREAS_BYTES"] = sys.maxsize
    with (
        mock.patch.multiple(layout, **lengths),
        mock.patch.object(compiled, "_LEAST_LONG", min(_LONG_CALL, nbytes // 4)),
    ):
        return comm.dup()


def _with_rings(comm: Communicator, nbytes: int) -> Communicator:
    """Return a communicator of the same ranks whose rings are of ``nbytes``."""
    with mock.patch.multiple(layout, _RING_BYTES=nbytes, _RINGS_BYTES=sys.maxsize):
        return comm.dup()


def measure(
    comm: Communicator, lengths: dict[str, list[int]], sizes: Sequence[int], turns: int
) -> list[dict[str, Any]]:
    """Return seconds a call, of each turn, by the length of what it goes through."""
    found = []
    for what, make in (("areas", _with_areas), ("rings", _with_rings)):
        sides = {str(nbytes): make(comm, nbytes) for nbytes in lengths[what]}
        for operation in _CALLS[what]:
            for nbytes in sizes:
                seconds = seconds_of(comm, sides, operation, nbytes, turns)
                found.append({"what": what, "operation": operation, "nbytes": nbytes,
                              "seconds": seconds})  # fmt: skip
        for side in sides.values():
            side.close()
    return found


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print a table of areas and one of rings."""
    print(f"{headline(run['machine'])}; {run['ranks']} ranks\n")
    for what in _CALLS:
        calls = [each for each in run["calls"] if each["what"] == what]
        lengths = [size_name(int(name)) for name in calls[0]["seconds"]]
        rows = [
            [each["operation"], size_name(each["nbytes"]),
             *(microseconds(min(seconds)) for seconds in each["seconds"].values())]
            for each in calls
        ]  # fmt: skip
        print_table(f"{what} of so many bytes; µs", ["", "size", *lengths], rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="How long areas and rings of shm should be.")
    parser.add_argument("-n", type=int, default=2, help="ranks")
    for name, default in (("areas", _AREAS), ("rings", _RINGS), ("sizes", _SIZES)):
        add_sizes(parser, default, f"--{name}")
    parser.add_argument("--quick", action="store_true", help="three turns each, not twenty")
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)
    if native.chosen.extension is None:
        raise SystemExit(f"areas: the native core is {native.status()}; only it has areas")
    if options.n < 2:
        parser.error("-n: of one rank nothing goes through areas; 2 at least")
    for nbytes in (*options.areas, *options.rings):
        if nbytes % 4096 or not nbytes:
            parser.error(f"{size_name(nbytes)}: areas and rings are of whole pages, of 4 KiB each")

    def measure_ranks() -> dict[str, Any]:
        lengths = {"areas": options.areas, "rings": options.rings}
        found, *_ = run_ranks(
            options.n, measure, lengths, options.sizes, 3 if options.quick else 20,
            backend="shm", timeout=600.0,
        )  # fmt: skip
        return {"calls": found, "ranks": options.n}

    show(measured(options, measure_ranks), options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
