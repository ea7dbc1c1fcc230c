"""What Ctrl-C finds the ranks at: one line instead of a traceback a rank."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .verdict import CONSEQUENCE, plain, traceback_start

__all__ = ["Site", "innermost", "sift", "site_of", "sites_of_threads", "summary"]

_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$')
_INTERRUPT = re.compile(r"KeyboardInterrupt\b")
_UNRAISABLE = "Exception ignored in"
_HOME = Path(__file__).parent.parent
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


class Site(NamedTuple):
    """Where a rank is in its program.

    Attributes:
        path, line, function, source: of the innermost line that is the program's own.
        in_call: whether that line has called us, and so perhaps waits for other ranks.
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
    """Return where a stack is, given from the outside in; None of an empty one."""
    if not frames:
        return None
    ours = [_below(frame.filename, [str(_HOME)]) for frame in frames]
    foreign = [
        frame.filename.startswith("<") or _below(frame.filename, _LIBRARIES) for frame in frames
    ]
    own = [n for n in range(len(frames)) if not ours[n] and not foreign[n]]
    # Of a program that is itself installed, any line but ours.
    own = own or [n for n in range(len(frames)) if not ours[n]] or [0]
    at = own[-1]
    frame = frames[at]
    source = (frame.line or "").strip()
    return Site(frame.filename, frame.lineno or 0, frame.name, source, any(ours[at + 1 :]))


def _below(path: str, directories: Iterable[str]) -> bool:
    return any(path.startswith(f"{directory}{os.sep}") for directory in directories)


def sites_of_threads(idents: Mapping[int, int | None]) -> dict[int, Site]:
    """Return where ranks are that are threads of this process.

    Args:
        idents: of each rank's thread, None of one that has not begun.
    """
    stacks = sys._current_frames()
    found = {}
    for rank, ident in idents.items():
        if ident in stacks:
            site = site_of(traceback.extract_stack(stacks[ident]))
            if site is not None:
                found[rank] = site
    return found


def innermost(frames: Sequence[str]) -> Site | None:
    """Return where the last traceback of some lines ends."""
    found: list[traceback.FrameSummary] = []
    for number, line in enumerate(frames):
        match = _FRAME.match(line)
        if match is None:
            continue
        after = frames[number + 1] if number + 1 < len(frames) else ""
        source = after.strip() if after.startswith("    ") else ""
        found.append(
            traceback.FrameSummary(
                match["path"], int(match["line"]), match["name"], lookup_line=False, line=source
            )
        )
    return site_of(found)


def sift(output: bytes) -> tuple[bytes, Site | None]:
    """Part what a rank wrote after an interrupt from what only says that there was one.

    Args:
        output: what it wrote to its standard error since then.

    Returns:
        That without the tracebacks of KeyboardInterrupt, and of what an interrupt of other ranks
        brought about; and where the interrupt came, where that is told.
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
        elif CONSEQUENCE.match(error):  # whose text may go on for lines
            site = site or innermost(bare[header:end])
        else:
            kept = lines[start:] + kept
        lines = lines[:start]
        if lines and lines[-1].startswith(_UNRAISABLE):
            lines.pop()
    return "".join(lines + kept).encode(), site


def _dump(lines: Sequence[str]) -> int:
    """Return how many lines it takes Python to say that a second interrupt came while it wrote one.

    It says what it knows of the object then, and ends with ``lost sys.stderr``.
    """
    if not lines or not lines[0].startswith("object address"):
        return 0
    end = next((n for n, line in enumerate(lines) if line.startswith("lost sys.stderr")), -1)
    return end + 1 if any("type name: KeyboardInterrupt" in line for line in lines[:end]) else 0


def summary(sites: Mapping[int, Site], stopped: Sequence[int] = ()) -> str:
    """Return one line about an interrupt.

    Args:
        sites: where ranks were, of those of whom that is known.
        stopped: the ranks that did not end and were killed; those are named of which it is not
            known where they were.
    """
    text = "collective run: interrupted"
    if sites:
        # Whoever is in a call may wait for a rank that is not.
        rank = min(sites, key=lambda rank: (sites[rank].in_call, rank))
        text += f"; rank {rank} was at {sites[rank]}"
    silent = sorted(set(stopped) - set(sites))
    if silent:
        listed = ", ".join(map(str, silent))
        text += f"; killed, since it did not heed it: rank {listed}"
    return text + "\n"
