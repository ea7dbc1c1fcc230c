"""What waiting costs: processor time of a rank whose peer is a second late.

::

    python benchmarks/waiting.py
    python benchmarks/waiting.py --late 5 -n 4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import peers

from collective.tools.bench.arena import Arena, ArenaError
from collective.tools.bench.contestants import named
from collective.tools.bench.machine import Observer
from collective.tools.bench.measure import Pace
from collective.tools.show import Progress, print_table, write

__all__ = ["Wait", "run", "show"]

_OPERATIONS = ("all_reduce", "send_recv")
_NBYTES = 4096


@dataclass(frozen=True)
class Wait:
    """One contestant's waits.

    Attributes:
        contestant, operation, ranks: who waits in what.
        late: seconds that rank 1 comes late.
        cores: processor time of the rank that spent most, a second of waiting; the
            median of several waits.
        low, high: the cheapest and the dearest wait.
    """

    contestant: str
    operation: str
    ranks: int
    late: float
    cores: float
    low: float
    high: float


def run(arena: Arena, late: float, pace: Pace) -> list[Wait]:
    """Measure all contestants."""
    progress = Progress()
    waits = []
    for contestant in arena.contestants:
        if contestant.name == "memcpy":
            continue
        for operation in _OPERATIONS:
            progress.show(f"{contestant.name} waits in {operation}")
            prepared = {"operation": operation, "nbytes": _NBYTES, "memory": "ordinary"}
            arena.ask(contestant.name, "prepare", side="waits", **prepared)
            shares = sorted(_wait(arena, contestant.name, late) for _ in range(pace.rounds))
            arena.ask(contestant.name, "release", side="waits")
            middle = shares[len(shares) // 2]
            waits.append(
                Wait(
                    contestant.name,
                    operation,
                    contestant.ranks,
                    late,
                    middle,
                    shares[0],
                    shares[-1],
                )
            )
    progress.clear()
    return waits


def _wait(arena: Arena, name: str, late: float) -> float:
    answers = arena.ask(name, "wait_for_late", side="waits", late=late)
    assert not isinstance(answers, str)
    shares: list[float] = [answer["cpu"] / answer["wall"] for answer in answers if answer]
    return max(shares)


def show(waits: Sequence[Wait], markdown: bool = False) -> None:
    """Print the table."""
    rows = [
        [
            wait.contestant,
            wait.operation,
            str(wait.ranks),
            *(f"{100 * share:.1f}" for share in (wait.cores, wait.low, wait.high)),
        ]
        for wait in waits
    ]
    late = waits[0].late if waits else 0.0
    title = f"Waiting {late:g} s for a late peer, % of a core"
    header = ["contestant", "in", "ranks", "median", "least", "most"]
    print_table(title, header, rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure what waiting costs.")
    parser.add_argument("--late", type=float, default=1.0, metavar="S", help="seconds (default: 1)")
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks (default: 2)")
    peers.add_rivals(parser)
    parser.add_argument("--quick", action="store_true", help="one wait of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args(arguments)
    if options.n < 2:
        parser.error("-n: somebody has to be late, and somebody to wait: 2 at least")
    found = peers.environments(options)
    names = ["shm", "threads", *peers.rivals(options)]
    able, missing = named(names, found, options.n)
    observer = Observer()
    try:
        with Arena(able) as arena:
            missing |= {name: error.brief for name, error in arena.failed.items()}
            waits = run(arena, options.late, Pace(1 if options.quick else 3, 0.0))
    except ArenaError as error:
        print(f"waiting: {error}", file=sys.stderr)
        return 1
    show(waits)
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    write(
        options.json, {"machine": observer.machine(), "waiting": [asdict(wait) for wait in waits]}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
