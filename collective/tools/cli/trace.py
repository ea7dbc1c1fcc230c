"""``collective trace``: the traces of all ranks as one file."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_parser"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "trace",
        help="join the ranks' traces into one file",
        description="Join the traces that the ranks of a program wrote with COLLECTIVE_TRACE=DIR "
        "into one file, for https://ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="directory of the ranks' traces"
    )
    parser.add_argument(
        "-o", type=Path, dest="output", metavar="FILE", help="(default: DIR/all.json)"
    )
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Write the file; return the exit code."""
    # Imported here: the module imports more of the package.
    from collective.tools.profile.events import merge

    output, ranks, events = merge(options.directory, options.output)
    print(f"{output}: {events:,} events of {ranks} rank(s). Open it with https://ui.perfetto.dev.")
    return 0
