"""Search for the rank whose failure caused the others, and reports about failed ranks.

When a rank fails, the other ranks fail soon after as a consequence: they detect its loss, receive
its failure, or wait in vain. The exception of a rank shows whether its failure is a consequence.
The cause is the earliest failure that is not a consequence.
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
# A timeout is the cause of other failures, but may itself follow from one. So it ranks between
# a cause and a consequence.
_TIMED_OUT = re.compile(r"(?:\w+\.)*CollectiveTimeoutError\b")
#: An exception that follows from another rank's failure.
CONSEQUENCE = re.compile(r"(?:\w+\.)*(?:PeerLostError|PeerFailedError|CommunicatorAbortedError)\b")
# Number of lines; enough for a message of an extension module or of the dynamic linker.
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class FailedRank:
    """Failure of a rank.

    Attributes:
        rank: number of the rank.
        code: in the form of ``subprocess``: the exit code, or minus the signal's number.
        stderr: the end of the rank's standard error.
    """

    rank: int
    code: int
    stderr: bytes


def first_in_cause(failures: Sequence[FailedRank]) -> FailedRank:
    """Return the failure that caused the others.

    Args:
        failures: at least one, in the order in which the ranks ended.
    """
    return min(failures, key=_distance)  # min keeps the order among equals


def exit_code(failure: FailedRank) -> int:
    """Return the code that a shell would give: 128 + n for a process killed by signal n."""
    return failure.code if failure.code >= 0 else 128 - failure.code


def report(failure: FailedRank) -> str:
    """Return the text that ends a failed run: which rank failed first, and its traceback."""
    return _last_words(failure, "failed first")


def loss(rank: int, code: int, left: int, size: int, least: int, replaced: bool = False) -> str:
    """Return the text for the loss of a rank after which the others continue.

    Args:
        rank: number of the lost rank.
        code: as :attr:`FailedRank.code`.
        left: number of remaining ranks.
        size: number of ranks at the start.
        least: number of ranks that the run needs.
        replaced: whether a new process will join in place of the lost rank.
    """
    return (
        f"collective run: rank {rank} is lost ({_how(code)}); {left} of {size} ranks are left, "
        f"and {least} are enough.{' A new process will join them.' * replaced}\n"
    )


def losses(failures: Sequence[FailedRank], size: int) -> str:
    """Return the summary of a run that continued without some of its ranks."""
    ranks = {failure.rank for failure in failures}  # a replaced rank may have failed repeatedly
    head = f"collective run: {len(ranks)} of {size} ranks {_were(ranks)} lost:\n"
    return head + "".join(_last_words(failure, "was lost") for failure in failures)


def shortfall(failures: Sequence[FailedRank], size: int, least: int) -> str:
    """Return the text for a run that lost so many ranks that it cannot continue."""
    listed = ", ".join(f"rank {failure.rank} ({_how(failure.code)})" for failure in failures)
    ranks = {failure.rank for failure in failures}
    return (
        f"collective run: {len(ranks)} of {size} ranks {_were(ranks)} lost, but {least} must be "
        f"left to continue: {listed}\n"
    )


def _were(failures: Sized) -> str:
    return "was" if len(failures) == 1 else "were"


def _how(code: int) -> str:
    """Return words for a code in the form of ``subprocess``."""
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
    """Return 0 for a cause, 1 for a timeout, 2 for a consequence of another rank's failure."""
    if failure.code < 0:
        return 0
    lines = _COLOUR.sub("", failure.stderr.decode(errors="replace")).splitlines()
    # Check all lines, not only the last exception: an exception may contain the peer's traceback
    # in its text, and the code that handles it may fail in turn.
    if any(CONSEQUENCE.match(line) for line in lines):
        return 2
    return 1 if any(_TIMED_OUT.match(line) for line in lines) else 0


def plain(line: str) -> str:
    """Return a line without its line end and colours."""
    return _COLOUR.sub("", line.rstrip("\r\n"))


def traceback_start(lines: Sequence[str]) -> tuple[int, int] | None:
    """Return where the last chain of tracebacks begins, or None without a traceback.

    Returns:
        The number of the first line of the chain, and that of the last traceback in it.
    """
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    if not headers:
        return None
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
