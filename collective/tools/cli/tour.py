"""``collective tour``: two minutes that show what this is, on the user's machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser"]


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "tour",
        help="show in two minutes what this does, on this machine",
        description="Show four programs and run them here: ranks and a sum, a mistake and its "
        "error, a rank that dies while the others go on, and the same bits from several "
        "frameworks over two transports.",
        epilog="exit code: 1 if a program did not show what it is to show; else 0",
    )
    parser.add_argument(
        "--no-wait", action="store_true",
        help="do not wait for Enter; nobody is waited for where input or output is no terminal",
    )  # fmt: skip
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Show it; return the exit code."""
    # Here and not above: it brings more of the package along.
    from collective.tools.tour.run import lead

    if options.no_wait or not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return lead(lambda prompt: True)
    return lead(_ask)


def _ask(prompt: str) -> bool:
    try:
        return input(prompt).strip().lower() not in ("q", "quit")
    except EOFError:
        print()
        return False
