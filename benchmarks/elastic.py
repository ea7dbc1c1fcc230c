"""Measurement of the time to continue after a loss: ``python benchmarks/elastic.py``.

Ranks compute sums in a loop until one of them kills itself (SIGKILL). The figure is the time from
the kill to the end of the first correct ``all_reduce`` of the next generation, on the last of the
other ranks. In this time they detect the loss, agree, connect again and compute a sum. The clock
is that of the host, which all processes share (CLOCK_MONOTONIC).

Other rows are for one additional rank, after it has asked to join. They show the time from the
first ``grow()`` to the end of the first correct ``all_reduce`` with the new rank, on the last rank.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from peers import prepare_environment

from collective.communicator import Communicator
from collective.errors import CollectiveError
from collective.launch.mpiexec import Mpiexec
from collective.start.connecting import connect
from collective.testing import RankPool, RanksFailedError, preload
from collective.testing.ranks import backend_class
from collective.tools.bench.machine import measured
from collective.tools.show import Progress, add_outputs, count, print_table

_OURS = ("shm", "gloo", "hierarchical", "mpi")


def _go_on(comm: Communicator, victim: int, marks: str) -> float:
    """Return the time at which the first sum of the next generation was complete."""
    x = np.ones(1000)
    comm.all_reduce(x)
    if comm.rank == victim:
        Path(marks, "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(x)
    except CollectiveError:
        comm = comm.shrink()
    total = comm.all_reduce(x)
    there = time.monotonic()
    assert (total == comm.size).all()
    comm.close()
    return there


def _ours(pool: RankPool, victim: int) -> float:
    """Return the seconds from the kill to the last survivor's sum."""
    with tempfile.TemporaryDirectory() as marks:
        try:
            pool.run(_go_on, victim, marks)
        except RanksFailedError as failure:
            if set(failure.errors) != {victim}:
                raise
            last: float = max(failure.results.values())
            return last - _killed(marks)
    raise RuntimeError("the victim was not killed")


def _let_in(comm: Communicator) -> tuple[float, float]:
    """Return when this rank called grow(), and when the first sum with one more was complete."""
    x, began = np.ones(1000), float("inf")
    lineage, size = comm.inner.succession.lineage, comm.size
    assert lineage is not None
    comm.membership.waiting()
    if comm.rank == size - 1:  # this rank leaves, and joins again as a new process
        comm.close()
        comm = connect(lineage.root, comm.backend, join=True)
    else:
        try:
            while True:
                comm.all_reduce(x)
        except CollectiveError:
            comm = comm.shrink()
        while not comm.membership.waiting():
            time.sleep(1e-3)
        began = time.monotonic()
        comm = comm.grow()
    total = comm.all_reduce(x)
    there = time.monotonic()
    assert (total == size).all()
    comm.close()
    return began, there


def _one_more(pool: RankPool) -> float:
    """Return the seconds from the first grow() to the last sum."""
    began, there = zip(*pool.run(_let_in), strict=True)
    return float(max(there) - min(began))


def _killed(marks: str) -> float:
    return float(Path(marks, "killed").read_text())


def measure(
    backends: Sequence[str], size: int, turns: int, python: str | None = None
) -> dict[str, list[float]]:
    """Return the seconds of every turn, by transport and killed rank.

    Args:
        python: interpreter of an environment with Open MPI, for ``mpi``.
    """
    progress = Progress()
    found: dict[str, list[float]] = {}

    def take(name: str, pool: RankPool, once: Callable[[RankPool], float]) -> None:
        with pool:
            for turn in range(turns):
                progress.show(f"{name}: {turn + 1} of {turns}")
                found.setdefault(name, []).append(once(pool))

    prepare_environment()
    for backend in backends:
        if backend not in ("shm", "mpi"):
            preload(["torch.distributed"])  # the time of imports must not count
        for victim in (size - 1, 0):
            ranks = RankPool(size, backend, mpiexec=Mpiexec(python) if python else None)
            take(f"{backend}, rank {victim} of {size}", ranks, partial(_ours, victim=victim))
        if backend_class(backend).capabilities.grows:
            take(f"{backend}, one more than {size - 1}", RankPool(size, backend), _one_more)
    progress.clear()
    return found


def show(found: dict[str, list[float]]) -> None:
    """Print the table."""
    rows = [
        [name, *(f"{1e3 * figure(turns):.0f}" for figure in (statistics.median, min, max)),
         str(len(turns))]
        for name, turns in found.items()
    ]  # fmt: skip
    title = "From a kill to the first sum without the dead, or to that with one more"
    print_table(title, ["who goes on", "median ms", "least", "most", "of"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Measure the time to continue after a loss.")
    parser.add_argument("-n", type=count, default=3, metavar="N", help="ranks (default: 3)")
    parser.add_argument("--backends", default="shm,gloo,hierarchical", help=f"of {','.join(_OURS)}")
    parser.add_argument(
        "--mpi-python", metavar="FILE", help="for mpi: Python of an environment with Open MPI 5"
    )
    parser.add_argument("--turns", type=count, default=20, help="kills for each row (default: 20)")
    parser.add_argument("--quick", action="store_true", help="3 kills for each row")
    add_outputs(parser)
    options = parser.parse_args(arguments)
    if options.n < 2:
        parser.error("-n: one rank dies and another one continues: give at least 2")
    turns = 3 if options.quick else options.turns
    asked = options.backends.split(","), options.n, turns, options.mpi_python
    run = measured(options, lambda: {"elastic": measure(*asked), "ranks": options.n})
    show(run["elastic"])
    return 0


if __name__ == "__main__":
    import elastic  # ranks that mpiexec starts import their functions by this name

    sys.exit(elastic.main())
