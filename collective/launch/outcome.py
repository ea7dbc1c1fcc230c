"""How jobs end: a rank's outcome, and every rank's failure in one exception, the cause first."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from collective.errors import CollectiveTimeoutError, CommunicatorAbortedError

__all__ = ["Outcome", "RankDiedError", "RankHungError", "RanksFailedError", "RemoteError"]


class RankDiedError(Exception):
    """A rank ended without a word: its process is gone, or a fault killed it.

    Attributes:
        exitcode: the process's exit code, negative for a signal; None for a thread, and where
            it is not known.
        output: the end of what the ranks and what started them have written, where that is not
            shown as it comes; else empty.
    """

    def __init__(self, message: str, exitcode: int | None = None) -> None:
        super().__init__(message)
        self.exitcode = exitcode
        self.output = ""

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}; the last that was written:\n{self.output}" if self.output else message


class RankHungError(Exception):
    """A rank had not returned when the time was over; the text shows where it was.

    Attributes:
        stack: the stacks of the rank's threads as text; empty if it could not be had.
    """

    def __init__(self, message: str, stack: str = "") -> None:
        super().__init__(message)
        self.stack = stack

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message}; it was here:\n{self.stack}" if self.stack else message


class RemoteError(Exception):
    """Stands for an exception of a rank's process that could not be pickled."""


@dataclass(frozen=True)
class Outcome:
    """How one rank's part of a job ended.

    Attributes:
        value: what the job returned.
        error: what it raised, or None.
        traceback: the traceback as text.
        when: when it ended, on the clock of ``time.monotonic()``.
    """

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    when: float = field(default_factory=monotonic)

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        """Return the outcome of a rank that raised ``error``.

        Frames that lead to the user's function say ``__tracebackhide__``, as to pytest.
        """
        trace = error.__traceback__
        while trace is not None and "__tracebackhide__" in trace.tb_frame.f_locals:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        return cls(error=error, traceback=text)


class RanksFailedError(Exception):
    """Ranks of a job failed.

    Its text shows all tracebacks: first the rank that failed by itself, then those that
    failed because of it.

    Attributes:
        errors: rank -> exception, the cause first.
        tracebacks: rank -> its traceback as text.
        results: rank -> what it returned, for the ranks that did not fail.
        size: how many ranks the job had.
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

    @classmethod
    def of(cls, outcomes: Mapping[int, Outcome], size: int) -> RanksFailedError | None:
        """Return the exception for the ranks that failed, or None if all went well."""
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
        """The exception that the others most likely follow from."""
        return next(iter(self.errors.values()))

    def __str__(self) -> str:
        first, *others = self.errors
        which = f"rank {first} of {self.size} failed"
        if others:
            which += f", then rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        parts = [which]
        for rank, error in self.errors.items():
            text = self.tracebacks.get(rank) or f"{type(error).__name__}: {error}"
            parts.append(f"----- rank {rank} -----\n{text.rstrip()}")
        return "\n".join(parts)


def _weight(error: BaseException | None) -> int:
    """Order failures: what happens by itself before what follows from it."""
    if isinstance(error, CommunicatorAbortedError):
        return 3
    if isinstance(error, CollectiveTimeoutError):
        return 2
    return 1 if isinstance(error, RankHungError) else 0
