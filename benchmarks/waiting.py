"""Measurement of the cost of waiting for a late peer.

The first table shows the processor time of a rank whose peer is a second late. The second table is
for ``shm`` and a peer that is a tenth of a second late. It shows the time from the call of the late
peer to the end of the call of the rank that has waited.

::

    python benchmarks/waiting.py
    python benchmarks/waiting.py --late 5 -n 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import peers

from collective.communicator import Communicator
from collective.testing import run_ranks
from collective.tools.bench.arena import Arena, ArenaError
from collective.tools.bench.contestants import named
from collective.tools.bench.machine import measured
from collective.tools.bench.measure import Pace
from collective.tools.show import Progress, add_outputs, print_table

__all__ = ["Wait", "run", "show"]

_OPERATIONS = ("all_reduce", "send_recv")
_NBYTES = 4096
_LATE_S = 0.1


@dataclass(frozen=True)
class Wait:
    """Waits of a contestant.

    Attributes:
        contestant, operation, ranks: the contestant, the call in which it waits, and the number
            of ranks.
        late: seconds by which rank 1 is late.
        cores: processor time per second of waiting, of the rank that spent most; the median of
            several waits.
        low, high: the lowest and the highest value of ``cores`` in these waits.
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
            shares = [_wait(arena, contestant.name, late) for _ in range(pace.rounds)]
            arena.ask(contestant.name, "release", side="waits")
            figures = statistics.median_high(shares), min(shares), max(shares)
            waits.append(Wait(contestant.name, operation, contestant.ranks, late, *figures))
    progress.clear()
    return waits


def _wait(arena: Arena, name: str, late: float) -> float:
    answers = arena.ask(name, "wait_for_late", side="waits", late=late)
    assert not isinstance(answers, str)
    shares: list[float] = [answer["cpu"] / answer["wall"] for answer in answers if answer]
    return max(shares)


def woken(turns: int) -> dict[str, list[float]]:
    """Return the seconds from a late peer's call to the end of the call of the waiting rank."""
    waited, late = run_ranks(2, _moments, turns, backend="shm")
    return {name: [end - start for end, start in zip(waited[name], late[name], strict=True)]
            for name in waited}  # fmt: skip


def _moments(comm: Communicator, turns: int) -> dict[str, list[float]]:
    """Return when rank 1, which is late, began its calls, or when rank 0 completed them."""
    x = np.zeros(_NBYTES // 4, np.float32)
    times: dict[str, list[float]] = {name: [] for name in _OPERATIONS}
    for name, moments in times.items():
        for _ in range(turns):
            comm.barrier()
            if comm.rank == 1:
                time.sleep(_LATE_S)
                moments.append(time.monotonic())
            if name == "all_reduce":
                comm.all_reduce(x, out=x)
            elif comm.rank == 1:
                comm.send(x, 0)
            else:
                comm.recv(x, 1)
            if comm.rank == 0:
                moments.append(time.monotonic())
    return times


def show_woken(found: dict[str, list[float]], markdown: bool = False) -> None:
    """Print the table of :func:`woken`."""
    rows = [
        [name, *(f"{1e6 * figure(seconds):.0f}" for figure in (statistics.median, min, max))]
        for name, seconds in found.items()
    ]
    title = f"shm: µs from a call that is {_LATE_S:g} s late to the end of that which waited"
    print_table(title, ["in", "median", "least", "most"], rows, markdown)


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
    parser.add_argument("--quick", action="store_true", help="one wait for each row")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    if options.n < 2:
        parser.error("-n: one rank is late and another one waits: give at least 2")
    names = ["shm", "threads", *peers.rivals(options)]
    able, missing = named(names, peers.environments(options), options.n)

    def measure() -> dict[str, Any]:
        with Arena(able) as arena:
            missing.update({name: error.brief for name, error in arena.failed.items()})
            waits = run(arena, options.late, Pace(1 if options.quick else 3, 0.0))
        through = woken(3 if options.quick else 30)
        return {"waiting": [asdict(wait) for wait in waits], "woken": through}

    try:
        found = measured(options, measure)
    except ArenaError as error:
        print(f"waiting: {error}", file=sys.stderr)
        return 1
    show([Wait(**fields) for fields in found["waiting"]], options.markdown)
    show_woken(found["woken"], options.markdown)
    for name, reason in missing.items():
        print(f"{name}: not measured: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
