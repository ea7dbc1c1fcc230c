"""Compare `hierarchical` with flat Gloo over hosts that are network namespaces.

::

    python benchmarks/hosts.py                        # two hosts with two ranks each, as root
    python benchmarks/hosts.py --hosts 3 --each 2 --sizes 1M 16M --json hosts.json

All contestants are open in the same ranks and take turns, A B C A B C ….
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from overhead import OursRaw

from collective.tools.bench.alternate import in_turns
from collective.tools.bench.libraries import BenchLibrary, Call
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.measure import BACK_TO_BACK, Pace
from collective.tools.bench.prepared import Prepared
from collective.tools.bench.rivals import Gloo
from collective.tools.bench.startline import StartLine
from collective.tools.show import (
    add_outputs,
    add_sizes,
    microseconds,
    print_table,
    size_name,
)

ROOT = Path(__file__).resolve().parent.parent
OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = "4 1K 64K 256K 1M 4M 16M 64M"
_RANKS_S = 3600.0
#: Promised: at least this many times as fast as flat Gloo, from this size on.
FASTER, FROM = 1.5, 1 << 20


@dataclass(frozen=True)
class Figure:
    """Time of an operation of a contestant at a size: the median of its turns, in seconds."""

    operation: str
    nbytes: int
    contestant: str
    seconds: float
    low: float
    high: float


# -- in the ranks -----------------------------------------------------------------------


class Rank:
    """Rank that opens the contestants and measures them in turns."""

    def __init__(self, folder: Path) -> None:
        import torch

        import collective

        torch.set_num_threads(1)
        self.comms = {name: collective.init(name) for name in ("hierarchical", "gloo")}
        self.comm = self.comms["gloo"]
        self.torch = Gloo(folder, self.comm.rank, self.comm.size)
        self._line = StartLine(folder / "startline", self.comm.rank, self.comm.size)

    def calls(self, operation: str, nbytes: int) -> dict[str, Call]:
        """Return the operation for each contestant, each on its own arrays."""
        sides: dict[str, BenchLibrary] = {name: OursRaw(comm) for name, comm in self.comms.items()}
        if operation == "all_reduce":
            sides["torch.distributed"] = self.torch
        return {name: Prepared(side, operation, nbytes).call for name, side in sides.items()}

    def measure(self, call: Call, iterations: int, each: bool) -> float:
        """Return the seconds that a call takes on the slowest rank."""
        times = self._line.seconds_of(call, iterations, each=each)
        slowest = self.comm.all_reduce(np.array(times), op="max")
        return float(np.median(slowest))

    def compare(self, operation: str, nbytes: int, pace: Pace) -> list[Figure]:
        """Measure all contestants at one size."""
        block = partial(self.measure, each=nbytes < BACK_TO_BACK)
        turns = in_turns(block, self.calls(operation, nbytes), pace.rounds, pace.turn)
        return [
            Figure(operation, nbytes, name, statistics.median(all_), min(all_), max(all_))
            for name, all_ in turns.items()
        ]

    def check(self) -> None:
        """Check that the contestants have equal results, on data that is not all zeros."""
        x = np.arange(300_000, dtype=np.float32) % 1000 + self.comm.rank
        first, second = (comm.all_reduce(x) for comm in self.comms.values())
        if not np.array_equal(first, second):
            raise SystemExit("hosts: the contestants' results differ")


def report(folder: Path, figures: Any) -> None:
    """Write the figures to ``folder``, so that :func:`run` returns them."""
    (folder / "figures").write_text(json.dumps(figures))


def work(options: argparse.Namespace) -> None:
    """Run as a rank: measure everything; rank 0 writes the figures."""
    rank = Rank(options.folder)
    figures: list[Figure] = []
    for operation in options.operations:
        for nbytes in options.sizes:
            figures += rank.compare(operation, nbytes, Pace.of(options.quick))
    rank.check()
    if rank.comm.rank == 0:
        report(options.folder, [asdict(figure) for figure in figures])
    for comm in rank.comms.values():
        comm.barrier()
    for comm in rank.comms.values():
        comm.close()


# -- outside ------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make the hosts, start the ranks on them, and return the data for the JSON file."""
    reason = refusal()
    if reason is not None:
        raise SystemExit(f"hosts: {reason}")
    spread = [host for host in range(options.hosts) for _ in range(options.each)]
    command = [str(Path(__file__).resolve()), "--sizes", *map(str, options.sizes)]
    command += ["--operations", *options.operations, *["--quick"] * options.quick, "--work"]
    return {"hosts": options.hosts, "each": options.each, "figures": run(spread, command)}


def _hosts() -> Any:
    """Return the module of the tests that makes hosts."""
    sys.path.insert(0, str(ROOT))
    return importlib.import_module("tests.support.network_hosts")


def refusal() -> str | None:
    """Return the reason why hosts cannot be made here, or None."""
    reason: str | None = _hosts().refusal()
    return reason


def run(spread: Sequence[int], command: Sequence[str]) -> Any:
    """Make hosts, run a Python program as ranks on them, and return the reported figures.

    Args:
        spread: the host of each rank.
        command: the program and its arguments. The folder for :func:`report` is appended; it
            contains a start line.
    """
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        path = Path(folder)
        StartLine.create(path / "startline", len(spread))
        with _hosts().Hosts(max(spread) + 1, path) as hosts:
            words = [sys.executable, *command, folder]
            job = hosts.by_hand(spread, words, GLOO_SOCKET_IFNAME="eth0")
            job.succeed(_RANKS_S)
        return json.loads((path / "figures").read_text())


def show(run: dict[str, Any], markdown: bool) -> None:
    """Print the figures of a run, and whether the promise is kept."""
    figures = [Figure(**each) for each in run["figures"]]
    print(f"{headline(run['machine'])}; {run['hosts']} hosts × {run['each']} ranks\n")
    worst: tuple[float, str] | None = None
    for operation in dict.fromkeys(figure.operation for figure in figures):
        rows = []
        mine = [figure for figure in figures if figure.operation == operation]
        names = list(dict.fromkeys(figure.contestant for figure in mine))
        for nbytes in dict.fromkeys(figure.nbytes for figure in mine):
            by = {f.contestant: f.seconds for f in mine if f.nbytes == nbytes}
            ratios = [by[name] / by["hierarchical"] for name in names[1:]]
            cells = [microseconds(by[name]) for name in names]
            rows.append([size_name(nbytes), *cells, *(f"{ratio:.2f}" for ratio in ratios)])
            if operation == "all_reduce" and nbytes >= FROM:
                here = ratios[0], size_name(nbytes)
                worst = here if worst is None else min(worst, here)
        header = ["size", *(f"{name} µs" for name in names), *(f"× {n}" for n in names[1:])]
        print_table(operation, header, rows, markdown)
    if worst is not None:
        kept = "kept" if worst[0] >= FASTER else "not kept"
        print(
            f"promised: all_reduce {FASTER} × faster than flat gloo from {size_name(FROM)}; "
            f"measured: {worst[0]:.2f} × at {worst[1]}: {kept}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Compare hierarchical with flat Gloo.")
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts (default: 2)")
    parser.add_argument("--each", type=int, default=2, metavar="N", help="ranks on each host")
    add_sizes(parser, SIZES)
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=["all_reduce"])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns")
    add_outputs(parser)
    parser.add_argument("--work", dest="folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.folder is not None:
        work(options)
        return 0
    show(measured(options, lambda: measure(options)), options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
