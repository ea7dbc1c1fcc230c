"""The conformance suite: all checks, a run with its results, and the checks as pytest tests."""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from collective import InvalidArgumentError, UnsupportedError
from collective.inner import Backend, Mpiexec

from .checks import Case, Check, RankFactory, registered
from .kinds import Kind

if TYPE_CHECKING:
    import pytest

_THEMES = (
    "reduce", "bools", "order", "shards", "operators", "move", "data", "p2p", "mail",
    "async", "objects", "groups", "memory", "agreement", "arguments", "failure", "broken", "shrink",
    "grow", "fork",
)  # fmt: skip


def all_checks() -> dict[str, Check]:
    """Return every check by name, theme after theme, in an order that imports do not change."""
    order = {f"collective.testing.checks_{theme}": nth for nth, theme in enumerate(_THEMES)}
    for module in order:
        importlib.import_module(module)
    last = len(order)  # for checks that a user has added
    known = registered().items()
    return dict(sorted(known, key=lambda item: order.get(item[1].__module__, last)))


@dataclass(frozen=True)
class Result:
    """Result of one check with one number of ranks.

    Attributes:
        check: name of the check.
        size: number of ranks.
        outcome: ``"passed"``, ``"failed"`` or ``"skipped"``.
        cases: number of cases that ran.
        text: why the check was skipped, or its failures, one paragraph a case.
        seconds: duration of the check.
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
    timeout: float = 30.0,
    mpiexec: Mpiexec | None = None,
    check: str = "auto",
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run the suite on a transport.

    Args:
        backend: a registered name, ``module:Class``, or a ``Backend`` class.
        sizes: numbers of ranks; 1 alone tests no communication.
        kind: kind of the arrays that calls get; see :class:`RankFactory`.
        checks: names of checks; all by default.
        timeout: seconds after which a case counts as hung.
        mpiexec: how to start ranks of MPI; see :class:`RankPool`.
        check: value of ``COLLECTIVE_CHECK`` for the ranks; see :class:`RankFactory`.
        report: function that is called with each result as soon as it is known.

    Raises:
        ValueError: no check has a name in ``checks``.
        InvalidArgumentError: no kind has that name.
    """
    chosen = chosen_checks(checks)
    results = []
    with RankFactory(backend, kind=kind, timeout=timeout, mpiexec=mpiexec, check=check) as factory:
        for size in sizes:
            for each in chosen:
                result = _run(each, factory, size)
                results.append(result)
                report(result)
    return results


def chosen_checks(names: Sequence[str] | None) -> list[Check]:
    """Return the checks with these names, or all; raise ValueError for an unknown name."""
    known = all_checks()
    for name in names or ():
        if name not in known:
            raise ValueError(
                f"checks: no check is called {name!r}; the checks are {', '.join(known)}"
            )
    return [check for name, check in known.items() if names is None or name in names]


def _run(check: Check, factory: RankFactory, size: int) -> Result:
    start = time.monotonic()
    reason = check.skip_reason(factory.capabilities, size, factory.kind)
    if reason is not None:
        return Result(check.name, size, "skipped", 0, reason, 0.0)
    cases = check.cases(size)
    problems = [problem_of(check, factory, size, case) for case in cases]
    text = "\n\n".join(filter(None, problems))
    outcome = "failed" if text else "passed"
    return Result(check.name, size, outcome, len(cases), text, time.monotonic() - start)


def problem_of(found: Check, factory: RankFactory, size: int, case: Case) -> str | None:
    """Run one case and return the failure as text, or None.

    Raises:
        UnsupportedError: Python removes assertions, so that every check would pass.
    """
    if not __debug__:
        raise UnsupportedError(
            "checks: Python runs with -O or PYTHONOPTIMIZE, which remove the assertions that the "
            "checks consist of. Run them without."
        )
    try:
        found(factory, size, **case)
    except AssertionError as error:
        return f"{found.title(case)}: {error}"
    return None


# -- the suite as tests of pytest ----------------------------------------------------------------


class BoundCheck:
    """Callable test: one case of a check on one transport with one number of ranks."""

    def __init__(self, check: Check, factory: RankFactory, size: int, case: Case) -> None:
        self.check = check
        self.size = size
        self.case = case
        self._factory = factory
        self.last = False

    @property
    def id(self) -> str:
        """The name of the test: ``shm-3-check_broadcast[root=1]``."""
        return f"{self._factory.name}-{self.size}-{self.check.title(self.case)}"

    def __call__(self) -> None:
        """Run the case.

        Raises:
            AssertionError: the property does not hold.
        """
        import pytest

        __tracebackhide__ = True
        try:
            problem = problem_of(self.check, self._factory, self.size, self.case)
        finally:
            if self.last:
                self._factory.close()
        if problem is not None:
            pytest.fail(problem, pytrace=False)

    def __repr__(self) -> str:
        return f"<{self.id}>"


def parametrize_with_checks(
    backend: str | type[Backend],
    *,
    sizes: Sequence[int] = (1, 2, 3, 4),
    kind: str | Kind = "numpy",
    checks: Sequence[str] | None = None,
    timeout: float = 30.0,
    mpiexec: Mpiexec | None = None,
    check: str = "auto",
) -> pytest.MarkDecorator:
    """Return a decorator that gives a test every case of the suite as ``check``.

    ::

        @parametrize_with_checks("shm", sizes=(1, 2, 3, 4))
        def test_conformance(check):
            check()

    The ranks live on from one test to the next. The ranks of a size end when the tests of the
    next size begin.

    Args:
        backend: a registered name, ``module:Class``, or a ``Backend`` class.
        sizes: numbers of ranks; 1 alone tests no communication.
        kind: kind of the arrays that calls get: ``"torch"``, ``"jax"``, ``"chainer"``,
            ``"dlpack"``, ``"cupy"``, ``"cuda"``, or a :class:`Kind`; see :class:`RankFactory`.
        checks: names of checks; all by default.
        timeout: seconds after which a case counts as hung.
        mpiexec: how to start ranks of MPI; see :class:`RankPool`.
        check: value of ``COLLECTIVE_CHECK`` for the ranks; see :class:`RankFactory`.

    Raises:
        ValueError: no check has a name in ``checks``.
        InvalidArgumentError: no kind has that name, or no check applies.
        BackendNotFoundError: there is no such transport.
        BackendUnavailableError: the transport, or the framework of the kind, cannot be used here.
    """
    import pytest

    factory = RankFactory(backend, kind=kind, timeout=timeout, mpiexec=mpiexec, check=check)
    # The last test ends the ranks. If it does not run, they are ended at exit.
    atexit.register(factory.close)
    # A forked child must not end the ranks of its parent.
    os.register_at_fork(after_in_child=partial(atexit.unregister, factory.close))
    # All tests of one size come before those of the next size, so that tests can share ranks.
    bound = [
        BoundCheck(found, factory, size, case)
        for size, found in itertools.product(sizes, chosen_checks(checks))
        if found.skip_reason(factory.capabilities, size, factory.kind) is None
        for case in found.cases(size)
    ]
    if not bound:
        raise InvalidArgumentError(
            f"parametrize_with_checks: no check applies to {backend!r} with sizes={sizes}, "
            f"kind={kind!r} and checks={checks}. Pass others."
        )
    bound[-1].last = True
    return pytest.mark.parametrize("check", bound, ids=[test.id for test in bound])
