"""``collective bench``: the speed of each transport, and of other libraries beside it."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from collective import BackendUnavailableError, InvalidArgumentError
from collective.tools.show import (
    Progress,
    add_outputs,
    check_file,
    check_known,
    counts,
    names,
    parse_size,
    write,
    written,
)

if TYPE_CHECKING:
    from collective.tools.bench.run import Benchmark, Results

_DESCRIPTION = """\
Time operations on each transport, and on other libraries in turns with it. Check the results on
fresh data afterwards. Latency: each call starts from a common start; the figure is the slowest
rank's time. Bandwidth: calls run back to back; algbw is bytes / time, and busbw is algbw times the
share of the bytes that has to travel. See docs/bench.md."""
_SIZES = "4,1K,16K,256K,4M,64M"
_QUICK = "4,16K,1M,16M"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    # Imported here: a listing of the commands must not import NumPy.
    parser = subparsers.add_parser(
        "bench",
        help="measure the speed of transports, and of other libraries beside them",
        description=_DESCRIPTION,
        epilog="exit code: 1 if a result was wrong, a rank failed or nothing could be measured; "
        "130 after an interrupt, which shows the results so far; else 0",
    )
    add = parser.add_argument
    add("--op", type=names, default=["all_reduce"], metavar="NAMES",
        help="operations, with commas between them, or all (default: all_reduce)")  # fmt: skip
    add("--sizes", type=names, metavar="SIZES",
        help=f"bytes of the larger of a rank's arrays (default: {_SIZES})")  # fmt: skip
    add("--dtype", type=names, default=["float32"], metavar="NAMES", help="(default: float32)")
    add("-n", type=counts, default=[2], metavar="RANKS", help="numbers of ranks (default: 2)")
    add("--backend", type=names, default=["shm", "tcp", "mpi"], metavar="NAMES",
        help="transports (default: shm,tcp,mpi); mpi/openmpi names the MPI library")  # fmt: skip
    add("--memory", type=names, default=["symmetric", "ordinary"], metavar="KINDS",
        help="kinds of arrays, where that makes a difference: of comm.empty() (symmetric) or any "
        "(default: symmetric,ordinary)")  # fmt: skip
    add("--framework", type=names, default=["numpy"], metavar="NAMES",
        help="frameworks of the arrays: numpy, torch, cupy or torch.cuda")  # fmt: skip
    add("--vs", type=names, default=[], metavar="PEERS",
        help="peers that do the same work in turns with ours: mpi4py, torch or memcpy; "
        "mpi4py/mpich names the MPI library")  # fmt: skip
    method = parser.add_mutually_exclusive_group()
    method.add_argument("--latency", action="store_true", help="measure latency only")
    method.add_argument("--bandwidth", action="store_true", help="measure bandwidth only")
    add("--quick", action="store_true", help=f"short turns, and {_QUICK} as sizes")
    add("--mpi-envs", type=Path, metavar="DIR",
        help="directory with a virtual environment for each MPI library, called impi-rt, openmpi "
        "or mpich (default: the MPI library of this Python)")  # fmt: skip
    add_outputs(parser, earlier=True)
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Measure and show; return the exit code."""
    # Imported here: these modules import NumPy.
    from collective.tools.bench.figures import show
    from collective.tools.bench.run import measure

    check_file("--json", options.json)
    progress = Progress()
    if options.earlier is not None:
        results = _earlier(options.earlier)
    else:
        results = measure(_plan(options), progress)
    progress.clear()
    well = written("--json", options.json, lambda path: write(path, asdict(results)))
    show(results.records, results.gaps)
    _say(results)
    if results.interrupted:
        return 130
    if not well:
        return 2
    return 1 if results.failures or not results.records else 0


def _plan(options: argparse.Namespace) -> Benchmark:
    """Return the measurements that the options name.

    Raises:
        InvalidArgumentError: an option has an unknown value.
        BackendNotFoundError: there is no such transport.
    """
    from collective.inner import registry
    from collective.testing.frameworks import NAMES
    from collective.tools.bench.contestants import PEERS, environments
    from collective.tools.bench.measure import METHODS, Pace
    from collective.tools.bench.operations import DTYPES, OPERATIONS
    from collective.tools.bench.run import Benchmark

    operations = OPERATIONS if options.op == ["all"] else options.op
    check_known("--op", operations, (*OPERATIONS, "all"))
    check_known("--dtype", options.dtype, DTYPES)
    check_known("--memory", options.memory, ("symmetric", "ordinary"))
    check_known("--framework", options.framework, NAMES)
    check_known("--vs", [peer.partition("/")[0] for peer in options.vs], PEERS)
    for name in options.backend:
        with contextlib.suppress(BackendUnavailableError):  # the tables will show the reason
            registry.find(name.partition("/")[0])
    sizes = options.sizes or (_QUICK if options.quick else _SIZES).split(",")
    try:
        parsed = [parse_size(size) for size in sizes]
    except argparse.ArgumentTypeError as error:
        raise InvalidArgumentError(f"--sizes: {error}.") from None
    only = [m for m, asked in zip(METHODS, (options.latency, options.bandwidth)) if asked]
    return Benchmark(
        operations=operations,
        sizes=parsed,
        dtypes=options.dtype,
        ranks=options.n,
        names=[*options.backend, *options.vs],
        memories=options.memory,
        frameworks=options.framework,
        methods=only or METHODS,
        environments=environments(options.mpi_envs),
        pace=Pace.of(options.quick),
    )


def _earlier(path: Path) -> Results:
    from collective.tools.bench.run import Results

    try:
        return Results.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"--from {path}: {error!r}; expected a file that collective bench --json has written."
        ) from error


def _say(results: Results) -> None:
    """Print what the tables do not show: the machine, versions of libraries, and failures."""
    from collective.tools.bench.machine import headline

    print(headline(results.machine))
    for name, version in results.versions.items():
        print(f"{name}: {version}")
    for failure in results.failures:
        print(f"collective bench: {failure}", file=sys.stderr)
    if results.interrupted:
        print("collective bench: interrupted; results are missing", file=sys.stderr)
