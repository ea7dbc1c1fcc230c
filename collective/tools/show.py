"""Helpers of the commands: figures with units, tables, one line of progress, options, files.

This module does not import NumPy, which a listing of the commands does not need.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from collective import InvalidArgumentError

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIMES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
# Width for output to a pipe or a file, so that text is not cut to the width of a terminal.
_UNCUT = 300
# Characters of the progress bar: usual number, and least number.
_BAR, _LEAST_BAR = 20, 5
# Least time between two lines of progress with the same text, in seconds.
_LINE_S = 10.0
#: Spaces between two columns.
GAP = 2
# Width to which a column of words is narrowed before the column goes into a further part.
_NARROW = 24

# -- figures ------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Return the bytes of ``"4"``, ``"64K"``, ``"16M"``."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = 0
    if match is not None:
        nbytes = int(match[1]) * _SIZES[f"{match[2].upper()}iB" if match[2] else "B"]
    if nbytes < 4:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected at least 4 bytes, such as 4, 64K or 16M"
        )
    return nbytes


def size_name(nbytes: float | None) -> str:
    """Return bytes as ``"64 KiB"``; None, an unknown size, as ``"unknown"``."""
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
    """Return a value in the smallest of ``units`` in which three digits are enough."""
    *_, largest = units
    # Values from 999.5 up round to four digits, which %.3g would write with an exponent.
    unit = next((unit for unit, size in units.items() if abs(value) < 999.5 * size), largest)
    number = value / units[unit]
    return f"{number:.3g} {unit}" if abs(number) < 999.5 else f"{number:.0f} {unit}"


def microseconds(seconds: float) -> str:
    """Return seconds as microseconds with three digits, without exponent and unit."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


# -- tables -------------------------------------------------------------------------------------


def width(least: int = _UNCUT) -> int:
    """Return the width for output: COLUMNS, else that of the terminal, else ``least``."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return least


def painted(text: str, style: str = "1") -> str:
    """Return a text in a style, if standard output is a terminal and NO_COLOR is not set.

    Args:
        text: text without control characters.
        style: number of the style in ANSI's sequences: 1 for bold, 31 for red, 32 for green.
    """
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\033[{style}m{text}\033[0m"
    return text


class Console:
    """Report on standard output: texts and tables that fit its width.

    Args:
        least: width if standard output is not a terminal and COLUMNS is not set.
    """

    def __init__(self, least: int = _UNCUT) -> None:
        self._width = width(least)

    def say(self, text: str, indent: int = 0) -> None:
        """Print lines of text, wrapped at spaces, so that a path can be copied.

        Args:
            text: the lines.
            indent: number of spaces before the rest of a wrapped line.
        """
        self.quote("\n".join(
            textwrap.fill(
                line, self._width, break_long_words=False, break_on_hyphens=False,
                drop_whitespace=len(line) > self._width, subsequent_indent=" " * indent,
            )
            for line in text.split("\n")
        ))  # fmt: skip

    def quote(self, text: str) -> None:
        """Print a text as it is, such as an error or a program."""
        print(text.replace("FAILED", painted("FAILED", "31")))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table; if it is too wide, some columns form further parts below."""
        shown = [title]
        for columns in parts(header, rows, self._width):
            shown += lines([[row[n] for n in columns] for row in [header, *rows]], self._width)
        self.quote("\n".join([*shown, ""]))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; short rows are filled with empty cells."""
    rows = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    Console().table(title, header, rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with aligned columns; a last column that is too wide is wrapped."""
    return "\n".join(lines(rows, width()))


# -- fitting --------------------------------------------------------------------------------------
#
# If a table is wider than a terminal, the columns that do not fit form a further part below. Each
# part begins with the columns that name the subject of its rows. Figures are never cut or wrapped;
# a column of words is wrapped.


def figures(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns hold figures; the first column never does."""
    return [i > 0 and all(_is_figure(row[i]) for row in rows) for i in range(len(header))]


def _is_figure(cell: str) -> bool:
    return not cell or cell.lstrip("+-")[:1].isdigit() or cell in "-–"


def parts(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Return the columns of each part of a table, so that each part is up to ``width`` wide.

    A part with only one column beside its key columns may be wider.

    Args:
        header, rows: the whole table.
        width: width in characters.
    """
    right, least = figures(header, rows), []
    for n, name in enumerate(header):
        widest = max(map(len, [*(row[n] for row in rows), ""]))
        least.append(max(widest if right[n] else min(widest, _narrow(width)), len(name)))
    keys = [0, 1] if len(header) > 1 and not right[1] else [0]
    room = width - sum(least[n] for n in keys) - GAP * (len(keys) - 1)
    groups: list[list[int]] = []
    left = 0
    for n in range(len(keys), len(header)):
        if not groups or least[n] + GAP > left:
            groups.append(list(keys))
            left = room
        groups[-1].append(n)
        left -= least[n] + GAP
    return groups or [keys]


def _narrow(width: int) -> int:
    """Return the width to which a column of words is narrowed at most."""
    return max(_NARROW, width // 4)


def lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows, the header first, as lines with aligned columns, up to ``width`` if possible.

    Figures are aligned right. The last column is wrapped only at spaces, so that a path can be
    copied. If a cell is wider than its column, the row continues on a new line.
    """
    limit = _narrow(width)
    starts = [0]
    for column in zip(*rows):
        wide = max([len(cell) for cell in column if len(cell) <= limit], default=limit)
        starts.append(starts[-1] + wide + GAP)
    room = [end - start - GAP for start, end in itertools.pairwise(starts)]
    right = figures(rows[0], rows[1:])
    output = []
    for cells in rows:
        row = [cell.rjust(room[n]) if right[n] else cell for n, cell in enumerate(cells)]
        line = ""
        for start, cell in zip(starts, row[:-1]):
            if len(line) > max(0, start - GAP):
                output.append(line)
                line = ""
            line = line.ljust(start) + cell
        start = starts[len(row) - 1]
        if len(line) > max(0, start - GAP):
            output.append(line)
            line = ""
        last = textwrap.wrap(
            row[-1], max(1, width - start), break_long_words=False, break_on_hyphens=False
        )
        output.append(line.ljust(start) + (last[0] if last else ""))
        output += [" " * start + part for part in last[1:]]
    return [line.rstrip() for line in output]


# -- progress -----------------------------------------------------------------------------------


class Progress:
    """Display of the current activity: a line on a terminal's standard error, overwritten.

    Args:
        command: name of a command that also tells its progress to a pipe or a file, in lines that
            begin with the name. Empty for a command that is silent there.
    """

    def __init__(self, command: str = "") -> None:
        # Some CI services present a terminal but keep every line.
        self._shown = sys.stderr.isatty() and not os.environ.get("CI")
        self._command = "" if self._shown else command
        self._line, self._line_at = "", 0.0
        self._text = ""
        self.begin("", 0)

    def begin(self, text: str, total: int) -> None:
        """Start again, with ``total`` things to do; 0 if the number is unknown."""
        self._total, self._done, self._failed = total, 0, 0
        self._since, self._last = time.monotonic(), 0.0
        self.show(text)

    def step(self, failed: int = 0) -> None:
        """Count one thing as done; ``failed`` is the number of failures so far."""
        self._done, self._failed = self._done + 1, failed
        # There may be thousands of steps a second; ten updates a second are enough.
        if self._shown and time.monotonic() > self._last + 0.1:
            self.show(self._text)
        elif self._command and time.monotonic() > self._line_at + _LINE_S:
            self._tell()

    def show(self, text: str) -> None:
        """Replace the line."""
        self._text = text
        if self._shown and (text or self._done):
            self._last = time.monotonic()
            columns, done = shutil.get_terminal_size().columns - 1, self._count()
            line = f"{text}{self._bar(columns - len(text) - len(done))}{done}"[:columns]
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        if self._command and text and text != self._line:
            self._tell()

    def _tell(self) -> None:
        """Print the activity as a line."""
        self._line, self._line_at = self._text, time.monotonic()
        print(f"{self._command}: {self._text}{self._count()}", file=sys.stderr, flush=True)

    def _bar(self, room: int) -> str:
        """Return the bar, as long as there is room."""
        length = min(_BAR, room - 2)
        if not self._total or length < _LEAST_BAR:
            return ""
        full = self._done * length // self._total
        return f"  {'━' * full}{'─' * (length - full)}"

    def _count(self) -> str:
        if not self._total:
            return ""
        text = f" {self._done / self._total:4.0%}  {self._done:,} of {self._total:,}"
        if self._failed:
            text += f", {self._failed:,} FAILED"
        if self._done:
            left = (time.monotonic() - self._since) / self._done * (self._total - self._done)
            text += f", {left // 60:.0f}:{left % 60:02.0f} left"
        return text

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# -- options ------------------------------------------------------------------------------------


def count(text: str, least: int = 1) -> int:
    """Return an integer of at least ``least``."""
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}; expected an integer >= {least}")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """Return the integers of a list with commas, each once."""
    try:
        return tuple(dict.fromkeys(count(name) for name in text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected integers >= 1 with commas between them, such as 2,3"
        ) from None


def names(text: str) -> list[str]:
    """Return the names of a list with commas, each once."""
    words = [name.strip() for name in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r}; expected names with commas between them")
    return list(dict.fromkeys(words))


def check_known(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Refuse unknown names.

    Raises:
        InvalidArgumentError: a name in ``given`` is not in ``known``.
    """
    for name in given:
        if name not in known:
            raise InvalidArgumentError(
                f"{option}: {name!r} is unknown; use one of {', '.join(known)}."
            )


def add_outputs(parser: argparse.ArgumentParser, *, earlier: bool = False) -> None:
    """Add ``--json`` and, if ``earlier`` is true, ``--from``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    if earlier:
        parser.add_argument(
            "--from", dest="earlier", type=Path, metavar="FILE",
            help="measure nothing, and show the results in FILE, which --json has written",
        )  # fmt: skip


def add_sizes(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--sizes`` for several sizes, separated by spaces as in ``default``."""
    sizes = [parse_size(size) for size in default.split()]
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=sizes, metavar="SIZE")


def write(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write JSON to a file; do nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# -- output files: unusable files are refused early, and errors have no traceback ------------------


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written.

    Args:
        option: option that names the file, such as ``--json``.
        path: the file; None if the option is not given.

    Raises:
        InvalidArgumentError: its directory does not exist, or the file cannot be written.
    """
    if path is None:
        return
    try:
        _try(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {path}: it cannot be written: {error.strerror}. Name a file in an existing "
            "directory that you can write to."
        ) from error


def check_directory(option: str, path: Path) -> None:
    """Create a directory, and refuse it if no files can be written there.

    Raises:
        InvalidArgumentError: the directory cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try(path / f".collective-{os.getpid()}")
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {path}: no files can be written there: {error.strerror}. Name a directory "
            "that you can create and write to."
        ) from error


def _try(path: Path) -> None:
    """Open a file as it will be opened later, and leave everything as it was."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        # Ask the kernel: permission bits do not show quotas or read-only file systems.
        os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
        path.unlink()
    except FileExistsError:
        if path.is_file() or path.is_dir():  # opening a pipe would wait for a reader
            os.close(os.open(path, flags))


def written(option: str, path: Path | None, write: Callable[[Path], object]) -> bool:
    """Write a file; report on standard error if that fails in spite of the earlier check.

    Returns:
        False if writing failed; True also if ``path`` is None.
    """
    if path is None:
        return True
    try:
        write(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"collective: {option} {path}: {error.strerror}.", file=sys.stderr)
        return False
    return True
