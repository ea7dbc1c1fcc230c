"""Tracebacks in the text that ranks write: where they begin, which are alike, what to hide.

And where the ranks were at Ctrl-C: one line instead of a traceback for each rank.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from collective.errors import HOMES
from collective.request import name_ranks

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# After init_process_group(), torch.distributed writes this before each line of a traceback.
_PREFIX = re.compile(r"\[rank\d+\]: ")
_HEADER = re.compile(r"(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
# Python reports a syntax error in the program itself without a header and without frames. The
# report begins with the place, which names no function.
_PLACE = re.compile(r'  File "[^"]+", line \d+$')
_BEGIN = re.compile(
    rb"(?:\A|(?<=[\r\n]))(?:\x1b\[[0-9;]*m)*(?:\[rank\d+\]: )?"
    rb"(?:(?:  \+ Exception Group )?Traceback \(most recent call last\):"
    rb"|Exception (?:in thread|ignored in)\b[^\r\n]*:\r?\n"
    rb'|  File "[^"\r\n]+", line \d+\r?\n)'
)
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
#: An exception that follows from another rank's failure.
CONSEQUENCE = re.compile(r"(?:\w+\.)*(?:PeerLostError|PeerFailedError|CommunicatorAbortedError)\b")
# An exception of which the report of another rank says everything.
_SHARED = re.compile(rf"{CONSEQUENCE.pattern}|(?:\w+\.)*MismatchError\b")
# The margin is that of an exception group: "  | ".
_FRAME = re.compile(
    r'(?P<margin>(?: +\| )?)  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$'
)
_INTERRUPT = re.compile(r"KeyboardInterrupt\b")
_UNRAISABLE = "Exception ignored in"
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_REPEATED = re.compile(r"[| ]+\[Previous line repeated (\d+) more times?\]$")
_HIDDEN = re.compile(r"\(\d+ frames? inside collective (?:is|are) hidden; [^)]*\)")


def without_prefix(line: str) -> str:
    """Return a line without the prefix by which torch.distributed names the rank."""
    match = _PREFIX.match(line)
    return line[match.end() :] if match else line


def plain(line: str) -> str:
    """Return a line without its line end, its colours and torch.distributed's prefix."""
    return without_prefix(_COLOUR.sub("", line.rstrip("\r\n")))


def find_traceback(output: bytes) -> int | None:
    """Return the offset of the first line that begins a traceback, or None without one."""
    match = _BEGIN.search(output)
    return match.start() if match else None


def split_traceback(output: bytes) -> tuple[bytes, bytes]:
    """Return what precedes the last chain of tracebacks, and the rest.

    The rest is empty if there is no traceback.
    """
    lines = output.splitlines(keepends=True)
    found = traceback_start([plain(line.decode(errors="replace")) for line in lines])
    if found is None:
        return output, b""
    return b"".join(lines[: found[0]]), b"".join(lines[found[0] :])


def traceback_start(lines: Sequence[str]) -> tuple[int, int] | None:
    """Return where the last chain of tracebacks begins, or None without a traceback.

    Args:
        lines: lines without colours and line ends.

    Returns:
        The number of the first line of the chain, and that of the last traceback in it.
    """
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        places = [number for number, line in enumerate(lines) if _PLACE.match(line)]
        return (places[-1], places[-1]) if places else None
    start = headers[-1]
    for header in reversed(headers[:-1]):
        # Between the frames of a traceback and the header of the next are the lines of its
        # exception and, if the two are chained, the sentence that connects them.
        end = next((n for n in range(header + 1, start) if not lines[n].startswith("  ")), start)
        between = lines[end:start]
        carried = any(CONSEQUENCE.match(line) for line in between[:1])
        if not carried and not any(line in _CHAINED for line in between):
            break
        start = header
    return start, headers[-1]


def in_one_line(lines: Sequence[str], shown: Sequence[str]) -> str:
    """Return a line for a traceback that says nothing that is not shown; "" if it says more.

    Args:
        lines: lines of the traceback, without colours and line ends.
        shown: lines of the traceback that the user sees.
    """
    start = (traceback_start(lines) or (len(lines), 0))[0]
    ends = (n for n in range(start + 1, len(lines)) if not lines[n].startswith("  "))
    end = next(ends, len(lines))
    if end >= len(lines) or not _SHARED.match(lines[end]):
        return ""
    if not {line.strip() for line in lines[end + 1 :]} <= {line.strip() for line in shown}:
        return ""
    error = re.sub(r"^(?:\w+\.)+(?=\w+:)", "", lines[end]).removesuffix("; its traceback:")
    site = innermost(lines[start:end])
    return f"{error.rstrip(':')}, at {site}" if site else error


def hide_internal_frames(lines: Sequence[str], remedy: str = "--verbose") -> list[str]:
    """Return the lines with one line in place of each run of frames inside this package.

    Frames outside the package remain. If there are none, all frames remain: the traceback is then
    that of the package itself.

    Args:
        lines: lines with or without colours and line ends.
        remedy: what shows all frames.
    """
    frames = [match for line in lines if (match := _FRAME.match(plain(line)))]
    if all(match["path"].startswith(HOMES) for match in frames):
        return list(lines)
    result: list[str] = []
    margin: str | None = None  # of the internal frame that the current line belongs to
    hidden = 0

    def close_run() -> None:
        nonlocal margin, hidden
        if hidden:
            words = f"1 frame inside collective is hidden; {remedy} shows it"
            if hidden > 1:
                words = f"{hidden} frames inside collective are hidden; {remedy} shows them"
            result.append(f"{margin}  ({words})")
        margin, hidden = None, 0

    for line in lines:
        text = plain(line)
        match = _FRAME.match(text)
        repeated = _REPEATED.match(text)
        if match and match["path"].startswith(HOMES):
            if margin is not None and margin != match["margin"]:
                close_run()
            margin = match["margin"]
            hidden += 1
        elif margin is not None and match is None and repeated:
            hidden += int(repeated[1])
        elif margin is None or not text.startswith(f"{margin}    "):  # no source line of a frame
            close_run()
            result.append(line)
    close_run()
    return result


def alike(texts: Sequence[tuple[int, str]]) -> list[list[int]]:
    """Return groups of texts that are equal apart from the number of the rank that wrote them.

    Args:
        texts: pairs of a rank and its text.

    Returns:
        Indices into ``texts``, in groups. The groups are in the order of their first texts.
    """
    groups: list[tuple[set[str], list[int]]] = []
    for number, (rank, text) in enumerate(texts):
        # Ranks may also differ in how many frames are hidden.
        text = _HIDDEN.sub("", _COLOUR.sub("", text))
        # "[rank 3 of 4]" names the rank that reports. A plain "rank 3" may name that rank, too, or
        # one of which all ranks report the same.
        reported = re.sub(rf"\[rank {rank}(?: of \d+)?\]", "[this rank]", text)
        keys = {reported, re.sub(rf"\brank {rank}\b", "this rank", reported)}
        members = [number]
        for other in [group for group in groups if not keys.isdisjoint(group[0])]:
            groups.remove(other)
            keys |= other[0]
            members = other[1] + members
        groups.append((keys, sorted(members)))
    return sorted(members for _, members in groups)


# -- where the ranks were at Ctrl-C ------------------------------------------------------------


class Location(NamedTuple):
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


def site_of(frames: Sequence[traceback.FrameSummary]) -> Location | None:
    """Return the position of a stack, given from the outermost frame; None if it is empty."""
    if not frames:
        return None
    internal = [frame.filename.startswith(HOMES) for frame in frames]
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
    return Location(frame.filename, frame.lineno or 0, frame.name, source, any(internal[at + 1 :]))


def _below(path: str, directories: Iterable[str]) -> bool:
    return any(path.startswith(f"{directory}{os.sep}") for directory in directories)


def sites_of_threads(idents: Mapping[int, int | None]) -> dict[int, Location]:
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


def innermost(frames: Sequence[str]) -> Location | None:
    """Return the position at which the last traceback in the lines ends."""
    summaries: list[traceback.FrameSummary] = []
    for number, line in enumerate(frames):
        match = _FRAME.match(line)
        if match is None or match["margin"]:
            continue
        after = frames[number + 1] if number + 1 < len(frames) else ""
        source = after.strip() if after.startswith("    ") else ""
        summaries.append(
            traceback.FrameSummary(
                match["path"], int(match["line"]), match["name"], lookup_line=False, line=source
            )
        )
    return site_of(summaries)


def sift(output: bytes) -> tuple[bytes, Location | None]:
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


def summary(sites: Mapping[int, Location], stopped: Sequence[int] = ()) -> str:
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
