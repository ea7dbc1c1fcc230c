"""How many ranks ``collective run`` starts where no ``-n`` says so."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

from collective.errors import ConfigError
from collective.start.launchers import allocation, detect
from collective.tools.show import count

__all__ = ["add_option", "default", "say"]

_FEWEST = 2  # that are worth a launch


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``-n``; where it is not given it is None, and :func:`say` has the number."""
    # -np is what mpiexec calls it.
    parser.add_argument("-n", "-np", type=count, dest="n", metavar="N",
        help="how many ranks (default: what Slurm or torchrun's environment says, or "
        f"{_FEWEST})")  # fmt: skip


def default(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many ranks to start on this host, and in a line why.

    Args:
        environ: environment variables, such as ``os.environ``.

    Raises:
        ConfigError: this process is one of several that a launcher has started, each of which
            would start as many; or a launcher's variables contradict each other.
    """
    launched = detect(environ)
    if launched is not None and launched.size > 1:
        raise ConfigError(
            f"run: -n is not given, and this is process {launched.rank} of {launched.size} that "
            f"{launched.launcher} has started, each of which would start ranks of its own; start "
            f"the program itself under {launched.launcher}, or give -n."
        )
    found = allocation(environ)
    if found is not None:
        what = "1 rank" if found.ranks == 1 else f"{found.ranks} ranks"
        more = f"; on this host of {found.hosts} only" if found.hosts > 1 else ""
        return found.ranks, f"{what}, as {found.variable} says{more}; -n N for another number"
    return _FEWEST, f"{_FEWEST} ranks; -n N for another number"


def say(command: str) -> int:
    """Return how many ranks to start on this host, and tell the user that on standard error.

    Raises:
        ConfigError: as :func:`default`.
    """
    size, reason = default(os.environ)
    print(f"collective {command}: {reason}", file=sys.stderr)
    return size
