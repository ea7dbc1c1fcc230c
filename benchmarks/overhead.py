"""Measurement of the time that our calls add to the same calls of the underlying engine.

::

    python benchmarks/overhead.py                          # mpi under each library, and gloo
    python benchmarks/overhead.py gloo --sizes 4 64K 1M    # one of them
    python benchmarks/overhead.py mpi4py --quick           # programs of mpi4py, over each library

Both sides live in the same processes and take turns, A B A B …, nine each. The sides are mpi4py's
upper-case calls and our ``mpi``, or torch.distributed's Gloo and our ``gloo``. Within a turn, the
calls are made back to back from a common start. The figure of a turn is the mean of the slowest
rank. The report shows the median of the turns, and the median of the ratios of neighbouring turns.

With ``mpi4py`` the same calls of mpi4py run over our ``shm``, without MPI, and over each MPI, in
ranks of their own that take turns.

The share of Python is the same on both sides, except for our additions: validation, the flight
recorder and, for MPI, the comparison of the ranks' calls.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peers
import sittings
from turns import alternate, median_ratio, repeated

import collective
from collective.errors import BackendUnavailableError
from collective.launch.outcome import RanksFailedError
from collective.launch.ranks import Participant
from collective.tools.bench.libraries import BenchLibrary, Mpi, Ours, TorchDistributed
from collective.tools.bench.machine import headline, measured
from collective.tools.bench.measure import Pace
from collective.tools.bench.operations import ALL, Prepared
from collective.tools.show import add_outputs, add_sizes, microseconds, print_table, size_name

#: The operations that are measured.
OPERATIONS = "all_reduce broadcast all_gather reduce_scatter all_to_all send_recv".split()
_SIZES = "8 1K 8K 32K 1M 16M"
# Calls of mpi4py in a turn.
_CALLS = 300
# Promised bounds: microseconds added to MPI below 64 KiB, and ratios for large arrays.
_ADDED_US, _SMALL = 3.0, 64 << 10
_MPI_RATIO, _LARGE = 1.03, 1 << 20


class OursRaw(Ours):
    """Library of our calls that do the same as the raw calls: all ranks know all lengths."""

    def calls(self, x: Any, y: Any) -> dict[str, Any]:
        comm, calls = self.comm, super().calls(x, y)
        # A transport that checks calls gets the lengths at no cost. Others need counts.
        if not comm.capabilities.checks_calls:
            counts = [x.shape[0]] * self.size
            calls["all_gather"] = lambda: comm.all_gather(x, counts=counts, out=y)
        return calls


def _over_gloo(comm: Any, folder: Path, *asked: Any) -> dict[str, Any]:
    raw, ours = TorchDistributed(folder, comm.rank, comm.size), OursRaw(comm)
    ours.use("torch")  # tensors on both sides
    figures = compared(raw, ours, *asked)
    raw.close()
    return figures


def _over_mpi(_: Participant, *asked: Any) -> dict[str, Any]:
    with collective.init("mpi") as comm:  # MPI itself is finalised when the process ends
        return compared(Mpi(), OursRaw(comm), *asked)


def compared(
    raw: BenchLibrary, ours: Ours, operations: Sequence[str], sizes: Sequence[int], quick: bool
) -> dict[str, Any]:
    """Measure as one of the ranks; return the figures."""
    pace, records = Pace.of(quick), []
    for operation in operations:
        for nbytes in sizes:
            sides = [Prepared(library, operation, nbytes) for library in (raw, ours)]
            calls = {name: repeated(side.call) for name, side in zip(("raw", "ours"), sides)}
            _check(sides, ours.comm.barrier)
            seconds = alternate(ours.comm, calls, pace.rounds, pace.turn)
            _check(sides, ours.comm.barrier)
            share = ALL[operation].share
            medians = {name: share * statistics.median(turns) for name, turns in seconds.items()}
            ratio = median_ratio(seconds["ours"], seconds["raw"])
            records.append({"operation": operation, "nbytes": nbytes, **medians, "ratio": ratio})
    return {"version": raw.version, "records": records}


def _check(sides: Sequence[Prepared], together: Callable[[], object]) -> None:
    """Check the results of the calls, on fresh data."""
    for side in sides:
        wrong = side.count_wrong(together)
        assert not wrong, f"{side.what}: {wrong} elements are wrong"
        side.x[:] = 0  # so that sums stay finite after thousands of repetitions


def calls_of_mpi4py(comm: Any) -> dict[str, Callable[[], object]]:
    """Return calls of mpi4py between two ranks, by name; a message goes there and back."""
    request = sys.modules["mpi4py.MPI"].Request
    x, y, obj, other = np.ones(1), np.zeros(1), {"a": 1, "b": [1, 2]}, 1 - comm.rank

    def there_and_back(send: Any, recv: Any) -> Callable[[], object]:
        steps = (send, recv) if comm.rank == 0 else (recv, send)
        return lambda: [step() for step in steps]

    return {
        "Allreduce 8 B": lambda: comm.Allreduce(x, y),
        "Bcast 8 B": lambda: comm.Bcast(x, 0),
        "Barrier": comm.Barrier,
        "Send, Recv 8 B, both ways": there_and_back(
            lambda: comm.Send(x, other), lambda: comm.Recv(y, other)
        ),
        "Sendrecv 8 B": lambda: comm.Sendrecv(x, other, 0, y, other, 0),
        "Isend, Irecv 8 B, Waitall": lambda: request.Waitall(
            [comm.Isend(x, other), comm.Irecv(y, other)]
        ),
        "send, recv, both ways": there_and_back(
            lambda: comm.send(obj, other), lambda: comm.recv(source=other)
        ),
        "bcast": lambda: comm.bcast(obj, 0),
        "allreduce": lambda: comm.allreduce(1),
        "Dup, Free": lambda: comm.Dup().Free(),
    }


def _unmodified(ours: Any, *asked: Any) -> dict[str, float]:
    """Measure calls of mpi4py as one of the ranks; return the median seconds of each.

    Args:
        ours: our communicator, for our mpi4py; or a rank that an MPI has started.
        asked: perhaps a folder, and whether to be quick.
    """
    if isinstance(ours, Participant):
        comm = importlib.import_module("mpi4py.MPI").COMM_WORLD
    else:
        comm = importlib.import_module("collective.adapters.mpi4py").communicator(ours)
    figures = {}
    for name, call in calls_of_mpi4py(comm).items():
        turns = []
        for _ in range(5 if asked[-1] else 15):
            comm.Barrier()
            start = time.perf_counter()
            repeated(call)(_CALLS)
            turns.append(max(comm.allgather(time.perf_counter() - start)) / _CALLS)
        figures[name] = statistics.median(turns)
    return figures


def compare_programs(venvs: Mapping[str, Path], quick: bool) -> dict[str, dict[str, float]]:
    """Return the median seconds of each call of mpi4py, over ``shm`` and each MPI, in turns."""
    turns: dict[str, list[dict[str, float]]] = {"shm": [], **{name: [] for name in venvs}}
    for _ in range(1 if quick else 3):
        turns["shm"].append(peers.run_here(2, "shm", _unmodified, quick))
        for name, venv in venvs.items():
            turns[name].append(peers.run_under_mpi(venv, 2, _unmodified, quick))
    return {
        name: {call: statistics.median(turn[call] for turn in found) for call in found[0]}
        for name, found in turns.items()
    }


def launch(venv: Path | None, ranks: int, *asked: Any) -> dict[str, Any]:
    """Run the ranks over Gloo, or over the MPI of an environment; return rank 0's figures.

    Raises:
        RanksFailedError, BackendUnavailableError: the ranks failed, or did not start.
    """
    found: dict[str, Any]
    if venv is not None:
        found = peers.run_under_mpi(venv, ranks, _over_mpi, *asked)
    else:
        found = peers.run_here(ranks, "gloo", _over_gloo, *asked)
    return found


def verdict(engine: str, record: dict[str, Any]) -> str:
    """Return whether a figure keeps the promise: "kept", "missed", or "" without a promise."""
    added = (record["ours"] - record["raw"]) * 1e6
    if engine == "gloo":
        return "kept" if record["ratio"] <= 1 else "missed"
    if record["nbytes"] < _SMALL:
        return "kept" if added <= _ADDED_US else "missed"
    if record["nbytes"] >= _LARGE:
        return "kept" if record["ratio"] <= _MPI_RATIO else "missed"
    return ""


def show(run: dict[str, Any]) -> None:
    """Print the tables of a run."""
    print(f"{headline(run['machine'])}; {run['ranks']} ranks\n")
    for name, found in run["engines"].items():
        if name == "mpi4py":
            calls = [[c, *(microseconds(side[c]) for side in found.values())] for c in found["shm"]]
            print_table("calls of mpi4py, 2 ranks, µs", ["call", *found], calls)
            continue
        engine = "gloo" if name == "gloo" else "mpi"
        rows = [
            [
                record["operation"], size_name(record["nbytes"]), microseconds(record["raw"]),
                microseconds(record["ours"]), f"{(record['ours'] - record['raw']) * 1e6:.2f}",
                f"{record['ratio']:.3f}", verdict(engine, record),
            ]
            for record in found["records"]
        ]  # fmt: skip
        header = ["operation", "size", "raw µs", "ours µs", "added µs", "ratio", "verdict"]
        print_table(f"{engine} over {found['version']}", header, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure what our calls add to the engine's.")
    parser.add_argument(
        "engines",
        nargs="*",
        help=f"gloo, mpi4py, {', '.join(peers.VENDORS)} (default: all installed)",
    )
    parser.add_argument("-n", type=int, default=2, metavar="N", help="ranks (default: 2)")
    add_sizes(parser, _SIZES)
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="three short turns of each side")
    add_outputs(parser)
    peers.add_options(parser)
    options = parser.parse_args(arguments)
    venvs = peers.find(options)
    failures = []

    def measure() -> dict[str, Any]:
        engines = {}
        for name in options.engines or [*venvs, "gloo", "mpi4py"]:
            if name == "mpi4py":
                engines[name] = compare_programs(venvs, options.quick)
                continue
            if name != "gloo" and name not in venvs:
                raise SystemExit(f"overhead: {name}: not installed; run: make .mpi/{name}/.done")
            try:
                engines[name] = launch(
                    venvs.get(name), options.n, options.operations, options.sizes, options.quick
                )
            except (RanksFailedError, BackendUnavailableError) as error:
                failures.append(f"{name}: {error}")
        return {"ranks": options.n, "engines": engines}

    show(measured(options, measure))
    return sittings.exit_code("overhead", {"failures": failures})


if __name__ == "__main__":
    import overhead  # ranks that mpiexec starts import their functions by this name

    sys.exit(overhead.main())
