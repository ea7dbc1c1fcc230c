"""Tables for people, with rich where it is installed, and what they are made of."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Observer", "Progress", "duration", "parse_size", "print_table", "size_name", "write"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Return bytes for ``"4"``, ``"64K"``, ``"16M"``."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    nbytes = 0 if match is None else int(match[1]) * _UNITS[match[2].upper()]
    if nbytes < 4:
        raise argparse.ArgumentTypeError(f"{text!r}; at least 4 bytes, such as 4, 64K or 16M")
    return nbytes


def size_name(nbytes: int) -> str:
    """Return bytes as ``"64 KiB"``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Return seconds as microseconds of three digits, without an exponent."""
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


class Observer:
    """Knows, at the end of a run, where it was made and how much others disturbed it."""

    def __init__(self) -> None:
        self._date = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._start = time.monotonic()
        self._busy, self._own = _busy_seconds(), _own_seconds()

    def machine(self) -> dict[str, Any]:
        """Return the place, and ``others``: cores that were taken by other processes.

        Counts what our own ranks took once they have ended, not before.
        """
        wall = time.monotonic() - self._start
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return {
            "date": self._date,
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "others": max(0.0, others / wall),
            "seconds": wall,
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "numpy": np.__version__,
        }


def _cpu() -> str:
    """Return the processor's name and the size of its last cache, which decides much here."""
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if not cache.exists():
        return name
    return f"{name}, {size_name(parse_size(cache.read_text()))} L3"


def _busy_seconds() -> float:
    """Return how long all cores together have been busy since boot, or stolen."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, soft, steal = fields
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool = False
) -> None:
    """Print a table: columns of figures to the right, the first one always to the left."""
    figures = [i > 0 and all(_is_figure(row[i]) for row in rows) for i in range(len(header))]
    if markdown:
        rule = ["---:" if right else "---" for right in figures]
        print(f"**{title}**\n")
        for row in [header, rule, *rows]:
            print(f"| {' | '.join(row)} |")
        print()
        return
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        # Into a pipe or file it must not be cut to the width of a terminal.
        console = Console(width=None if sys.stdout.isatty() else 300)
        table = Table(title=title, title_justify="left")
        for name, right in zip(header, figures):
            table.add_column(name, justify="right" if right else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(title)
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _is_figure(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell in "-–"


class Progress:
    """Says on standard error what is being measured: one line that is written over."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._shown:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def write(path: Path | None, content: Mapping[str, Any]) -> None:
    """Write JSON, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n")
