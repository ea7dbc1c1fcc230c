"""The suite as pytest's tests."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from collective.contract.backend import Backend
from collective.launch.mpiexec import Mpiexec

from .checks import Case, Check, RankFactory
from .conformance import cases_of, chosen_checks, problem_of, reason_for, stale
from .kinds import Kind

if TYPE_CHECKING:
    import pytest

__all__ = ["BoundCheck", "parametrize_with_checks"]


class BoundCheck:
    """One case of a check on one transport with one number of ranks; call it."""

    def __init__(
        self,
        check: Check,
        factory: RankFactory,
        size: int,
        case: Case,
        expected: Mapping[str, str],
    ) -> None:
        self.check = check
        self.size = size
        self.case = case
        self._factory = factory
        self._expected = expected
        self.last = False

    @property
    def id(self) -> str:
        """The name of the test: ``shm-3-check_broadcast[root=1]``."""
        return f"{self._factory.name}-{self.size}-{self.check.title(self.case)}"

    def __call__(self) -> None:
        """Run it.

        Raises:
            AssertionError: the property does not hold, or an expected failure is stale.
        """
        import pytest

        __tracebackhide__ = True
        why = reason_for(self.check, self.case, self._expected)
        try:
            problem = problem_of(self.check, self._factory, self.size, self.case)
        finally:
            if self.last:
                self._factory.close()
        if why is not None:
            if problem is not None:
                pytest.xfail(f"{why}: {problem.splitlines()[0]}")
            pytest.fail(stale(self.check, self.case, why), pytrace=False)
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
    expected_failures: Mapping[str, str] | None = None,
    timeout: float = 30.0,
    mpiexec: Mpiexec | None = None,
) -> pytest.MarkDecorator:
    """Return a decorator that gives a test every case of the suite as ``check``.

    ::

        @parametrize_with_checks("shm", sizes=(1, 2, 3, 4))
        def test_conformance(check):
            check()

    The ranks are kept from one test to the next; those of a size end when the tests of
    the next begin.

    Args:
        backend: a registered name, ``module:Class``, or a ``Backend`` class.
        sizes: numbers of ranks; 1 alone tests no communication.
        kind: of which kind the arrays of calls are: ``"torch"``, ``"chainer"``, ``"dlpack"``,
            ``"cupy"``, ``"cuda"``, or a :class:`Kind`; see :class:`RankFactory`.
        checks: names of checks; all by default.
        expected_failures: name of a check (or of one case, ``check_broadcast[root=1]``) ->
            why it fails. One that passes fails the test: its declaration is stale.
        timeout: seconds after which a case counts as hung.
        mpiexec: with what ranks of MPI are started; see :class:`RankPool`.

    Raises:
        ValueError: no check has a name that is given.
        InvalidArgumentError: no kind has that name.
        BackendNotFoundError, BackendUnavailableError: no such transport, or it or the kind's
            framework is not here.
    """
    import pytest

    expected = dict(expected_failures or {})
    factory = RankFactory(backend, kind=kind, timeout=timeout, mpiexec=mpiexec)
    # If the last test does not run, nobody else would end the ranks.
    atexit.register(factory.close)
    # They are not a forked child's to end.
    os.register_at_fork(after_in_child=partial(atexit.unregister, factory.close))
    bound = [
        BoundCheck(found, factory, size, case, expected)
        for size, found, case in cases_of(factory, sizes, chosen_checks(checks, expected))
    ]
    bound[-1].last = True
    return pytest.mark.parametrize("check", bound, ids=[each.id for each in bound])
