"""Outcome of a rank's job, and one exception for the failures of all ranks, the cause first."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from collective import CollectiveTimeoutError, CommunicatorAbortedError
from collective.errors import CollectiveError, ToldByText, outer_frames
from collective.request import name_ranks

from .tracebacks import Location, alike, hide_internal_frames, in_one_line, innermost, site_of


class RankDiedError(Exception):
    """A rank ended without an outcome: its process ended by itself or was killed.

    Attributes:
        exitcode: exit code of the process, negative for a signal. None for a thread, or if it is
            unknown.
        output: the end of the output of the ranks and of the command that started them. Empty if
            this output was shown at once.
    """

    def __init__(self, message: str, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.exitcode = exitcode
        self.output = ""

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}; the last output was:\n{self.output}" if self.output else message


class RankHungError(Exception):
    """A rank had not returned when its time was over; the text shows its stacks.

    Attributes:
        stack: stacks of the rank's threads as text; empty if they are not available.
        site: position of the main thread in the rank's program; None if it is not known.
    """

    def __init__(self, message: str, stack: str = "") -> None:
        super().__init__(message)
        self.stack = stack

    @property
    def site(self) -> Location | None:
        main = self.stack.partition("thread main:\n")[2].partition("\nthread ")[0]
        return innermost(main.splitlines())

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}; its stacks were:\n{self.stack}" if self.stack else message


class RemoteError(Exception):
    """Substitute for an exception of a rank's process that could not be pickled."""


@dataclass(frozen=True)
class Outcome:
    """Result of a rank's part of a job.

    Attributes:
        value: return value of the job.
        error: exception that the job raised, or None.
        traceback: traceback as text.
        when: time of the end, on the clock of ``time.monotonic()``.
    """

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    when: float = field(default_factory=monotonic)

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        """Return the outcome of a rank that raised ``error``.

        The frames above the user's function are omitted. They set ``__tracebackhide__``, as for
        pytest. An error of this package keeps the frames outside the package.
        """
        trace = error.__traceback__
        while trace is not None and "__tracebackhide__" in trace.tb_frame.f_locals:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        if isinstance(error, CollectiveError):
            trace = outer_frames(trace)
        error.__traceback__ = trace or error.__traceback__
        return cls(error=error, traceback=text)

    def portable(
        self,
        dumps: Callable[[Any], bytes] = pickle.dumps,
        loads: Callable[[bytes], Any] = pickle.loads,
    ) -> Outcome:
        """Return the outcome with a text in place of an exception that cannot be pickled."""
        try:
            loads(dumps(self.error))  # some exceptions can be pickled but not unpickled
        except Exception:  # a user's __reduce__ may raise anything
            stand_in = RemoteError(f"{type(self.error).__name__}: {self.error}")
            return Outcome(error=stand_in, traceback=self.traceback, when=self.when)
        return self


class RanksFailedError(ToldByText, Exception):
    """Ranks of a job failed.

    The text begins with the exception of the rank that failed first, which is also the
    ``__cause__``. Then come tracebacks, without the frames inside this package. Ranks whose
    tracebacks are alike share one, and a rank that failed as a consequence has a line.

    Attributes:
        errors: exceptions by rank, the cause first.
        tracebacks: whole tracebacks as text, by rank.
        results: return values by rank, for the ranks that did not fail.
        size: number of ranks of the job.
    """

    def __init__(
        self,
        errors: Mapping[int, BaseException],
        tracebacks: Mapping[int, str],
        results: Mapping[int, Any],
        size: int,
    ) -> None:
        super().__init__(dict(errors), dict(tracebacks), dict(results), size)
        self.errors: dict[int, BaseException] = dict(errors)
        self.tracebacks: dict[int, str] = dict(tracebacks)
        self.results: dict[int, Any] = dict(results)
        self.size = size
        self.__cause__ = self.cause

    @classmethod
    def of(cls, outcomes: Mapping[int, Outcome], size: int) -> RanksFailedError | None:
        """Return the exception for the ranks that failed, or None if no rank failed."""
        failed: dict[int, tuple[int, float, BaseException]] = {}
        for rank, outcome in outcomes.items():
            if outcome.error is not None:
                failed[rank] = (_weight(outcome.error), outcome.when, outcome.error)
        if not failed:
            return None
        ranks = sorted(failed, key=lambda rank: failed[rank][:2])
        return cls(
            {rank: failed[rank][2] for rank in ranks},
            {rank: outcomes[rank].traceback for rank in ranks},
            {rank: out.value for rank, out in sorted(outcomes.items()) if out.error is None},
            size,
        )

    @property
    def cause(self) -> BaseException:
        """Exception that most likely caused the others."""
        return next(iter(self.errors.values()))

    def __str__(self) -> str:
        first = next(iter(self.errors))
        parts = [f"rank {first} of {self.size} failed first: {_named(self.cause)}"]
        texts = {
            rank: (self.tracebacks.get(rank) or _named(error)).rstrip()
            for rank, error in self.errors.items()
        }
        shown = texts[first].splitlines()
        if self.cause.__traceback__ is not None:
            # Python shows the traceback of the cause itself, before this text.
            site = site_of(traceback.extract_tb(self.cause.__traceback__))
            parts.append(f"  at {site}")
        elif texts[first] != _named(self.cause):
            parts += [f"----- rank {first} -----", *hide_internal_frames(shown, ".tracebacks")]
        for group in alike(list(texts.items())):
            ranks = [list(texts)[number] for number in group if number]  # number 0 is the first
            lines = texts[ranks[0]].splitlines() if ranks else []
            if 0 in group:
                parts += [f"{name_ranks(ranks)} failed alike"] if ranks else []
            elif line := in_one_line(lines, shown):
                parts.append(f"{name_ranks(ranks)} failed, too: {line}")
            else:
                parts.append(f"----- {name_ranks(ranks)} -----")
                parts += hide_internal_frames(lines, ".tracebacks")
        return "\n".join(parts)


RanksFailedError.__module__ = "collective.testing"  # where users import it from


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _weight(error: BaseException | None) -> int:
    """Return a sort key of failures: causes come before their consequences."""
    if isinstance(error, CommunicatorAbortedError):
        return 3
    if isinstance(error, CollectiveTimeoutError):
        return 2
    return 1 if isinstance(error, RankHungError) else 0
