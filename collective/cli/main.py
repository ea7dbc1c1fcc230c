"""The command ``collective`` and the table of its subcommands."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from collective.cli import bench, config, doctor, parity, profile, run, trace
from collective.errors import CollectiveError

__all__ = ["main"]

#: Each has ``add_parser(subparsers)``, which sets ``execute``: options -> exit code.
_COMMANDS = (bench, config, doctor, parity, profile, run, trace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: without the program's name; None takes those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="collective", description="Collective communication between Python processes."
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    options.is_program = arguments is None  # and not a call within another one
    try:
        code: int = options.execute(options)
    except CollectiveError as error:
        print(f"collective: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return code
