"""Measurement of the cost of a secret at the start: ``python benchmarks/connect.py --ranks 4``.

Ranks of this machine connect over Gloo, each as if it were alone on its host. They meet in the
store that rank 0 serves, in turns without a secret and with one. The time of a turn is that of
``collective.init`` on the slowest rank. The verdict is about the difference between two consecutive
turns: its median over all pairs must be below 5 ms, within twice its standard error.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import collective
from collective.launch.process_starter import ProcessStarter
from collective.launch.ranks import FunctionJob, Participant, Ranks
from collective.platform import held_port
from collective.tools.bench.machine import measured
from collective.tools.bench.startline import StartLine
from collective.tools.show import add_outputs, print_table

_MUST_S = 0.005
_SIDES = ("without", "with")


# -- in the ranks -------------------------------------------------------------------------------


def connect(
    participant: Participant, folder: Path, ranks: int, pairs: int, ports: Sequence[int]
) -> dict[str, list[float]]:
    """Run as a rank: connect in turns, and return the seconds of each side."""
    line = StartLine(folder / "startline", participant.rank, ranks)
    turns: dict[str, list[float]] = {side: [] for side in _SIDES}
    for pair in range(pairs + 1):
        # The order alternates, so that no side always comes second. The first pair does not count,
        # since it starts the stores.
        for number in (0, 1) if pair % 2 else (1, 0):
            side = _SIDES[number]
            secret: dict[str, Any] = {"secret": "of this benchmark alone"} if side == "with" else {}
            line.wait()
            start = time.perf_counter()
            comm = collective.init(
                "gloo", rank=participant.rank, size=ranks, local_rank=0, local_size=1,
                interface="lo", store=f"tcp://127.0.0.1:{ports[number]}", insecure="on", **secret,
            )  # fmt: skip
            took = time.perf_counter() - start
            slowest = float(comm.all_reduce(np.array([took]), op="max")[0])
            comm.close()
            if pair:
                turns[side].append(slowest)
    return turns


# -- outside ------------------------------------------------------------------------------------


def measure(ranks: int, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, by side.

    Raises:
        RanksFailedError: a rank has failed.
    """
    for name in [name for name in os.environ if name.startswith("COLLECTIVE_")]:
        del os.environ[name]  # this command may itself run under a launcher
    os.environ["OMP_NUM_THREADS"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="connect-") as folder,
        held_port() as plain,
        held_port() as proven,
        Ranks(ranks, ProcessStarter()) as started,
    ):
        StartLine.create(Path(folder) / "startline", ranks)
        job = FunctionJob(connect, (Path(folder), ranks, pairs, (plain, proven)))
        turns: dict[str, list[float]] = started.results(job, 1800.0)[0]
    return turns


def show(turns: dict[str, list[float]], title: str, markdown: bool) -> None:
    """Print the figures, and whether the promise is kept, if the noise is small enough to tell."""
    more = [after - before for before, after in zip(*(turns[side] for side in _SIDES))]
    low, middle, high = statistics.quantiles(more, n=4)
    # The standard error of the median of a normal distribution is 1.253 standard deviations / √n.
    # The distance of its quartiles is 1.349 standard deviations.
    error = 1.253 * (high - low) / 1.349 / math.sqrt(len(more))
    verdict = "too noisy to tell"
    if abs(middle - _MUST_S) > 2 * error:
        verdict = "kept" if middle <= _MUST_S else "missed"
    rows = [
        [f"{side} a secret", f"{statistics.median(turns[side]) * 1e3:.1f}",
         f"{statistics.quantiles(turns[side], n=10)[0] * 1e3:.1f}", ""]
        for side in _SIDES
    ]  # fmt: skip
    rows.append(["the difference", f"{middle * 1e3:.1f} ± {2e3 * error:.1f}", "", verdict])
    print_table(title, ["connecting", "median ms", "quickest tenth", "5 ms"], rows, markdown)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the cost of a secret when ranks connect.")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--pairs", type=int, default=40, metavar="N", help="default: 40")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    run = measured(
        options,
        lambda: {"ranks": options.ranks, "turns": measure(options.ranks, options.pairs)},
    )
    about = run["machine"]
    title = f"{options.ranks} ranks, {about['cores']} cores, of which {about['others']:.1f} taken "
    show(run["turns"], f"{title}by others, {options.pairs} pairs", options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
