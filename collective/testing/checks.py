"""What a check is, and where it gets its ranks.

A check holds one property of a transport. It is called with a :class:`RankFactory` and a
number of ranks, knows nothing of pytest, and raises ``AssertionError`` with a text that
says what is wrong::

    with RankFactory("shm") as factory:
        check_broadcast(factory, 3)            # every case
        check_broadcast(factory, 3, root=1)    # one
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from collective.contract.backend import Backend
from collective.contract.capabilities import Capabilities
from collective.launch.mpiexec import Mpiexec
from collective.launch.outcome import RanksFailedError

from .faults import Fault
from .opening import backend_class
from .ranks import RankPool

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["NO_TRANSPORT", "Case", "Check", "RankFactory", "check", "registered", "roots"]

#: Why a check is skipped that tests the communicator alone.
NO_TRANSPORT = "ends before a transport is reached; run with few ranks that are threads"

#: The arguments of one case of a check.
Case = dict[str, Any]
#: Why a check does not apply to a transport of these capabilities, or None if it does.
Needs = Callable[[Capabilities], "str | None"]

# Long enough for processes to start on a busy machine, short enough to wait for a hang.
_TIMEOUT_S = 30.0


class RankFactory:
    """Gives checks the ranks of one transport, and keeps them from check to check.

    Args:
        backend: a registered name, ``module:Class``, or a ``Backend`` class.
        timeout: seconds that a check's ranks may take until they count as hung.
        mpiexec: with what ranks of MPI are started; see :class:`RankPool`.
    """

    def __init__(
        self,
        backend: str | type[Backend],
        *,
        timeout: float = _TIMEOUT_S,
        mpiexec: Mpiexec | None = None,
    ) -> None:
        self.backend = backend
        self.timeout = timeout
        self.mpiexec = mpiexec
        self.capabilities = backend_class(backend).capabilities
        self.name = backend if isinstance(backend, str) else backend.name
        self._pool: RankPool | None = None

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        fresh: bool = False,
        check: str = "auto",
        timeout: float | None = None,
        call_timeout: float | None = None,
        faults: Sequence[Fault] = (),
    ) -> list[Any]:
        """Run ``function(comm, *args)`` on ``size`` ranks and return their results.

        Args:
            fresh: use a new communicator; by default checks share one, until one fails.
            timeout: seconds that the ranks may take, if fewer than the factory's.
            check, call_timeout, faults: as in :meth:`RankPool.run`.

        Raises:
            RanksFailedError: a rank raised, died or hung.
        """
        if self._pool is not None and self._pool.size != size:
            self.close()
        if self._pool is None:
            self._pool = RankPool(size, self.backend, timeout=self.timeout, mpiexec=self.mpiexec)
        shared = not fresh and not faults
        return self._pool.run(
            function,
            *args,
            timeout=self.timeout if timeout is None else min(timeout, self.timeout),
            call_timeout=call_timeout,
            shared=shared,
            check=check,
            faults=faults,
        )

    def close(self) -> None:
        """End the ranks; the next run starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Check:
    """One property; call it with a factory, a size and, for one case, its arguments.

    Attributes:
        name: the function's name.
        at_least: the smallest number of ranks with which it says anything.
        transport: whether it gets as far as the transport.
    """

    def __init__(
        self,
        function: Callable[..., None],
        cases: Callable[[int], Sequence[Case]],
        at_least: int,
        needs: Needs,
        transport: bool = True,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.at_least = at_least
        self.transport = transport
        self._function = function
        self._cases = cases
        self._needs = needs

    def cases(self, size: int) -> list[Case]:
        """Return the arguments of each case with ``size`` ranks."""
        return [dict(case) for case in self._cases(size)]

    def skip_reason(self, capabilities: Capabilities, size: int) -> str | None:
        """Return why the check does not apply, or None if it does."""
        if size < self.at_least:
            return f"needs {self.at_least} ranks"
        # Where ranks are threads it costs next to nothing; any transport says the same, and so do
        # any more ranks.
        if not self.transport and not (capabilities.in_process and size == self.at_least):
            return NO_TRANSPORT
        return self._needs(capabilities)

    def __call__(self, factory: RankFactory, size: int, **case: Any) -> None:
        """Hold the property.

        Raises:
            AssertionError: it does not hold.
        """
        for arguments in [case] if case else self.cases(size):
            try:
                self._function(factory, size, **arguments)
            except RanksFailedError as failure:
                what = f"{self.title(arguments)} on {size} ranks"
                cause = f"{type(failure.cause).__name__}: {failure.cause}"
                raise AssertionError(f"{what}: {cause}\n{failure}") from failure

    def title(self, case: Case) -> str:
        """Return ``check_broadcast[root=1]``."""
        told = ",".join(f"{key}={value}" for key, value in case.items())
        return f"{self.name}[{told}]" if told else self.name

    def __repr__(self) -> str:
        return f"<Check {self.name}>"


_registered: dict[str, Check] = {}


def check(
    cases: Callable[[int], Sequence[Case]] | Sequence[Case] = ({},),
    *,
    at_least: int = 1,
    needs: Needs = lambda capabilities: None,
    transport: bool = True,
) -> Callable[[Callable[..., None]], Check]:
    """Make a function ``check_*(factory, size, **case)`` a :class:`Check` of the suite.

    Args:
        cases: the cases, or a function of the size that returns them.
        at_least: the smallest number of ranks.
        needs: returns why it does not apply to a transport of some capabilities, or None.
        transport: False for what the communicator refuses before a transport is reached: it is
            run with ``at_least`` ranks that are threads, and skipped elsewhere.
    """

    def make(function: Callable[..., None]) -> Check:
        given = cases if callable(cases) else lambda size: cases
        found = Check(function, given, at_least, needs, transport)
        _registered[found.name] = found
        return found

    return make


def registered() -> dict[str, Check]:
    """Return the checks of the modules imported so far, by name."""
    return dict(_registered)


def roots(size: int) -> list[Case]:
    """Return a case for every root."""
    return [{"root": root} for root in range(size)]
