"""Which rank failed first in cause, and what it said.

When one rank fails, the others fail soon after because it did: they find it gone, get
its failure passed on, or wait in vain. Such a failure is told by its exception, and the
one to show is the earliest that is not such a consequence.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence, Sized
from dataclasses import dataclass

__all__ = [
    "CONSEQUENCE",
    "FailedRank",
    "exit_code",
    "first_in_cause",
    "loss",
    "losses",
    "plain",
    "report",
    "shortfall",
    "traceback_start",
]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HEADER = re.compile(r"(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# A timeout comes before what it causes, so it ranks between a cause and a consequence.
_TIMED_OUT = re.compile(r"(?:\w+\.)*CollectiveTimeoutError\b")
#: An exception that follows from another rank's failure.
CONSEQUENCE = re.compile(r"(?:\w+\.)*(?:PeerLostError|PeerFailedError|CommunicatorAbortedError)\b")
# Enough for a message of an extension or of the dynamic linker.
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class FailedRank:
    """A rank that failed.

    Attributes:
        rank: which.
        code: as ``subprocess`` gives it: the exit code, or minus the signal's number.
        stderr: the end of what it wrote there.
    """

    rank: int
    code: int
    stderr: bytes


def first_in_cause(failures: Sequence[FailedRank]) -> FailedRank:
    """Return the failure that the others follow from.

    Args:
        failures: at least one, in the order in which the ranks ended.
    """
    return min(failures, key=_distance)  # min keeps the order among equals


def exit_code(failure: FailedRank) -> int:
    """Return the code a shell would give: 128 + n for a process killed by signal n."""
    return failure.code if failure.code >= 0 else 128 - failure.code


def report(failure: FailedRank) -> str:
    """Return the last words of a run that failed."""
    return _last_words(failure, "failed first")


def loss(rank: int, code: int, left: int, size: int, least: int, replaced: bool = False) -> str:
    """Return what is said when a rank is lost and the others go on.

    Args:
        rank: which, of ``size``.
        code: as :attr:`FailedRank.code`.
        left: how many are left.
        least: how many have to be.
        replaced: whether another process is to join in its place.
    """
    return (
        f"collective run: rank {rank} is lost ({_how(code)}); {left} of {size} ranks are left, "
        f"and {least} are enough.{' Another is to join them.' * replaced}\n"
    )


def losses(failures: Sequence[FailedRank], size: int) -> str:
    """Return the summary of a run that went on without some of its ranks."""
    ranks = {failure.rank for failure in failures}  # some of them more than once
    head = f"collective run: {len(ranks)} of {size} ranks {_were(ranks)} lost:\n"
    return head + "".join(_last_words(failure, "was lost") for failure in failures)


def shortfall(failures: Sequence[FailedRank], size: int, least: int) -> str:
    """Return what is said of a run that lost more ranks than it can do without."""
    listed = ", ".join(f"rank {each.rank} ({_how(each.code)})" for each in failures)
    ranks = {failure.rank for failure in failures}
    return (
        f"collective run: {len(ranks)} of {size} ranks {_were(ranks)} lost, and {least} have "
        f"to be left: {listed}\n"
    )


def _were(failures: Sized) -> str:
    return "was" if len(failures) == 1 else "were"


def _how(code: int) -> str:
    """Say how a rank ended whose code ``subprocess`` gives so."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"


def _last_words(failure: FailedRank, what: str) -> str:
    head = f"collective run: rank {failure.rank} {what} ({_how(failure.code)})"
    text = failure.stderr.decode(errors="replace")
    lines = text.splitlines()
    found = traceback_start([plain(line) for line in lines])
    if found is not None:
        start, _ = found
        return "\n".join([f"{head}; its traceback:", *lines[start:]]) + "\n"
    if text.strip():
        last = lines[-_LAST_LINES:]
        return "\n".join([f"{head}; the last lines of its standard error:", *last]) + "\n"
    return f"{head}; it wrote nothing to its standard error.\n"


def _distance(failure: FailedRank) -> int:
    """Return 0 for a cause, more for what follows from another rank's failure."""
    if failure.code < 0:
        return 0
    lines = _COLOUR.sub("", failure.stderr.decode(errors="replace")).splitlines()
    # Not only the last exception: one of these may carry its peer's traceback in its
    # text, and code that handles it may fail in turn.
    if any(CONSEQUENCE.match(line) for line in lines):
        return 2
    return 1 if any(_TIMED_OUT.match(line) for line in lines) else 0


def plain(line: str) -> str:
    """Return a line without its end and its colours."""
    return _COLOUR.sub("", line.rstrip("\r\n"))


def traceback_start(lines: Sequence[str]) -> tuple[int, int] | None:
    """Return where the last traceback begins, with all that it is chained to; None if none does.

    Returns:
        The first line of the chain, and that of the last traceback in it.
    """
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return None
    start = headers[-1]
    for header in reversed(headers[:-1]):
        # What stands between the frames of one traceback and the header of the next:
        # its exception, perhaps with a text of several lines, and what joins them.
        end = next((n for n in range(header + 1, start) if not lines[n].startswith("  ")), start)
        between = lines[end:start]
        carried = any(CONSEQUENCE.match(line) for line in between[:1])
        if not carried and not any(line in _CHAINED for line in between):
            break
        start = header
    return start, headers[-1]
