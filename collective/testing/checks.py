"""The :class:`Check` of a property of a transport, and the :class:`RankFactory` for its ranks.

A check tests one property of a transport. The caller passes a :class:`RankFactory` and a number of
ranks. A check does not depend on pytest. If the property does not hold, the check raises
``AssertionError`` with a text that says what is wrong::

    with RankFactory("shm") as factory:
        check_broadcast(factory, 3)            # every case
        check_broadcast(factory, 3, root=1)    # one case
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

from collective import Communicator
from collective.inner import Backend, Capabilities, Mpiexec, RanksFailedError

from .faults import Fault
from .kinds import Kind, kind_of, require
from .ranks import GRACE_S, RankPool, capabilities_of

#: Why a check is skipped whose outcome does not depend on the kind of array.
NO_ARRAYS = "does not depend on the kind of array; run it without kind="
#: Why a check is skipped that chooses the kinds of its arrays itself.
OWN_ARRAYS = "chooses the kinds of its arrays itself; run it without kind="
#: Why a check is skipped that tests the communicator alone.
NO_TRANSPORT = "ends before it reaches a transport; run it with few ranks that are threads"

#: The arguments of one case of a check.
Case = dict[str, Any]
#: Why a check does not apply to a transport of these capabilities, or None if it does.
Needs = Callable[[Capabilities], "str | None"]

# Long enough for processes to start on a busy machine, short enough to wait for a hang.
_TIMEOUT_S = 30.0
# The themes (module names) of checks in which arrays travel; see conformance.py. The checks of
# objects, failures and the like test which calls ranks make, so the kind of array does not matter.
_OF_ARRAYS = set("reduce bools order shards operators move data p2p async memory".split())


class RankFactory:
    """Source of the ranks of one transport for checks; the ranks live on from check to check.

    Args:
        backend: a registered name, ``module:Class``, or a ``Backend`` class.
        kind: kind of the arrays that calls get: a name of :data:`collective.testing.KINDS`,
            or a :class:`Kind`. Where ranks are processes, the :class:`Kind` must be picklable.
        timeout: seconds that a check's ranks may take until they count as hung.
        mpiexec: how to start ranks of MPI; see :class:`RankPool`.
        check: value of ``COLLECTIVE_CHECK`` for the checks that set none, for example
            ``"results"``.

    Raises:
        InvalidArgumentError: no kind has that name.
        BackendNotFoundError: there is no such transport.
        BackendUnavailableError: the transport, or the framework of the kind, cannot be used here.
    """

    def __init__(
        self,
        backend: str | type[Backend],
        *,
        kind: str | Kind = "numpy",
        timeout: float = _TIMEOUT_S,
        mpiexec: Mpiexec | None = None,
        check: str = "auto",
    ) -> None:
        require(kind)
        self.backend = backend
        self.kind = kind
        self.timeout = timeout
        self.mpiexec = mpiexec
        self.check = check
        self.capabilities = capabilities_of(backend, mpiexec)
        self.name = backend if isinstance(backend, str) else backend.name
        if kind != "numpy":
            self.name += f"-{kind if isinstance(kind, str) else kind.name}"
        if check != "auto":
            self.name += f"-{check}"
        self._pool: RankPool | None = None

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        fresh: bool = False,
        check: str | None = None,
        timeout: float | None = None,
        call_timeout: float | None = None,
        faults: Sequence[Fault] = (),
        shrink_grace: float = GRACE_S,
    ) -> list[Any]:
        """Run ``function(comm, *args)`` on ``size`` ranks and return their results.

        Args:
            fresh: if true, use a new communicator. By default checks share one until a check fails.
            timeout: seconds that the ranks may take, if fewer than the factory's.
            check: as in :meth:`RankPool.run`; by default the factory's.
            call_timeout, faults, shrink_grace: as in :meth:`RankPool.run`.

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
            check=self.check if check is None else check,
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
    """Call ``function`` on a rank with a communicator that passes arrays of ``kind``."""
    found = kind_of(kind)
    return function(comm if found is None else found.communicator(comm), *args)


class Check:
    """Check of one property. Call it with a factory, a size and, for one case, its arguments.

    Attributes:
        name: name of the function.
        at_least: smallest number of ranks with which the check tests anything.
        transport: whether its calls get as far as the transport.
        own_arrays: whether the check itself chooses the kinds of its arrays.
        part: what each rank calls, for a check that is made :func:`on_each_rank`.
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
            # A transport for other devices alone can be tested with this kind of array only.
            if not self._of_arrays and "cpu" in capabilities.devices:
                return NO_ARRAYS
        # Such a check never reaches the transport, so all transports and all larger numbers of
        # ranks give the same outcome. It runs once, on threads, where it costs next to nothing.
        if not self.transport and not (capabilities.in_process and size == self.at_least):
            return NO_TRANSPORT
        return self._needs(capabilities)

    def __call__(self, factory: RankFactory, size: int, **case: Any) -> None:
        """Check the property, in one case if ``case`` names it, else in all cases.

        Raises:
            AssertionError: the property does not hold.
        """
        for arguments in [case] if case else self.cases(size):
            try:
                self._function(factory, size, **arguments)
            except RanksFailedError as failure:
                what = f"{self.title(arguments)} on {size} ranks"
                cause = f"{type(failure.cause).__name__}: {failure.cause}"
                raise AssertionError(f"{what}: {cause}\n{failure}") from failure

    def do_part(self, comm: Communicator, case: Case) -> None:
        """Do this rank's part of a check that is made :func:`on_each_rank`."""
        __tracebackhide__ = True
        self.part(comm, **case)

    def title(self, case: Case) -> str:
        """Return the name with the arguments of ``case``, as ``check_broadcast[root=1]``."""
        arguments = ",".join(f"{key}={value}" for key, value in case.items())
        return f"{self.name}[{arguments}]" if arguments else self.name

    def __reduce__(self) -> str:
        # Pickle by name: the check is a global of its module, so a rank process can import it.
        return self.name

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
        cases: the cases, or a function that returns them for a number of ranks.
        at_least: smallest number of ranks.
        needs: function of a transport's capabilities that returns why the check does not apply,
            or None if it does.
        transport: False if the communicator refuses the calls before they reach a transport. Such
            a check runs with ``at_least`` ranks that are threads, and is skipped elsewhere.
        own_arrays: True if the check chooses the kinds of its arrays itself. Such a check runs
            only with ``kind="numpy"``.
    """

    def make(function: Callable[..., None]) -> Check:
        given = cases if callable(cases) else lambda size: cases
        found = Check(function, given, at_least, needs, transport, own_arrays)
        _registered[found.name] = found
        return found

    return make


def able(capability: str, why_not: str) -> Needs:
    """Return a ``needs`` that skips a check where the transport lacks a capability.

    Args:
        why_not: why the check is skipped, for the report.
    """
    return lambda capabilities: None if getattr(capabilities, capability) else why_not


def folds_for_users(capabilities: Capabilities) -> str | None:
    """Return why a check of user-defined operators does not apply, or None if it does."""
    return None if "user" in capabilities.ops else "folds no user-defined operators"


def on_each_rank(
    cases: Callable[[int], Sequence[Case]] | Sequence[Case] = ({},),
    *,
    fresh: bool = False,
    compare: bool = False,
    **options: Any,
) -> Callable[[Callable[..., None]], Check]:
    """Make a :class:`Check` of ``check_*(comm, **case)``, the function that each rank calls.

    Args:
        fresh: as in :meth:`RankFactory.run`.
        compare: if true, the ranks' calls are compared on any transport.
        cases, options: as in :func:`check`.
    """

    def make(part: Callable[..., None]) -> Check:
        @functools.wraps(part)
        def run(factory: RankFactory, size: int, **case: Any) -> None:
            compared = "always" if compare else None
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
