"""Measurement of all promised figures, with a verdict on each promise.

::

    python benchmarks/targets.py                     # about ten minutes
    python benchmarks/targets.py --quick             # about two
    python benchmarks/targets.py --from run.json     # print an earlier run's tables
    python benchmarks/targets.py --reach             # the targets of reach.py

If a bound applies to several sizes, the worst of them counts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

import memory
import reach
import sittings
import waiting
from memory import OPERATIONS
from promises import judge
from sittings import Sittings

from collective.tools.bench.arena import Arena
from collective.tools.bench.figures import show as show_figures
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.measure import Pace, Task
from collective.tools.bench.run import Results
from collective.tools.show import parse_size, print_table

_ALL_REDUCE = "4 64 1K 64K 256K 1M 16M 64M"
_OTHERS = "64K 256K 1M 16M 64M"
_CROWDED = "4 1K 64K 256K 1M 16M 64M"
_ALL_REDUCE_QUICK = "4 1K 64K 1M 16M"
_OTHERS_QUICK = "64K 1M 16M"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements and return the data for the JSON file, including failures."""
    quick, pace, session = options.quick, Pace.of(options.quick), Sittings(options)
    waits: list[waiting.Wait] = []
    footprints: list[memory.Footprint] = []

    def waits_of(arena: Arena) -> None:
        waits.extend(waiting.run(arena, 1.0, Pace(1 if quick else 3, 0.0)))

    tasks = _tasks(["all_reduce"], _ALL_REDUCE_QUICK if quick else _ALL_REDUCE)
    tasks += _tasks(OPERATIONS[1:], _OTHERS_QUICK if quick else _OTHERS)
    session.sit(2, tasks, pace, then=waits_of)
    session.sit(4, _tasks(["all_reduce"], _ALL_REDUCE_QUICK if quick else _CROWDED), pace)
    with session.noting_failures():
        for ranks in (2, 4, 8):
            footprints.extend(memory.run(ranks, _sizes("1M 16M" if quick else "1M 64M")))
    return {
        **session.as_json(),
        "waiting": [asdict(wait) for wait in waits],
        "memory": [asdict(footprint) for footprint in footprints],
    }


def _tasks(operations: Sequence[str], sizes: str) -> list[Task]:
    return [Task(operation, nbytes) for operation in operations for nbytes in _sizes(sizes)]


def _sizes(text: str) -> list[int]:
    return [parse_size(size) for size in text.split()]


def show(run: dict[str, Any], details: bool, markdown: bool) -> None:
    """Print a run: its figures if ``details``, then each promise with its verdict."""
    if "added" in run:
        reach.show(run, details, markdown)
    else:
        _show_promises(run, details, markdown)
    sittings.show_contestants(run, markdown)


def _show_promises(run: dict[str, Any], details: bool, markdown: bool) -> None:
    results = Results.from_json(run)
    waits = [waiting.Wait(**fields) for fields in run["waiting"]]
    footprints = [memory.Footprint(**fields) for fields in run["memory"]]
    if details:
        show_figures(results.records, results.gaps, markdown)
        waiting.show(waits, markdown)
        memory.show(footprints, markdown)
    print_table(
        headline(run["machine"]),
        ["promise", "must", "aim", "measured", "verdict"],
        [[*astuple(judged)] for judged in judge(results.records, waits, footprints)],
        markdown,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure all promised figures.")
    sittings.add_options(parser)
    parser.add_argument("--reach", action="store_true", help="measure the targets to reach instead")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=reach.ROWS,
        metavar="ROW",
        help="only these of the targets to reach: %(choices)s",
    )
    parser.add_argument("--brief", action="store_true", help="print the promises only")
    options = parser.parse_args(arguments)
    chosen = reach.measure if options.reach or options.rows else measure
    run = measured(options, lambda: chosen(options))
    show(run, not options.brief, options.markdown)
    return sittings.exit_code("targets", run)


if __name__ == "__main__":
    sys.exit(main())
