"""Tracebacks in the text that ranks write: where they begin, which are alike, what to hide."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = [
    "CONSEQUENCE",
    "alike",
    "find_traceback",
    "hide_internal_frames",
    "plain",
    "split_traceback",
    "traceback_start",
    "without_prefix",
]

#: Directory of the package. Its frames are internal.
_HOME = str(Path(__file__).parent.parent) + os.sep
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
# The margin is that of an exception group: "  | ".
_FRAME = re.compile(r'(?P<margin>(?: +\| )?)  File "(?P<path>[^"]+)", line \d+, in ')
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


def hide_internal_frames(lines: Sequence[str]) -> list[str]:
    """Return the lines with one line in place of each run of frames inside this package.

    Frames outside the package remain. If there are none, all frames remain: the traceback is then
    that of the package itself.
    """
    frames = [match for line in lines if (match := _FRAME.match(plain(line)))]
    if all(match["path"].startswith(_HOME) for match in frames):
        return list(lines)
    result: list[str] = []
    margin: str | None = None  # of the internal frame that the current line belongs to
    hidden = 0

    def close_run() -> None:
        nonlocal margin, hidden
        if hidden:
            words = "1 frame inside collective is hidden; --verbose shows it"
            if hidden > 1:
                words = f"{hidden} frames inside collective are hidden; --verbose shows them"
            result.append(f"{margin}  ({words})")
        margin, hidden = None, 0

    for line in lines:
        text = plain(line)
        match = _FRAME.match(text)
        repeated = _REPEATED.match(text)
        if match and match["path"].startswith(_HOME):
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
