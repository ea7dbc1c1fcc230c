"""Helpers of the commands: figures with units, tables, one line of progress, options.

This module imports neither NumPy nor rich, which a listing of the commands does not need.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from collective.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

__all__ = [
    "Output", "Progress", "add_outputs", "add_sizes", "aligned", "check_known", "console", "count",
    "counts", "escape", "lines", "microseconds", "names", "narrowest", "parse_size", "parts",
    "print_table", "rate_name", "size_name", "table", "time_name", "width", "write",
]  # fmt: skip

_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIMES = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
# Width for output to a pipe or a file, so that text is not cut to the width of a terminal.
_UNCUT = 300
# Characters that rich puts between two columns, for this box and padding.
_RICH_GAP = 3
# Characters of the progress bar: usual number, and least number.
_BAR, _LEAST_BAR = 20, 5
# Least time between two lines of progress with the same text, in seconds.
_LINE_S = 10.0
# Text that rich would read as the beginning of a mark-up.
_BRACKET = re.compile(r"(\\*)(\[[a-z#/@][^[]*?\])")
_ESCAPED = re.compile(r"(\\*)\\(\[[a-z#/@])")
#: Spaces between two columns.
GAP = 2
# Width to which a column of words is narrowed before the column goes into a further part.
_NARROW = 24
#: Colour mark-up of rich.
MARKUP = re.compile(r"\[/?[a-z]*\]")

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


def width() -> int:
    """Return the width for output: COLUMNS, else that of the terminal, else a large width."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return _UNCUT


class Output(Protocol):
    """Standard output for text with colours and for tables: rich's console, or a plain one."""

    def print(
        self,
        *objects: Any,
        end: str = "\n",
        markup: bool | None = None,
        soft_wrap: bool | None = None,
    ) -> None:
        """Print texts and tables.

        Args:
            objects: texts, and tables of :func:`table`.
            end: text after them.
            markup: whether ``[red]`` is a colour; by default as for this output.
            soft_wrap: if true, do not wrap the text.
        """

    def rule(self, *, style: str) -> None:
        """Print a line across the output."""


def console(markup: bool = True, least: int = _UNCUT) -> Output:
    """Return rich's console for standard output, or a plain one if rich is not installed.

    Args:
        markup: whether ``[red]`` is a colour; False for text such as ``[rank 1 of 4]``.
        least: least width if standard output is not a terminal and COLUMNS is not set.
    """
    if not _has_rich():
        return _PlainConsole(markup, least)
    from rich.console import Console

    made = Console(highlight=False, markup=markup)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = max(least, made.width)
    return made


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def escape(text: str) -> str:
    """Return a text for a cell with mark-up, in which brackets are no colours."""
    return _BRACKET.sub(lambda match: f"{match[1] * 2}\\{match[2]}", text)


def _without_markup(text: str) -> str:
    bare = re.sub(rf"(?<!\\)(?:{MARKUP.pattern})", "", text)
    return _ESCAPED.sub(lambda match: match[1][: len(match[1]) // 2] + match[2], bare)


class _PlainConsole:
    """Replacement of rich's console that prints text without colours."""

    def __init__(self, markup: bool, least: int) -> None:
        self._markup = markup
        is_known = "COLUMNS" in os.environ or sys.stdout.isatty()
        self._width = width() if is_known else least

    def print(
        self,
        *objects: Any,
        end: str = "\n",
        markup: bool | None = None,
        soft_wrap: bool | None = None,
    ) -> None:
        texts = []
        for each in objects:
            if isinstance(each, _Fitting):
                texts.append("\n".join([*each.lines(self._width), ""]))
                continue
            is_marked = self._markup if markup is None else markup
            text = _without_markup(str(each)) if is_marked else str(each)
            texts.append(text if soft_wrap else self._wrapped(text))
        print(*texts, end=end)

    def rule(self, *, style: str) -> None:
        print("─" * self._width)

    def _wrapped(self, text: str) -> str:
        return "\n".join(
            textwrap.fill(
                line, self._width, break_long_words=False, break_on_hyphens=False,
                drop_whitespace=len(line) > self._width,
            )
            for line in text.split("\n")
        )  # fmt: skip


class _Fitting:
    """Table for rich in as many parts as are needed to fit the width of the console."""

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

    def lines(self, wide: int) -> list[str]:
        """Return the lines of the table without colours, for an output of some width."""
        rows = self._rows
        if self._markup:
            rows = [[_without_markup(cell) for cell in row] for row in rows]
        least = narrowest(self._header, rows, wide, by_words=False)
        shown = [self._title]
        for columns in parts(self._header, rows, least, wide):
            shown += lines([[row[n] for n in columns] for row in [self._header, *rows]], wide)
        return shown

    def _part(self, title: str, columns: Mapping[int, int]) -> Table:
        from rich import box
        from rich.table import Table

        part = Table(
            title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
            show_edge=False,
        )  # fmt: skip
        right = figures(self._header, self._rows)
        for n, column_width in columns.items():  # rich's own choice of widths may drop a column
            part.add_column(
                self._header[n], justify="right" if right[n] else "left", width=column_width,
                overflow="fold",
            )  # fmt: skip
        for row in self._rows:
            part.add_row(*(row[n] for n in columns))
        return part


def table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markup: bool = True
) -> _Fitting:
    """Return a table for rich. Columns of figures are aligned right; the first column is not.

    If the console is narrower than the table, some columns form further parts below.

    Args:
        markup: whether ``[red]`` in a cell is a colour, as for a default :func:`console`.
    """
    return _Fitting(title, header, rows, markup)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False
) -> None:
    """Print a table, with rich if that is installed."""
    if markdown:
        rule = ["---:" if right else "---" for right in figures(header, rows)]
        print(f"**{title}**\n")
        for row in [header, rule, *rows]:
            print(f"| {' | '.join(row)} |")
        print()
    else:
        console(markup=False).print(table(title, header, rows, markup=False))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with aligned columns; a last column that is too wide is wrapped."""
    return "\n".join(lines(rows, width()))


# -- fitting --------------------------------------------------------------------------------------
#
# If a table is wider than a terminal, the columns that do not fit form a further part below. Each
# part begins with the columns that name the subject of its rows. Figures are never cut or wrapped;
# a column of words is wrapped.


def figures(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return which columns hold figures, ignoring colours; the first column never does."""
    return [i > 0 and all(_is_figure(row[i]) for row in rows) for i in range(len(header))]


def _is_figure(cell: str) -> bool:
    shown = MARKUP.sub("", cell)
    return not shown or shown.lstrip("+-")[:1].isdigit() or shown in "-–"


def narrowest(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    markup: bool = False,
    by_words: bool = True,
) -> list[int]:
    """Return the least width of each column, in characters.

    Args:
        header, rows: the whole table.
        width: width of the terminal or page.
        markup: whether ``[red]`` is a colour.
        by_words: whether the words of a column's name may stand below each other.
    """
    least = []
    for n, (name, is_figure) in enumerate(zip(header, figures(header, rows))):
        cells = [MARKUP.sub("", row[n]) if markup else row[n] for row in rows]
        widest = max(map(len, [*cells, ""]))
        if not is_figure:
            widest = min(widest, _narrow(width))
        least.append(max(widest, *map(len, name.split() if by_words and name else [name])))
    return least


def parts(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    least: Sequence[int],
    width: int,
    gap: int = GAP,
) -> list[list[int]]:
    """Return the columns of each part of a table, so that each part is up to ``width`` wide.

    A part with only one column beside its key columns may be wider.

    Args:
        header, rows: the whole table.
        least: the table's widths of :func:`narrowest`.
        width: width in characters.
        gap: spaces between two columns.
    """
    keys = [0, 1] if len(header) > 1 and not figures(header, rows)[1] else [0]
    room = width - sum(least[n] for n in keys) - gap * (len(keys) - 1)
    groups: list[list[int]] = []
    left = 0
    for n in range(len(keys), len(header)):
        if not groups or least[n] + gap > left:
            groups.append(list(keys))
            left = room
        groups[-1].append(n)
        left -= least[n] + gap
    return groups or [keys]


def widened(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: Sequence[int],
    least: Sequence[int],
    room: int,
) -> list[int]:
    """Return the width of each column of a part, when ``room`` more characters are available.

    Columns that lack least come first. No column gets more than it needs.
    """
    needs = {
        n: max(len(MARKUP.sub("", cell)) for cell in (header[n], *(row[n] for row in rows)))
        for n in columns
    }
    widths = {n: least[n] for n in columns}
    for n in sorted(columns, key=lambda n: needs[n] - least[n]):
        more = max(0, min(needs[n] - least[n], room))
        widths[n] += more
        room -= more
    return [widths[n] for n in columns]


def _narrow(width: int) -> int:
    """Return the width to which a column of words is narrowed at most."""
    return max(_NARROW, width // 4)


def lines(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows as lines with aligned columns, up to ``width`` wide if possible.

    The last column is wrapped only at spaces, so that a path can be copied. If a cell is wider than
    its column, the row continues on a new line.
    """
    limit = _narrow(width)
    starts = [0]
    for column in list(zip(*rows))[:-1]:
        wide = max([len(cell) for cell in column if len(cell) <= limit], default=limit)
        starts.append(starts[-1] + wide + GAP)
    output = []
    for row in rows:
        line = ""
        for start, cell in zip(starts, row[:-1]):
            if len(line) > max(0, start - GAP):
                output.append(line)
                line = ""
            line = line.ljust(start) + cell
        if len(line) > max(0, starts[-1] - GAP):
            output.append(line)
            line = ""
        last = textwrap.wrap(
            row[-1], max(1, width - starts[-1]), break_long_words=False, break_on_hyphens=False
        )
        output.append(line.ljust(starts[-1]) + (last[0] if last else ""))
        output += [" " * starts[-1] + part for part in last[1:]]
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


def count(text: str) -> int:
    """Return an integer of at least one."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected an integer >= 1")
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
    """Add ``--json`` and ``--markdown``, and, if ``earlier`` is true, ``--from``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    if earlier:
        parser.add_argument(
            "--from", dest="earlier", type=Path, metavar="FILE",
            help="measure nothing, and show the results in FILE, which --json has written",
        )  # fmt: skip


def add_sizes(
    parser: argparse.ArgumentParser, default: str, option: str = "--sizes", text: str | None = None
) -> None:
    """Add an option for several sizes, separated by spaces as in ``default``."""
    sizes = [parse_size(size) for size in default.split()]
    parser.add_argument(
        option, nargs="+", type=parse_size, default=sizes, metavar="SIZE", help=text
    )


def write(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write JSON to a file; do nothing without a path."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
