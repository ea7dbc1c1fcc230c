"""What the commands have in common: figures with units, tables, one line of progress, options.

Imports neither NumPy nor rich: a listing of the commands needs neither.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collective.errors import InvalidArgumentError

from .fitting import figures, lines, narrowest, parts, widened

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

__all__ = [
    "Progress", "add_outputs", "add_sizes", "aligned", "check_known", "console", "count", "counts",
    "microseconds", "names", "parse_size", "print_table", "rate_name", "size_name", "table",
    "time_name", "width", "write",
]  # fmt: skip

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIMES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
# Into a pipe or a file, what is for a terminal must not be cut to the width of one.
_UNCUT = 300
# Characters that rich has between two columns, for this box and padding.
_RICH_GAP = 3
# Characters of the bar of progress, and how few it may have.
_BAR, _LEAST_BAR = 20, 5

# -- figures ------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Return bytes for ``"4"``, ``"64K"``, ``"16M"``."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = 0
    if match is not None:
        nbytes = int(match[1]) * _SIZES[f"{match[2].upper()}iB" if match[2] else "B"]
    if nbytes < 4:
        raise argparse.ArgumentTypeError(f"{text!r}; at least 4 bytes, such as 4, 64K or 16M")
    return nbytes


def size_name(nbytes: float | None) -> str:
    """Return bytes as ``"64 KiB"``; None, of which nobody knows, as ``"unknown"``."""
    if nbytes is None:
        return "unknown"
    return f"{nbytes:.0f} B" if nbytes < 1023.5 else _scaled(nbytes, _SIZES)


def time_name(seconds: float) -> str:
    """Return seconds as ``"12.3 µs"``."""
    return _scaled(seconds, _TIMES) if seconds else "0"


def rate_name(rate: float | None) -> str:
    """Return bytes a second as ``"12.3 GB/s"``, None as ``"-"``."""
    return "-" if rate is None else _scaled(rate, _RATES)


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """Return a value in the smallest unit, of growing ones, in which three digits hold it."""
    *_, largest = units
    # 999.5 is what rounds to four digits, which %.3g writes with an exponent.
    unit = next((unit for unit, size in units.items() if abs(value) < 999.5 * size), largest)
    number = value / units[unit]
    return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:.0f} {unit}"


def microseconds(seconds: float) -> str:
    """Return seconds as microseconds of three digits, without an exponent and a unit."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


# -- tables -------------------------------------------------------------------------------------


def width() -> int:
    """Return how wide output may be: as COLUMNS says or the terminal is, or else as it likes."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return _UNCUT


def console(markup: bool = True, least: int = _UNCUT) -> Console:
    """Return standard output for rich.

    Args:
        markup: whether ``[red]`` is a colour; text that others wrote says ``[rank 1 of 4]``.
        least: how wide it is at least, where it is no terminal and COLUMNS is not set.
    """
    from rich.console import Console

    made = Console(highlight=False, markup=markup)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = max(least, made.width)
    return made


class _Fitting:
    """A table for rich, in as many parts as it takes to be no wider than what it is printed to."""

    def __init__(
        self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markup: bool
    ) -> None:
        self._title = title
        self._header = header
        self._rows = rows
        self._markup = markup

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title, wide = self._title, options.max_width
        least = narrowest(self._header, self._rows, wide, markup=self._markup)
        for columns in parts(self._header, self._rows, least, wide, _RICH_GAP):
            room = wide - sum(least[n] for n in columns) - _RICH_GAP * (len(columns) - 1)
            widths = widened(self._header, self._rows, columns, least, room)
            yield self._part(title, dict(zip(columns, widths)))
            yield ""
            title = ""

    def _part(self, title: str, columns: Mapping[int, int]) -> Table:
        from rich import box
        from rich.table import Table

        made = Table(
            title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
            show_edge=False,
        )  # fmt: skip
        right = figures(self._header, self._rows)
        for n, each in columns.items():  # rich's own choice may drop a column
            made.add_column(
                self._header[n], justify="right" if right[n] else "left", width=each,
                overflow="fold",
            )  # fmt: skip
        for row in self._rows:
            made.add_row(*(row[n] for n in columns))
        return made


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markup: bool = True
) -> _Fitting:
    """Return a table for rich: columns of figures to the right, the first one always left.

    Where it is printed to something narrower, columns go into parts below
    (:mod:`collective.tools.fitting`).

    Args:
        markup: whether ``[red]`` in a cell is a colour, as it is on a :func:`console` by default.
    """
    return _Fitting(title, header, rows, markup)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False
) -> None:
    """Print a table, with rich where it is installed."""
    if markdown:
        rule = ["---:" if right else "---" for right in figures(header, rows)]
        print(f"**{title}**\n")
        for row in [header, rule, *rows]:
            print(f"| {' | '.join(row)} |")
        print()
    elif importlib.util.find_spec("rich") is not None:
        console(markup=False).print(table(title, header, rows, markup=False))
    else:
        print(title)
        least = narrowest(header, rows, width(), by_words=False)
        for columns in parts(header, rows, least, width()):
            print(aligned([[row[n] for n in columns] for row in [header, *rows]]))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a line a row, with columns of spaces; the last is wrapped where that is too wide."""
    return "\n".join(lines(rows, width()))


# -- progress -----------------------------------------------------------------------------------


class Progress:
    """Says on standard error what is done now: one line that is written over, on a terminal."""

    def __init__(self) -> None:
        # What some services for CI show as a terminal keeps every line.
        self._shown = sys.stderr.isatty() and not os.environ.get("CI")
        self._text = ""
        self.begin("", 0)

    def begin(self, text: str, total: int) -> None:
        """Start over, with ``total`` things to do; 0 if that is not known."""
        self._total, self._done, self._failed = total, 0, 0
        self._since, self._last = time.monotonic(), 0.0
        self.show(text)

    def step(self, failed: int = 0) -> None:
        """Count one thing as done, and say how many have failed so far."""
        self._done, self._failed = self._done + 1, failed
        # Thousands a second, and nobody reads more than some.
        if self._shown and time.monotonic() > self._last + 0.1:
            self.show(self._text)

    def show(self, text: str) -> None:
        """Replace the line."""
        self._text = text
        if self._shown and (text or self._done):
            self._last = time.monotonic()
            columns, done = shutil.get_terminal_size().columns - 1, self._count()
            line = f"{text}{self._bar(columns - len(text) - len(done))}{done}"[:columns]
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def _bar(self, room: int) -> str:
        """Return the bar, as long as there is room for it."""
        length = min(_BAR, room - 2)
        if not self._total or length < _LEAST_BAR:
            return ""
        full = self._done * length // self._total
        return f"  {'━' * full}{'─' * (length - full)}"

    def _count(self) -> str:
        if not self._total:
            return ""
        found = f" {self._done / self._total:4.0%}  {self._done:,} of {self._total:,}"
        if self._failed:
            found += f", {self._failed:,} FAILED"
        if self._done:
            left = (time.monotonic() - self._since) / self._done * (self._total - self._done)
            found += f", {left // 60:.0f}:{left % 60:02.0f} left"
        return found

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# -- options ------------------------------------------------------------------------------------


def count(text: str) -> int:
    """Return an integer of at least one."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be an integer >= 1")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return each of some integers once."""
    try:
        return tuple(dict.fromkeys(count(name) for name in text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; integers >= 1 with commas between them, such as 2,3"
        ) from None


def names(text: str) -> list[str]:
    """Return each of some names once."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}; names with commas between them")
    return list(dict.fromkeys(found))


def check_known(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Refuse names that there are not.

    Raises:
        InvalidArgumentError: one of ``given`` is not ``known``.
    """
    for name in given:
        if name not in known:
            raise InvalidArgumentError(f"{option}: {name!r}; one of {', '.join(known)}.")


def add_outputs(parser: argparse.ArgumentParser, *, earlier: bool = False) -> None:
    """Add ``--json`` and ``--markdown``, and ``--from`` as ``earlier`` to show such a file."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    if earlier:
        parser.add_argument(
            "--from", dest="earlier", type=Path, metavar="FILE",
            help="measure nothing: show what --json has written",
        )  # fmt: skip


def add_sizes(
    parser: argparse.ArgumentParser, default: str, option: str = "--sizes", text: str | None = None
) -> None:
    """Add an option of several sizes, with spaces between them as in ``default``."""
    sizes = [parse_size(size) for size in default.split()]
    parser.add_argument(
        option, nargs="+", type=parse_size, default=sizes, metavar="SIZE", help=text
    )


def write(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write JSON, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
