"""The suite: all checks, and what a run of them gave."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from collective.contract.backend import Backend
from collective.launch.mpiexec import Mpiexec

from .checks import Case, Check, RankFactory, registered
from .kinds import Kind

__all__ = ["Result", "all_checks", "run_checks"]

_THEMES = (
    "reduce", "extremes", "order", "operators", "move", "data", "p2p", "async", "objects",
    "groups", "memory", "agreement", "arguments", "failure", "broken", "shrink", "grow", "fork",
)  # fmt: skip


def all_checks() -> dict[str, Check]:
    """Return every check by name: theme after theme, whichever was imported first."""
    order = {f"collective.testing.checks_{theme}": nth for nth, theme in enumerate(_THEMES)}
    for module in order:
        importlib.import_module(module)
    last = len(order)  # for checks of a user's own
    found = registered().items()
    return dict(sorted(found, key=lambda each: order.get(each[1].__module__, last)))


@dataclass(frozen=True)
class Result:
    """What one check gave with one number of ranks.

    Attributes:
        check: its name.
        size: how many ranks.
        outcome: ``"passed"``, ``"failed"``, ``"skipped"`` or ``"expected"`` (a failure that
            was declared).
        cases: how many cases ran.
        text: why it was skipped, or what is wrong, a case a paragraph.
        seconds: how long it took.
    """

    check: str
    size: int
    outcome: str
    cases: int
    text: str
    seconds: float


def run_checks(
    backend: str | type[Backend],
    sizes: Sequence[int] = (1, 2, 3, 4),
    *,
    kind: str | Kind = "numpy",
    checks: Sequence[str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    mpiexec: Mpiexec | None = None,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the suite on a transport.

    Args:
        backend: a registered name, ``module:Class``, or a ``Backend`` class.
        sizes: numbers of ranks; 1 alone tests no communication.
        kind: of which kind the arrays of calls are; see :class:`RankFactory`.
        checks: names of checks; all by default.
        expected_failures: name of a check (or of one case, ``check_broadcast[root=1]``) ->
            why it fails. One that passes is reported as failed: its declaration is stale.
        timeout: seconds after which a case counts as hung.
        mpiexec: with what ranks of MPI are started; see :class:`RankPool`.
        report: called with each result as it comes.

    Raises:
        ValueError: no check has a name that is given.
        InvalidArgumentError: no kind has that name.
    """
    expected = dict(expected_failures or {})
    chosen = chosen_checks(checks, expected)
    results = []
    with RankFactory(backend, kind=kind, timeout=timeout, mpiexec=mpiexec) as factory:
        for size in sizes:
            for found in chosen:
                result = _run(found, factory, size, expected)
                results.append(result)
                report(result)
    return results


def chosen_checks(names: Sequence[str] | None, expected: Mapping[str, str]) -> list[Check]:
    known = all_checks()
    for name in (*(names or ()), *(key.partition("[")[0] for key in expected)):
        if name not in known:
            raise ValueError(f"checks: no check is called {name!r}; one of {', '.join(known)}")
    return [found for name, found in known.items() if names is None or name in names]


def _run(found: Check, factory: RankFactory, size: int, expected: Mapping[str, str]) -> Result:
    start = time.monotonic()
    reason = found.skip_reason(factory.capabilities, size, factory.kind)
    if reason is not None:
        return Result(found.name, size, "skipped", 0, reason, 0.0)
    problems, declared = [], []
    cases = found.cases(size)
    for case in cases:
        why = reason_for(found, case, expected)
        problem = problem_of(found, factory, size, case)
        if why is None and problem is not None:
            problems.append(problem)
        elif why is not None and problem is None:
            problems.append(stale(found, case, why))
        elif why is not None:
            declared.append(f"{found.title(case)}: {why}")
    outcome = "failed" if problems else "expected" if declared else "passed"
    text = "\n\n".join(problems or declared)
    return Result(found.name, size, outcome, len(cases), text, time.monotonic() - start)


def problem_of(found: Check, factory: RankFactory, size: int, case: Case) -> str | None:
    """Run one case and return what is wrong, or None."""
    try:
        found(factory, size, **case)
    except AssertionError as error:
        return f"{found.title(case)}: {error}"
    return None


def reason_for(found: Check, case: Case, expected: Mapping[str, str]) -> str | None:
    """Return why a case is expected to fail, or None."""
    return expected.get(found.title(case), expected.get(found.name))


def stale(found: Check, case: Case, reason: str) -> str:
    """Return the text about an expected failure that did not come."""
    return (
        f"{found.title(case)}: passes, and is declared to fail ({reason}). Remove it from "
        "expected_failures."
    )


def cases_of(
    factory: RankFactory, sizes: Sequence[int], checks: Sequence[Check]
) -> Iterator[tuple[int, Check, Case]]:
    """Yield every case that applies, size after size so that ranks can be kept."""
    for size in sizes:
        for found in checks:
            if found.skip_reason(factory.capabilities, size, factory.kind) is None:
                for case in found.cases(size):
                    yield size, found, case
