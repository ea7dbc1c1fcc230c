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

from collective.request import name_ranks

from .tracebacks import (
    CONSEQUENCE,
    alike,
    hide_internal_frames,
    in_one_line,
    plain,
    traceback_start,
    without_prefix,
)
from .variables import Run

# A timeout is the cause of other failures, but may itself follow from one. So it ranks between
# a cause and a consequence.
_TIMED_OUT = re.compile(r"(?:\w+\.)*CollectiveTimeoutError\b")
# Number of lines; enough for a message of an extension module or of the dynamic linker.
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class FailedRank:
    """Failure of a rank.

    Attributes:
        rank: number of the rank.
        code: in the form of ``subprocess``: the exit code, or minus the signal's number.
        stderr: the end of the rank's standard error, at least from its last traceback on. None
            if nobody collects it.
        fate: how the rank ended, in words, if the code does not tell.
    """

    rank: int
    code: int
    stderr: bytes | None
    fate: str = ""

    @property
    def exit_code(self) -> int:
        """Code that a shell would give: 128 + n for a process killed by signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        """Words for how the rank ended, also if it has not failed."""
        if self.fate:
            return self.fate
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-self.code}"


def first_in_cause(failures: Sequence[FailedRank]) -> FailedRank:
    """Return the failure that caused the others.

    Args:
        failures: at least one, in the order in which the ranks ended.
    """
    return min(failures, key=_distance)  # min keeps the order among equals


def report(
    run: Run, failures: Sequence[FailedRank], first: FailedRank, others: Sequence[FailedRank] = ()
) -> str:
    """Return the text that ends a failed run: tracebacks, and last that of the first failure.

    Ranks whose tracebacks are alike share one. A rank whose traceback says nothing beyond the last
    one gets a line, unless the run is verbose.

    Args:
        run: the run.
        failures: all failures, in the order in which the ranks ended.
        first: failure that caused the others.
        others: failures whose tracebacks the user has not seen yet.
    """
    beginning = _shortfall(run, failures) if run.least < run.size else ""
    shown = [*others, first]
    words = [_LastWords(failure, run.verbose) for failure in shown]
    blocks = [beginning]
    for group in alike([(f.rank, text.text) for f, text in zip(shown, words, strict=True)]):
        ranks = [shown[number].rank for number in group]
        head = f"{name_ranks(ranks)} failed"
        if len(others) not in group:
            line = "" if run.verbose else words[group[0]].after(words[-1])
            if line:
                blocks.append(f"collective run: {head}, too: {line}\n")
            else:
                blocks.append(words[group[0]].block(head, ranks))
        elif len(set(ranks)) == 1:
            last = f"{head} first ({first.how})"
        else:
            last = f"{head}, rank {first.rank} first ({first.how})"
    return "".join([*blocks, words[-1].block(last, [first.rank])])


def loss(run: Run, failure: FailedRank, left: int, replaced: bool = False) -> str:
    """Return the text for the loss of a rank after which the others continue.

    Args:
        run: the run.
        failure: failure of the lost rank.
        left: number of remaining ranks.
        replaced: whether a new process will join in place of the lost rank.
    """
    return (
        f"collective run: rank {failure.rank} is lost ({failure.how}); {left} of {run.size} "
        f"ranks are left, and {run.least} are enough."
        f"{' A new process will join them.' * replaced}\n"
    )


def losses(run: Run, failures: Sequence[FailedRank]) -> str:
    """Return the summary of a run that continued without some of its ranks.

    Args:
        run: the run.
        failures: at least one. A rank that was replaced may be among them repeatedly.
    """
    ranks = {failure.rank for failure in failures}
    blocks = [f"collective run: {len(ranks)} of {run.size} ranks {_were(ranks)} lost:\n"]
    words = [_LastWords(failure, run.verbose) for failure in failures]
    for group in alike(
        [(f.rank, f"{f.how}\n{text.text}") for f, text in zip(failures, words, strict=True)]
    ):
        lost = [failures[number].rank for number in group]
        head = f"{name_ranks(lost)} {_were(set(lost))} lost ({failures[group[0]].how})"
        blocks.append(words[group[0]].block(head, lost))
    return "".join(blocks)


def _shortfall(run: Run, failures: Sequence[FailedRank]) -> str:
    """Return the text for a run that lost so many ranks that it cannot continue."""
    listed = ", ".join(f"rank {failure.rank} ({failure.how})" for failure in failures)
    ranks = {failure.rank for failure in failures}
    return (
        f"collective run: {len(ranks)} of {run.size} ranks {_were(ranks)} lost, but {run.least} "
        f"must be left to continue: {listed}\n"
    )


def _were(failures: Sized) -> str:
    return "was" if len(failures) == 1 else "were"


class _LastWords:
    """End of the standard error of a rank that failed: its traceback, or else its last lines.

    Attributes:
        text: the lines, each with its end; empty if the rank wrote nothing.
    """

    def __init__(self, failure: FailedRank, verbose: bool) -> None:
        self._rank = failure.rank
        self._is_known = failure.stderr is not None
        lines = (failure.stderr or b"").decode(errors="replace").splitlines()
        start = traceback_start([plain(line) for line in lines])
        self._has_traceback = start is not None
        if start is None:
            lines = lines[-_LAST_LINES:]
        else:
            # The headline names the ranks. Without the prefix, equal tracebacks are alike.
            lines = [without_prefix(line) for line in lines[start[0] :]]
        self._plain = [plain(line) for line in lines]
        if not verbose:
            lines = hide_internal_frames(lines)
        self.text = "".join(f"{line}\n" for line in lines) if any(map(str.strip, lines)) else ""

    def after(self, first: _LastWords) -> str:
        """Return a line in place of the text if it says nothing beyond that of ``first``, or ""."""
        return in_one_line(self._plain, first._plain) if self._has_traceback else ""

    def block(self, head: str, ranks: Sequence[int]) -> str:
        """Return the text under a headline.

        Args:
            head: what happened to which ranks.
            ranks: ranks that share this text.
        """
        if not self._is_known:
            return f"collective run: {head}.\n"
        alone = len(set(ranks)) == 1
        if not self.text:
            words = "it wrote nothing to its" if alone else "they wrote nothing to their"
            return f"collective run: {head}; {words} standard error.\n"
        if self._has_traceback:
            words = "its traceback" if alone else f"the traceback of rank {self._rank}"
        else:
            whose = "its" if alone else f"rank {self._rank}'s"
            words = f"the last lines of {whose} standard error"
        return f"collective run: {head}; {words}:\n{self.text}"


def _distance(failure: FailedRank) -> int:
    """Return 0 for a cause, 1 for a timeout, 2 for a consequence of another rank's failure."""
    if failure.code < 0:
        return 0
    lines = [plain(line) for line in (failure.stderr or b"").decode(errors="replace").splitlines()]
    # Check all lines, not only the last exception: an exception may contain the peer's traceback
    # in its text, and the code that handles it may fail in turn.
    if any(CONSEQUENCE.match(line) for line in lines):
        return 2
    return 1 if any(_TIMED_OUT.match(line) for line in lines) else 0
