"""The command ``collective`` and the table of its subcommands."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

from collective import CollectiveError, __version__

from . import bench, config, doctor, parity, profile, run, tour
from .ending import EndedBySignal, explain, have_descriptors, raise_on_signals

#: Modules with ``add_parser(subparsers)``, which sets ``execute``: options -> exit code.
_COMMANDS = (bench, config, doctor, parity, profile, run, tour)
# The commands that start processes of this package, but no program of the user.
_WITHOUT_PROGRAM = (bench.execute, doctor.execute, parity.execute, tour.execute)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: arguments without the program's name; None for those of this process.
    """
    if not have_descriptors():
        return _refuse(
            "standard output is closed. Redirect it to /dev/null if you do not want the output."
        )
    try:
        options = _parse(arguments)
        options.is_program = arguments is None  # false for a call from another program
        if options.is_program:
            raise_on_signals()
            if options.execute in _WITHOUT_PROGRAM:
                _import_nothing_from_here()
        code: int = options.execute(options)
        sys.stdout.flush()
    except CollectiveError as error:
        return _refuse(str(error))
    except EndedBySignal as end:
        return 128 + end.number
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        reason = explain(error)
        if reason is None:
            raise
        return _refuse(reason) if reason else 128 + signal.SIGPIPE
    return code


def _import_nothing_from_here() -> None:
    """Keep the working directory out of the imports of child processes, unless we import from it.

    Python puts the directory first for ``-c`` and ``-m``, so any user's ``json.py`` in /tmp would
    run.
    """
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        if not {"", os.getcwd()} & set(sys.path):
            os.environ.setdefault("PYTHONSAFEPATH", "1")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="collective", description="Collective communication between Python processes."
    )
    parser.add_argument("--version", action="version", version=f"collective {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)
    parser.commands = subparsers.choices
    parser.given = sys.argv[1:] if arguments is None else arguments
    for command in _COMMANDS:
        command.add_parser(subparsers)
    try:
        options = parser.parse_args(arguments)
        if not hasattr(options, "execute"):
            options = parser.parse_args(["--help"])
        return options
    except SystemExit:
        sys.stdout.flush()  # flush here, where main() handles a failed write of the help
        raise


class _Parser(argparse.ArgumentParser):
    """Parser whose errors name what the user may have meant.

    Attributes:
        commands: the parsers of all commands, by name; empty for the parser of a command.
        given: the command line.
    """

    commands: Mapping[str, argparse.ArgumentParser] = MappingProxyType({})
    given: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '(.+?)'|unrecognized arguments: (\S+)", message)
        command = next(filter(None, map(self.commands.get, self.given)), None)
        names = list(self.commands)
        if command is not None:
            names = re.findall(r"(?<![\w-])--?[a-z][\w-]*", command.format_help())
        hint = _hint(unknown[1] or unknown[2], names) if unknown else ""
        argparse.ArgumentParser.error(command or self, message + hint)


def _hint(word: str, names: Iterable[str]) -> str:
    if word.endswith(".py"):
        return f"\nTo start a program as ranks: collective run {word}"
    by_letters = {name.lstrip("-"): name for name in sorted(names)}
    letters = word.lstrip("-")
    near = difflib.get_close_matches(letters, by_letters, 1)
    near += [name for name in by_letters if len(name) > 1 and letters.startswith(name)]
    return f"\nDid you mean {by_letters[near[0]]!r}?" if near else ""


def _refuse(reason: str) -> int:
    print(f"collective: {reason}", file=sys.stderr)
    return 2
