"""Report of where the ranks were at Ctrl-C: one line instead of a traceback for each rank."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from collective.request import name_ranks

from .tracebacks import CONSEQUENCE, plain, traceback_start

__all__ = ["Site", "innermost", "sift", "site_of", "sites_of_threads", "summary"]

_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')
_INTERRUPT = re.compile(r"KeyboardInterrupt\b")
_UNRAISABLE = "Exception ignored in"
_HOME = Path(__file__).parent.parent
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


class Site(NamedTuple):
    """Position of a rank in its program.

    Attributes:
        path, line, function, source: position of the innermost line of the program itself.
        in_call: whether this line has called into this package, and so may wait for other ranks.
    """

    path: str
    line: int
    function: str
    source: str
    in_call: bool

    def __str__(self) -> str:
        path = os.path.relpath(self.path)
        path = self.path if path.startswith("..") else path
        source = f": {self.source}" if self.source else ""
        return f"{path}:{self.line}, in {self.function}{source}"


def site_of(frames: Sequence[traceback.FrameSummary]) -> Site | None:
    """Return the position of a stack, given from the outermost frame; None if it is empty."""
    if not frames:
        return None
    internal = [_below(frame.filename, [str(_HOME)]) for frame in frames]
    foreign = [
        frame.filename.startswith("<") or _below(frame.filename, _LIBRARIES) for frame in frames
    ]
    own = [n for n in range(len(frames)) if not internal[n] and not foreign[n]]
    # An installed program has no lines outside the libraries. Then take any line that is not of
    # this package.
    own = own or [n for n in range(len(frames)) if not internal[n]] or [0]
    at = own[-1]
    frame = frames[at]
    source = (frame.line or "").strip()
    return Site(frame.filename, frame.lineno or 0, frame.name, source, any(internal[at + 1 :]))


def _below(path: str, directories: Iterable[str]) -> bool:
    return any(path.startswith(f"{directory}{os.sep}") for directory in directories)


def sites_of_threads(idents: Mapping[int, int | None]) -> dict[int, Site]:
    """Return the positions of ranks that are threads of this process.

    Args:
        idents: identifier of the thread of each rank; None if the thread has not begun.
    """
    stacks = sys._current_frames()
    sites = {}
    for rank, ident in idents.items():
        if ident in stacks:
            site = site_of(traceback.extract_stack(stacks[ident]))
            if site is not None:
                sites[rank] = site
    return sites


def innermost(frames: Sequence[str]) -> Site | None:
    """Return the position at which the last traceback in the lines ends."""
    summaries: list[traceback.FrameSummary] = []
    for number, line in enumerate(frames):
        match = _FRAME.match(line)
        if match is None:
            continue
        after = frames[number + 1] if number + 1 < len(frames) else ""
        source = after.strip() if after.startswith("    ") else ""
        summaries.append(
            traceback.FrameSummary(
                match["path"], int(match["line"]), match["name"], lookup_line=False, line=source
            )
        )
    return site_of(summaries)


def sift(output: bytes) -> tuple[bytes, Site | None]:
    """Remove the parts of a rank's output that only report an interrupt.

    Args:
        output: output to standard error since the interrupt.

    Returns:
        The output without the tracebacks of KeyboardInterrupt, and without the tracebacks that
        follow from the interrupt of other ranks. And the position of the rank at the interrupt, if
        a traceback shows it.
    """
    lines = output.decode(errors="replace").splitlines(keepends=True)
    kept: list[str] = []
    site = None
    while (found := traceback_start([plain(line) for line in lines])) is not None:
        start, header = found
        bare = [plain(line) for line in lines]
        end = next(
            (n for n in range(header + 1, len(bare)) if bare[n].strip() and bare[n][:2] != "  "),
            len(bare),
        )
        error = bare[end] if end < len(bare) else ""
        length = 1 if _INTERRUPT.match(error) else _dump(bare[end:])
        if length:
            site = innermost(bare[header:end]) or site
            kept = lines[end + length :] + kept
        elif CONSEQUENCE.match(error):
            # The text of the error may have several lines, so drop all up to the next traceback.
            site = site or innermost(bare[header:end])
        else:
            kept = lines[start:] + kept
        lines = lines[:start]
        if lines and lines[-1].startswith(_UNRAISABLE):
            lines.pop()
    return "".join(lines + kept).encode(), site


def _dump(lines: Sequence[str]) -> int:
    """Return the length of Python's report of a second interrupt while it printed the first one.

    The length is in lines, 0 if ``lines`` do not begin with such a report. The report describes
    the object, and ends with ``lost sys.stderr``.
    """
    if not lines or not lines[0].startswith("object address"):
        return 0
    end = next((n for n, line in enumerate(lines) if line.startswith("lost sys.stderr")), -1)
    return end + 1 if any("type name: KeyboardInterrupt" in line for line in lines[:end]) else 0


def summary(sites: Mapping[int, Site], stopped: Sequence[int] = ()) -> str:
    """Return one line about an interrupt.

    Args:
        sites: positions of ranks, as far as tracebacks or stacks show them.
        stopped: ranks that did not end and were killed. The line names those without a known
            position.
    """
    text = "collective run: interrupted"
    if sites:
        # Prefer a rank that is not in a call: the ranks in calls may wait for it.
        rank = min(sites, key=lambda rank: (sites[rank].in_call, rank))
        text += f"; rank {rank} was at {sites[rank]}"
    silent = sorted(set(stopped) - set(sites))
    if silent:
        text += f"; killed after ignoring the interrupt: {name_ranks(silent)}"
    return text + "\n"
