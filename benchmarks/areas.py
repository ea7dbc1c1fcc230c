"""Measurement of the best lengths of areas and rings of ``shm``: ``python benchmarks/areas.py``.

The ranks of one host make communicators with areas, and then with rings, of several lengths. They
make the same calls on all of these communicators, in turns of a few milliseconds. All-reduces and
broadcasts of ordinary memory go through areas; messages, of which half a round trip is measured,
go through rings. The tables show the fastest turn of each length, of the slowest rank, in
microseconds; ``--json`` has all turns. With areas of 64 KiB, long calls begin at 16 KiB, since
they need at least a quarter of an area.
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
    """Return a communicator of the same ranks with areas of ``nbytes``."""
    lengths: dict[str, Any] = dict.fromkeys(("_AREA_BYTES", "_LEAST_AREA_BYTES"), nbytes)
    lengths["_AREAS_BYTES"] = sys.maxsize
    with (
        mock.patch.multiple(layout, **lengths),
        mock.patch.object(compiled, "_LEAST_LONG", min(_LONG_CALL, nbytes // 4)),
    ):
        return comm.dup()


def _with_rings(comm: Communicator, nbytes: int) -> Communicator:
    """Return a communicator of the same ranks with rings of ``nbytes``."""
    with mock.patch.multiple(layout, _RING_BYTES=nbytes, _RINGS_BYTES=sys.maxsize):
        return comm.dup()


def measure(
    comm: Communicator, lengths: dict[str, list[int]], sizes: Sequence[int], turns: int
) -> list[dict[str, Any]]:
    """Return the seconds per call in each turn, by the length of the areas or rings."""
    records = []
    for what, make in (("areas", _with_areas), ("rings", _with_rings)):
        sides = {str(nbytes): make(comm, nbytes) for nbytes in lengths[what]}
        for operation in _CALLS[what]:
            for nbytes in sizes:
                seconds = seconds_of(comm, sides, operation, nbytes, turns)
                records.append({"what": what, "operation": operation, "nbytes": nbytes,
                                "seconds": seconds})  # fmt: skip
        for side in sides.values():
            side.close()
    return records


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print a table of areas and one of rings."""
    print(f"{headline(run['machine'])}; {run['ranks']} ranks\n")
    for what in _CALLS:
        calls = [call for call in run["calls"] if call["what"] == what]
        lengths = [size_name(int(name)) for name in calls[0]["seconds"]]
        rows = [
            [call["operation"], size_name(call["nbytes"]),
             *(microseconds(min(seconds)) for seconds in call["seconds"].values())]
            for call in calls
        ]  # fmt: skip
        print_table(f"{what} by length; µs", ["", "size", *lengths], rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description="Measure the best lengths of shm's areas and rings."
    )
    parser.add_argument("-n", type=int, default=2, help="ranks")
    for name, default in (("areas", _AREAS), ("rings", _RINGS), ("sizes", _SIZES)):
        add_sizes(parser, default, f"--{name}")
    parser.add_argument("--quick", action="store_true", help="three turns each, not twenty")
    add_outputs(parser, earlier=True)
    options = parser.parse_args(arguments)
    if native.chosen.extension is None:
        raise SystemExit(f"areas: the native core is {native.status()}; only it has areas")
    if options.n < 2:
        parser.error("-n: a single rank does not use areas; give at least 2 ranks")
    for nbytes in (*options.areas, *options.rings):
        if nbytes % 4096 or not nbytes:
            parser.error(
                f"{size_name(nbytes)}: the length of areas and rings must be a multiple of 4 KiB"
            )

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
