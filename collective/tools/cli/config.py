"""``collective config``: every setting, its value and the source of the value."""

from __future__ import annotations

import argparse
import json

from collective import ConfigError
from collective.inner import KEYS, load, not_read
from collective.tools.show import aligned, check_known


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "config",
        help="show each setting and where it comes from",
        description="Show each setting as a program that starts here and now would find it. "
        "The environment takes precedence over collective.toml or pyproject.toml, the file over "
        "the launcher, and the launcher over the default. A file is read only if nobody but you "
        "and root could have written it; a file that is not read is named with the reason.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--explain", nargs="?", const="", metavar="NAME",
        help="explain all settings, or one: what it takes, its default and what it is",
    )  # fmt: skip
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Print the settings; return the exit code."""
    if options.explain is not None:
        name = options.explain.lower().removeprefix("collective_")
        if name:
            check_known("--explain", [name], tuple(KEYS))
        for key in [name] if name else KEYS:
            print(explained(key))
        return 0
    try:
        config = load({})
    except ConfigError:
        # The error of a misspelt setting refers to this list. The caller prints the error.
        if not options.json:
            print(aligned([("key", "it must be"), *((key, KEYS[key].allowed) for key in KEYS)]))
        raise
    settings = {key: (config.shown(key), config.origins[key]) for key in KEYS}
    if options.json:
        table = {
            key: {"value": value, "origin": origin} for key, (value, origin) in settings.items()
        }
        refused = {str(path): reason for path, reason in config.refused.items()}
        print(json.dumps({"settings": table, "refused": refused}, indent=2))
        return 0
    rows = [("key", "value", "origin")]
    rows += [
        (key, "-" if value in (None, "") else str(value), origin)
        for key, (value, origin) in settings.items()
    ]
    print(aligned(rows))
    for path, reason in config.refused.items():
        print(not_read(path, reason))
    return 0


def explained(name: str) -> str:
    """Return what a setting takes, its default, and what it is: an item of docs/settings.md."""
    key = KEYS[name]
    default = "" if key.default in (None, "") else f", default {key.default}"
    return f"{name} ({key.allowed}{default}): {key.doc}"
