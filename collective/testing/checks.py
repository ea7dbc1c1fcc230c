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

from collective.communicator import Communicator
from collective.contract.backend import Backend
from collective.contract.capabilities import Capabilities
from collective.launch.mpiexec import Mpiexec
from collective.launch.outcome import RanksFailedError

from .faults import Fault
from .kinds import Kind, kind_of, require
from .ranks import GRACE_S, RankPool, capabilities_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "NO_ARRAYS",
    "NO_TRANSPORT",
    "OWN_ARRAYS",
    "Case",
    "Check",
    "RankFactory",
    "able",
    "check",
    "folds_for_users",
    "on_each_rank",
    "registered",
    "roots",
]

#: Why a check is skipped that says nothing of a kind of array.
NO_ARRAYS = "is the same for arrays of any kind; run without kind="
#: Why a check is skipped that chooses the kinds of its arrays itself.
OWN_ARRAYS = "has arrays of kinds of its own; run without kind="
#: Why a check is skipped that tests the communicator alone.
NO_TRANSPORT = "ends before a transport is reached; run with few ranks that are threads"

#: The arguments of one case of a check.
Case = dict[str, Any]
#: Why a check does not apply to a transport of these capabilities, or None if it does.
Needs = Callable[[Capabilities], "str | None"]

# Long enough for processes to start on a busy machine, short enough to wait for a hang.
_TIMEOUT_S = 30.0
# The themes of checks in which arrays travel; see conformance.py. Those of objects, failure and
# the like are about who calls what.
_OF_ARRAYS = set("reduce extremes bools order operators move data p2p async memory".split())


class RankFactory:
    """Gives checks the ranks of one transport, and keeps them from check to check.

    Args:
        backend: a registered name, ``module:Class``, or a ``Backend`` class.
        kind: of which kind the arrays of calls are: a name of :data:`collective.testing.KINDS`,
            or a :class:`Kind`, which has to be picklable where ranks are processes.
        timeout: seconds that a check's ranks may take until they count as hung.
        mpiexec: with what ranks of MPI are started; see :class:`RankPool`.

    Raises:
        InvalidArgumentError: no kind has that name.
        BackendNotFoundError, BackendUnavailableError: no such transport, or it or the kind's
            framework is not here.
    """

    def __init__(
        self,
        backend: str | type[Backend],
        *,
        kind: str | Kind = "numpy",
        timeout: float = _TIMEOUT_S,
        mpiexec: Mpiexec | None = None,
    ) -> None:
        require(kind)
        self.backend = backend
        self.kind = kind
        self.timeout = timeout
        self.mpiexec = mpiexec
        self.capabilities = capabilities_of(backend, mpiexec)
        self.name = backend if isinstance(backend, str) else backend.name
        if kind != "numpy":
            self.name += f"-{kind if isinstance(kind, str) else kind.name}"
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
        shrink_grace: float = GRACE_S,
    ) -> list[Any]:
        """Run ``function(comm, *args)`` on ``size`` ranks and return their results.

        Args:
            fresh: use a new communicator; by default checks share one, until one fails.
            timeout: seconds that the ranks may take, if fewer than the factory's.
            check, call_timeout, faults, shrink_grace: as in :meth:`RankPool.run`.

        Raises:
            RanksFailedError: a rank raised, died or hung.
        """
        if self._pool is not None and self._pool.size != size:
            self.close()
        if self._pool is None:
            self._pool = RankPool(size, self.backend, timeout=self.timeout, mpiexec=self.mpiexec)
        shared = not fresh and not faults
        if self.kind != "numpy":
            function, args = _on_arrays_of, (self.kind, function, *args)
        return self._pool.run(
            function,
            *args,
            timeout=self.timeout if timeout is None else min(timeout, self.timeout),
            call_timeout=call_timeout,
            shared=shared,
            check=check,
            faults=faults,
            shrink_grace=shrink_grace,
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


def _on_arrays_of(
    comm: Communicator, kind: str | Kind, function: Callable[..., Any], *args: Any
) -> Any:
    """Call ``function`` on a rank whose communicator gets arrays of ``kind``."""
    found = kind_of(kind)
    return function(comm if found is None else found.communicator(comm), *args)


class Check:
    """One property; call it with a factory, a size and, for one case, its arguments.

    Attributes:
        name: the function's name.
        at_least: the smallest number of ranks with which it says anything.
        transport: whether it gets as far as the transport.
        own_arrays: whether the arrays of its calls are of kinds that it chooses itself.
        part: what each rank calls, if that is all of the check.
    """

    part: Callable[..., None]

    def __init__(
        self,
        function: Callable[..., None],
        cases: Callable[[int], Sequence[Case]],
        at_least: int,
        needs: Needs,
        transport: bool = True,
        own_arrays: bool = False,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.at_least = at_least
        self.transport = transport
        self.own_arrays = own_arrays
        theme = function.__module__.removeprefix(f"{__package__}.checks_")
        self._of_arrays = theme in _OF_ARRAYS or theme == function.__module__
        self._function = function
        self._cases = cases
        self._needs = needs

    def cases(self, size: int) -> list[Case]:
        """Return the arguments of each case with ``size`` ranks."""
        return [dict(case) for case in self._cases(size)]

    def skip_reason(
        self, capabilities: Capabilities, size: int, kind: str | Kind = "numpy"
    ) -> str | None:
        """Return why the check does not apply, or None if it does."""
        if size < self.at_least:
            return f"needs {self.at_least} ranks"
        if kind != "numpy":
            if self.own_arrays:
                return OWN_ARRAYS
            # A transport that takes nothing else has no other way to be tested.
            if not self._of_arrays and "cpu" in capabilities.devices:
                return NO_ARRAYS
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

    def do_part(self, comm: Communicator, case: Case) -> None:
        """Do one rank's part of a check that is made :func:`on_each_rank`."""
        __tracebackhide__ = True
        self.part(comm, **case)

    def title(self, case: Case) -> str:
        """Return ``check_broadcast[root=1]``."""
        arguments = ",".join(f"{key}={value}" for key, value in case.items())
        return f"{self.name}[{arguments}]" if arguments else self.name

    def __reduce__(self) -> str:
        return self.name  # it stands in its module, where ranks that are processes find it

    def __repr__(self) -> str:
        return f"<Check {self.name}>"


_registered: dict[str, Check] = {}


def check(
    cases: Callable[[int], Sequence[Case]] | Sequence[Case] = ({},),
    *,
    at_least: int = 1,
    needs: Needs = lambda capabilities: None,
    transport: bool = True,
    own_arrays: bool = False,
) -> Callable[[Callable[..., None]], Check]:
    """Make a function ``check_*(factory, size, **case)`` a :class:`Check` of the suite.

    Args:
        cases: the cases, or a function of the size that returns them.
        at_least: the smallest number of ranks.
        needs: returns why it does not apply to a transport of some capabilities, or None.
        transport: False for what the communicator refuses before a transport is reached: it is
            run with ``at_least`` ranks that are threads, and skipped elsewhere.
        own_arrays: True for what chooses the kinds of its arrays itself: it is run with
            NumPy's alone.
    """

    def make(function: Callable[..., None]) -> Check:
        given = cases if callable(cases) else lambda size: cases
        found = Check(function, given, at_least, needs, transport, own_arrays)
        _registered[found.name] = found
        return found

    return make


def able(capability: str, why_not: str) -> Needs:
    """Return that a check needs a transport with a capability; else it is skipped, and says so."""
    return lambda capabilities: None if getattr(capabilities, capability) else why_not


def folds_for_users(capabilities: Capabilities) -> str | None:
    """Tell why a check of operators of the user's does not apply, or None if it does."""
    return None if "user" in capabilities.ops else "folds no user-defined operators"


def on_each_rank(
    cases: Callable[[int], Sequence[Case]] | Sequence[Case] = ({},),
    *,
    fresh: bool = False,
    compare: bool = False,
    **options: Any,
) -> Callable[[Callable[..., None]], Check]:
    """Make what each rank does, ``check_*(comm, **case)``, a :class:`Check` of the suite.

    Args:
        fresh: as of :meth:`RankFactory.run`.
        compare: whether the ranks' calls are compared on any transport.
        cases, options: as of :func:`check`.
    """

    def make(part: Callable[..., None]) -> Check:
        @functools.wraps(part)
        def run(factory: RankFactory, size: int, **case: Any) -> None:
            compared = "always" if compare else "auto"
            factory.run(size, found.do_part, case, fresh=fresh, check=compared)

        found = check(cases, **options)(run)
        found.part = part
        return found

    return make


def registered() -> dict[str, Check]:
    """Return the checks of the modules imported so far, by name."""
    return dict(_registered)


def roots(size: int) -> list[Case]:
    """Return a case for every root."""
    return [{"root": root} for root in range(size)]
