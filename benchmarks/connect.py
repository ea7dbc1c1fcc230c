"""What a secret costs when ranks connect: ``python benchmarks/connect.py --ranks 4``.

Ranks of this machine, each as if it were alone on its host, connect over Gloo in turns: without a
secret, at torch's store, and with one, at the store that rank 0 serves. A turn takes as long as its
slowest rank's ``collective.init``. What is judged is the median over pairs of turns, one behind
the other, of the difference, with twice its standard error; it has to stay below 5 ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import collective
from collective.tools.bench.machine import Observer
from collective.tools.bench.startline import StartLine
from collective.tools.show import add_outputs, print_table, write

_MUST_S = 0.005
_SIDES = ("without", "with")


# -- in the ranks -------------------------------------------------------------------------------


def work(folder: Path, rank: int, ranks: int, pairs: int, ports: Sequence[int]) -> None:
    """Be a rank: connect in turns; rank 0 writes the seconds of each side."""
    line = StartLine(folder / "startline", rank, ranks)
    turns: dict[str, list[float]] = {side: [] for side in _SIDES}
    for pair in range(pairs + 1):
        # Neither is always the second, and the first pair is not counted: it starts the stores.
        for number in (0, 1) if pair % 2 else (1, 0):
            side = _SIDES[number]
            secret = {"secret": "of this benchmark alone"} if side == "with" else {}
            line.wait()
            start = time.perf_counter()
            comm = collective.init(
                "gloo", rank=rank, size=ranks, local_rank=0, local_size=1, interface="lo",
                store=f"tcp://127.0.0.1:{ports[number]}", insecure="on", **secret,
            )  # fmt: skip
            took = time.perf_counter() - start
            slowest = float(comm.all_reduce(np.array([took]), op="max")[0])
            comm.close()
            if pair:
                turns[side].append(slowest)
    if rank == 0:
        (folder / "turns").write_text(json.dumps(turns))


# -- outside ------------------------------------------------------------------------------------


def _free_ports() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
        return [str(each.getsockname()[1]) for each in (one, other)]


def measure(ranks: int, pairs: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, by side."""
    with tempfile.TemporaryDirectory(prefix="connect-") as folder:
        StartLine.create(Path(folder) / "startline", ranks)
        command = [sys.executable, str(Path(__file__).resolve()), "--ranks", str(ranks)]
        command += ["--pairs", str(pairs), "--work", folder, *_free_ports()]
        # Who starts the command may be of a launch.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("COLLECTIVE_")}
        kept["OMP_NUM_THREADS"] = "1"
        started = [
            subprocess.Popen([*command, "--rank", str(rank)], env=kept) for rank in range(ranks)
        ]
        try:
            if any(process.wait() for process in started):
                raise SystemExit("connect: a rank has failed")
        finally:
            for process in started:
                process.kill()
        turns: dict[str, list[float]] = json.loads((Path(folder) / "turns").read_text())
    return turns


def show(turns: dict[str, list[float]], title: str, markdown: bool) -> None:
    """Print the figures, and whether the promise is kept as far as the noise lets it be seen."""
    more = [after - before for before, after in zip(*(turns[side] for side in _SIDES))]
    low, middle, high = statistics.quantiles(more, n=4)
    # The standard error of a median, of what is distributed normally: 1.253 standard deviations
    # / √n, of which 1.349 are the quartiles' distance.
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
    parser = argparse.ArgumentParser(description="What a secret costs when ranks connect.")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--pairs", type=int, default=40, metavar="N", help="default: 40")
    add_outputs(parser)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.work is not None:
        folder, *ports = options.work
        work(Path(folder), options.rank, options.ranks, options.pairs, [int(p) for p in ports])
        return 0
    observer = Observer()
    turns = measure(options.ranks, options.pairs)
    about = observer.machine()
    write(options.json, {"machine": about, "ranks": options.ranks, "turns": turns})
    title = f"{options.ranks} ranks, {about['cores']} cores, of which {about['others']:.1f} taken "
    show(turns, f"{title}by others, {options.pairs} pairs", options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
