"""Targets to reach: each operation against the fastest MPI, by size, and the added times of calls.

::

    python benchmarks/targets.py                           # about half an hour
    python benchmarks/targets.py --quick                   # about six minutes
    python benchmarks/targets.py --rows gather ddp         # only these rows
    python benchmarks/targets.py --from run.json           # print an earlier run's tables

The rival at a size is the MPI library that is the fastest there. The ratio of a size is the median
of the ratios of neighbouring turns, ours and the rival's. If a bound applies to several sizes, the
worst of them counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import overhead
import peers
import sittings
from promises import KIB, MIB, Bound, Judged, fastest, hold
from sittings import Sittings
from turns import median_ratio

from collective.errors import CollectiveError
from collective.launch.outcome import RanksFailedError
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.measure import Pace, Record, Task
from collective.tools.bench.run import Results
from collective.tools.show import Progress, microseconds, parse_size, print_table, size_name

__all__ = ["ROWS", "Ratio", "judge", "measure", "show"]

_OTHERS = "send_recv sendrecv broadcast all_gather reduce_scatter all_to_all".split()
_OTHERS += "gather scatter reduce barrier".split()
_ADDED = ("mpi", "nccl", "ddp", "chainer")
#: The rows to choose from: operations, all-reduces of 16-bit numbers, added times, and steps.
ROWS = ("all_reduce", *_OTHERS, "16-bit", *_ADDED)
_FAILURES = (ImportError, OSError, RuntimeError, RanksFailedError, CollectiveError)
_HERE = Path(__file__).resolve().parent
_HALVES = ("bfloat16", "float16")
_MOST = 1 << 62


@dataclass(frozen=True)
class _Sitting:
    """Measurements with one set of ranks.

    Attributes:
        ranks: number of ranks.
        row: the row to measure; ``"others"`` stands for all operations except all_reduce.
        sizes, quick: sizes in the notation of ``--sizes``, and those for quick runs.
        dtypes, memories, framework: dtypes, kinds of memory and framework of the arrays.
        gloo: whether torch.distributed takes part.
    """

    ranks: int
    row: str
    sizes: str
    quick: str
    dtypes: tuple[str, ...] = ("float32",)
    memories: tuple[str, ...] = ("ordinary",)
    framework: str = "numpy"
    gloo: bool = False

    def tasks(self, rows: Sequence[str], quick: bool) -> Iterator[Task]:
        own_rows = _OTHERS if self.row == "others" else [self.row]
        for row in own_rows:
            if row in rows:
                sizes = [] if row == "barrier" else (self.quick if quick else self.sizes).split()
                operation = "all_reduce" if row == "16-bit" else row
                for size in map(parse_size, sizes):
                    yield from (Task(operation, size, dtype) for dtype in self.dtypes)
                if not sizes:
                    yield Task(operation, 0)


_EVERY, _SOME = "4 64 1K 16K 64K 256K 1M 4M 16M 64M", "4 16K 1M 16M"
_SITTINGS = (
    _Sitting(2, "all_reduce", _EVERY, "4 1K 16K 64K 1M 4M 64M", memories=("symmetric", "ordinary")),
    _Sitting(2, "others", _EVERY, _SOME),
    _Sitting(
        2, "16-bit", "10K 64K 256K 1M 4M 32M", "10K 1M 32M", dtypes=("float32", *_HALVES),
        framework="torch", gloo=True,
    ),
    _Sitting(4, "all_reduce", _EVERY, _SOME),
    _Sitting(4, "others", "4 1K 16K 256K 1M 16M 64M", "4 64K 4M"),
)  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ``options.rows``; return the data for the JSON file."""
    rows = options.rows
    session, progress = Sittings(options), Progress()
    pace = Pace(5, 0.03) if options.quick else Pace.of(False)
    for sitting in _SITTINGS:
        tasks = list(sitting.tasks(rows, options.quick))
        if tasks:
            session.sit(
                sitting.ranks, tasks, pace, memories=sitting.memories, framework=sitting.framework,
                without=["torch"] * (not sitting.gloo),
            )  # fmt: skip
    added: dict[str, dict[str, float]] = {}
    for row, measure_row in zip(_ADDED, (_of_mpi, _of_nccl, _of_ddp, _of_chainer)):
        if row in rows:
            progress.show(f"what {row} adds")
            try:
                added[row] = measure_row(options)
            except (*_FAILURES, subprocess.SubprocessError) as error:
                session.missing[row] = str(error)
    progress.clear()
    return {**session.as_json(), "added": added}


# -- added times of calls and steps -----------------------------------------------------------


def _of_mpi(options: argparse.Namespace) -> dict[str, float]:
    """Return the microseconds that ``mpi`` adds to a raw call."""
    added: dict[str, float] = {}
    asked = overhead.OPERATIONS, [8] if options.quick else [8, 1024], options.quick
    for vendor, path in peers.find(options).items():
        run = overhead.launch(path, 2, *asked)
        for record in run["records"]:
            at = f"{record['operation']}, {size_name(record['nbytes'])}, {vendor}"
            added[at] = (record["ours"] - record["raw"]) * 1e6
    return added


def _of_nccl(options: argparse.Namespace) -> dict[str, float]:
    """Return the microseconds that ``nccl`` adds on the fake, for calls that allocate nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nccl.json"
        command = [sys.executable, str(_HERE / "nccl.py"), "--json", str(file)]
        command += ["--quick"] * options.quick
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        records = json.loads(file.read_text())["records"]
    return {
        f"{record['operation']}, {record['arrays']}": record["added"] * 1e6
        for record in records
        if record["way"] == "sync" and "out=" in record["operation"]
    }


def _of_ddp(options: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds that our wrapper adds to a step."""
    training: Any = importlib.import_module("training")
    times = training.two_ranks("wrappers", ["mlp"], options.quick)["mlp"]
    return {"ours": training.summary(times)["ours_added"] * 1e3}


def _of_chainer(options: argparse.Namespace) -> dict[str, float]:
    """Return the time that our optimizer adds to a step, as a share of what ``naive`` adds."""
    chainer: Any = importlib.import_module("chainer_training")
    asked = argparse.Namespace(width=1024, quick=options.quick)
    shares = {}
    for vendor, path in peers.find(options).items():
        times = chainer.measure(path, asked)
        shares[vendor] = chainer.added(times, "ours") / chainer.added(times, "naive")
    return shares


# -- verdicts ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """Comparison at one size of an operation: our record, and a rival's from the same turns."""

    ours: Record
    rival: Record

    @property
    def value(self) -> float:
        """Ratio that tells how many times as fast ours is: the median over neighbouring turns."""
        if not self.ours.turns or not self.rival.turns:
            return self.rival.seconds / self.ours.seconds
        return median_ratio(self.rival.turns, self.ours.turns)


@dataclass(frozen=True)
class _Aim:
    """Row of the table: a range of sizes, and how many times as fast they must be."""

    what: str
    operation: str
    ranks: int
    must: float
    aim: float
    memory: str = "ordinary"
    low: int = 0
    high: int = _MOST

    def ratios(self, records: Sequence[Record]) -> list[Ratio]:
        """Return the comparisons of all sizes that were measured on both sides."""
        kind = (self.operation, self.ranks, "float32", None)
        here = [r for r in records if (r.operation, r.ranks, r.dtype, r.framework) == kind]
        ratios = []
        for ours in here:
            if ours.contestant == "shm" and ours.memory in (self.memory, ""):
                rival = fastest(here, ours.nbytes, "mpi4py")
                if rival is not None and self.low <= ours.nbytes <= self.high:
                    ratios.append(Ratio(ours, rival))
        return ratios

    def verdict(self, records: Sequence[Record]) -> Judged:
        values = {size_name(r.ours.nbytes): r.value for r in self.ratios(records)}
        bound = Bound("× MPI", values, self.must, self.aim)
        return hold(self.what, f"{self.must:g} ×", f"{self.aim:g} ×", [bound])


_AIMS = (
    _Aim("all_reduce, 4 B to 16 KiB", "all_reduce", 2, 1.5, 2, high=16 * KIB),
    _Aim("all_reduce, 64 KiB to 1 MiB", "all_reduce", 2, 1, 1.3, low=64 * KIB, high=MIB),
    _Aim("all_reduce, from 4 MiB", "all_reduce", 2, 1.5, 3, low=4 * MIB),
    _Aim("all_reduce, symmetric, from 64 KiB", "all_reduce", 2, 2, 5, "symmetric", low=64 * KIB),
    *(_Aim(operation, operation, 2, 1, 1.5) for operation in _OTHERS),
    *(_Aim(f"{each}, 4 ranks", each, 4, 1, 1.5) for each in ("all_reduce", *_OTHERS)),
)


def judge(records: Sequence[Record], added: dict[str, dict[str, float]]) -> list[Judged]:
    """Compare the figures of a run with the targets; the worst size counts."""
    verdicts = [aim.verdict(records) for aim in _AIMS]
    verdicts += [_of_half(records, dtype) for dtype in _HALVES]
    for row, what, unit, must, aim in (
        ("mpi", "mpi adds to a raw call", "µs", 1, 0.5),
        ("nccl", "nccl adds to a raw call, on the fake", "µs", 2, 1),
        ("ddp", "a DDP step of 25 MB: added over no synchronisation", "ms", 3, 2),
        ("chainer", "a step in Chainer: added, of what naive adds", "×", 0.33, 0.2),
    ):
        bound = Bound(unit, added.get(row, {}), must, aim, at_least=False)
        verdicts.append(hold(what, f"{must:g} {unit}", f"{aim:g} {unit}", [bound]))
    return verdicts


def _of_half(records: Sequence[Record], dtype: str) -> Judged:
    """Compare a 16-bit dtype with float32 of as many bytes, and with the fastest peer."""
    here = [r for r in records if r.operation == "all_reduce" and r.ranks == 2]
    ours = {
        (r.dtype, r.nbytes): r for r in here if r.contestant == "shm" and r.framework == "torch"
    }
    slower, faster = {}, {}
    for (kind, nbytes), mine in ours.items():
        full = ours.get(("float32", nbytes))
        if kind != dtype or full is None:
            continue
        slower[size_name(nbytes)] = 1 / Ratio(mine, full).value
        peer = fastest([r for r in here if r.dtype == dtype], nbytes, "mpi4py", "torch")
        if peer is not None:
            faster[size_name(nbytes)] = Ratio(mine, peer).value
    bounds = [
        Bound("× float32's time", slower, 1.3, at_least=False),
        Bound("× the fastest peer", faster, aim=1),
    ]
    return hold(f"all_reduce of {dtype}", "1.3 × float32's", "first", bounds)


def show(run: dict[str, Any], details: bool) -> None:
    """Print a run: each size if ``details``, then each row with its verdict."""
    results = Results.from_json(run)
    if details:
        header = "row, size, ours µs, MPI µs, which, × MPI, must, aim, verdict".split(", ")
        rows = [
            [aim.what, size_name(ratio.ours.nbytes), microseconds(ratio.ours.seconds),
             microseconds(ratio.rival.seconds), ratio.rival.contestant.partition("/")[2],
             f"{ratio.value:.2f}", f"{aim.must:g}", f"{aim.aim:g}", _word(aim, ratio.value)]
            for aim in _AIMS
            for ratio in aim.ratios(results.records)
        ]  # fmt: skip
        print_table("by size, against the fastest MPI", header, rows)
    print_table(
        headline(run["machine"]),
        ["to reach", "must", "aim", "the worst measured", "verdict"],
        [[*astuple(judged)] for judged in judge(results.records, run["added"])],
    )


def _word(aim: _Aim, ratio: float) -> str:
    if ratio < aim.must:
        return "missed"
    return "kept" if ratio < aim.aim else "kept, and the aim"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the targets to reach.")
    sittings.add_options(parser)
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=ROWS,
        metavar="ROW",
        help="only these targets: %(choices)s",
    )
    parser.add_argument("--brief", action="store_true", help="print the verdicts only")
    options = parser.parse_args(arguments)
    run = measured(options, lambda: measure(options))
    show(run, not options.brief)
    sittings.show_contestants(run)
    return sittings.exit_code("targets", run)


if __name__ == "__main__":
    sys.exit(main())
