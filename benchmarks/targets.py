"""Measure everything that was promised, and say what is kept.

::

    python benchmarks/targets.py                     # about ten minutes
    python benchmarks/targets.py --quick             # about two
    python benchmarks/targets.py --from run.json     # print an earlier run's tables
    python benchmarks/targets.py --reach             # what is to be reached, of reach.py

A bound that several sizes fall under is held against the worst of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import memory
import peers
import reach
import waiting
from promises import OPERATIONS, judge

from collective.tools.bench.arena import Arena, ArenaError
from collective.tools.bench.contestants import named
from collective.tools.bench.figures import headline
from collective.tools.bench.figures import show as show_figures
from collective.tools.bench.machine import Observer
from collective.tools.bench.measure import Pace, Task, compare, method_of
from collective.tools.bench.run import Results
from collective.tools.show import Progress, add_outputs, parse_size, print_table, size_name, write

_ALL_REDUCE = "4 64 1K 64K 256K 1M 16M 64M"
_OTHERS = "64K 256K 1M 16M 64M"
_CROWDED = "4 1K 64K 256K 1M 16M 64M"
_ALL_REDUCE_QUICK = "4 1K 64K 1M 16M"
_OTHERS_QUICK = "64K 1M 16M"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements and return what is written as JSON, with what failed."""
    found, names = peers.environments(options), ["shm", *peers.rivals(options)]
    quick = options.quick
    results, observer = Results(), Observer()
    waits: list[waiting.Wait] = []
    footprints: list[memory.Footprint] = []
    missing: dict[str, str] = {}

    def two_ranks() -> None:
        able, absent = named(names, found, 2)
        missing.update(absent)
        with Arena(able) as arena:
            sizes = _sizes(_ALL_REDUCE_QUICK if quick else _ALL_REDUCE)
            _compare(arena, ["all_reduce"], sizes, quick, results)
            sizes = _sizes(_OTHERS_QUICK if quick else _OTHERS)
            _compare(arena, OPERATIONS[1:], sizes, quick, results)
            waits.extend(waiting.run(arena, 1.0, Pace(1 if quick else 3, 0.0)))
            missing.update({name: error.brief for name, error in arena.failed.items()})

    def four_ranks() -> None:
        with Arena(named(names, found, 4)[0]) as arena:
            sizes = _sizes(_ALL_REDUCE_QUICK if quick else _CROWDED)
            _compare(arena, ["all_reduce"], sizes, quick, results)

    def mapped() -> None:
        sizes = _sizes("1M 16M" if quick else "1M 64M")
        for ranks in (2, 4, 8):
            footprints.extend(memory.run(ranks, sizes))

    failures = []
    for part in (two_ranks, four_ranks, mapped):
        try:
            part()
        except ArenaError as error:  # what was measured before counts all the same
            failures.append(str(error))
    results.machine = observer.machine()
    return {
        **results.as_json(),
        "missing": missing,
        "failures": [*failures, *results.failures],
        "waiting": [asdict(wait) for wait in waits],
        "memory": [asdict(footprint) for footprint in footprints],
    }


def _compare(
    arena: Arena, operations: Sequence[str], sizes: Sequence[int], quick: bool, results: Results
) -> None:
    """Measure each size by the method that tells more of it."""
    progress = Progress()
    results.versions.update(arena.versions)
    for operation in operations:
        for nbytes in sizes:
            task = Task(operation, nbytes)
            progress.show(f"{operation}, {size_name(nbytes)}")
            results.add(compare(arena, task, Pace.of(quick), [method_of(nbytes)]))
    progress.clear()


def _sizes(text: str) -> list[int]:
    return [parse_size(size) for size in text.split()]


def show(run: dict[str, Any], details: bool, markdown: bool) -> None:
    """Print a run: its figures if ``details``, then each promise and what became of it."""
    if "added" in run:
        reach.show(run, details, markdown)
    else:
        _show_promises(run, details, markdown)
    bullet = "- " if markdown else ""
    for name, version in run["versions"].items():
        print(f"{bullet}{name}: {version}")
    for name, reason in run["missing"].items():
        print(f"{bullet}{name}: not measured: {reason}")


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
        [
            [judged.what, judged.must, judged.aim, judged.measured, judged.verdict]
            for judged in judge(results.records, waits, footprints)
        ],
        markdown,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure everything that was promised.")
    peers.add_rivals(parser)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    add_outputs(parser, earlier=True)
    parser.add_argument(
        "--cores", type=int, default=2, metavar="N", help="cores to use (default: 2)"
    )
    parser.add_argument("--reach", action="store_true", help="what is to be reached, instead")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=reach.ROWS,
        metavar="ROW",
        help="only these of what is to be reached: %(choices)s",
    )
    parser.add_argument("--brief", action="store_true", help="print the promises only")
    options = parser.parse_args(arguments)
    if options.earlier is not None:
        show(json.loads(options.earlier.read_text()), not options.brief, options.markdown)
        return 0
    # Inherited by all ranks.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    run = reach.measure(options) if options.reach or options.rows else measure(options)
    write(options.json, run)
    show(run, not options.brief, options.markdown)
    for failure in run["failures"]:
        print(f"targets: {failure}", file=sys.stderr)
    return 1 if run["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
