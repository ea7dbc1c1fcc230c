"""Several ranks in one test: `run_ranks`, and pools that keep the ranks for the next test."""

from __future__ import annotations

import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Self,
    TypeVar,
    TypeVarTuple,
    overload,
)

from collective import Communicator, InvalidArgumentError
from collective.generations.lineage import Lineage
from collective.inner import (
    Backend,
    Capabilities,
    Deadline,
    FileStore,
    Mpiexec,
    Participant,
    RankDiedError,
    Ranks,
    RanksFailedError,
    World,
    registry,
    session,
    under_mpiexec,
)
from collective.launch.process_starter import ProcessStarter
from collective.launch.ranks import Job, Starter, ThreadStarter
from collective.start.connecting import met, tell_ended

from .faults import Fault, FaultyBackend, RankKilled

P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Part of a job's time that one call may take. A call must time out before the job does, because
# only the call's error names the ranks that did not come.
_CALL_SHARE = 0.75
# Least time for ranks to connect, in seconds. Checks of deadlines set short timeouts, but on a busy
# machine ranks need longer to meet.
_START_S = 20.0
#: How late a live rank may come to ``shrink()``, in seconds. On a busy machine, a rank in one of
#: MPI's own operations when another rank died came seconds behind the others.
GRACE_S = 15.0


def backend_class(backend: str | type[Backend]) -> type[Backend]:
    """Return the class of a transport, given its name or the class."""
    return registry.find(backend) if isinstance(backend, str) else backend


def capabilities_of(backend: str | type[Backend], mpiexec: Mpiexec | None = None) -> Capabilities:
    """Return the capabilities of a transport whose ranks a pool starts.

    The class of the MPI transport does not know which MPI library it will use. Whether its ranks
    can continue after a loss depends on the ``mpiexec``.
    """
    kind = backend_class(backend)
    if kind.launcher == "mpiexec" and (mpiexec or Mpiexec()).outlasts_ranks():
        return replace(kind.capabilities, shrinks=True)
    return kind.capabilities


@dataclass(frozen=True)
class Opening:
    """The way in which the ranks of a pool get a communicator. Equal openings share one.

    Attributes:
        backend: a registered name, ``module:Class``, or a class.
        size: number of ranks.
        job: a text that no other opening has.
        directory: directory of the store at which the ranks meet.
        timeout: seconds that a call may take.
        check: ``"always"`` to compare calls on any transport.
        faults: faults that are injected into the ranks.
        shrink_grace: seconds that a rank may be silent when the other ranks shrink.
    """

    backend: str | type[Backend]
    size: int
    job: str
    directory: str
    timeout: float
    check: str = "auto"
    faults: tuple[Fault, ...] = ()
    shrink_grace: float = GRACE_S

    def world(self, rank: int) -> World:
        """Return the :class:`World` of ``rank``."""
        return World(
            rank=rank,
            size=self.size,
            local_rank=rank,
            local_size=self.size,
            host=socket.gethostname(),
            launcher="none",
            job=self.job,
            store=FileStore(self.directory),
        )

    def connect(self, rank: int) -> Communicator:
        """Connect ``rank`` and return its communicator."""
        world = self.world(rank)
        deadline = Deadline(max(self.timeout, _START_S))
        backend: Backend
        backend, world = met(backend_class(self.backend), world, deadline)
        lineage = Lineage.begin(backend, world, deadline, grace=self.shrink_grace, min_ranks=1)
        if self.faults:
            backend = FaultyBackend(backend, self.faults)
        return Communicator(
            backend,
            local_rank=world.local_rank,
            local_size=world.local_size,
            host=world.host,
            timeout=self.timeout,
            check=self.check,
            lineage=lineage,
        )


@dataclass(frozen=True)
class CommunicatorJob(Job):
    """Function that every rank calls with its communicator.

    Attributes:
        function: called as ``function(comm, *args, **options)``.
        shared: whether the next job with an equal opening uses the same communicator.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    opening: Opening
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.function!r} and its arguments"

    def load(self) -> None:
        # A transport that cannot be imported must fail here. Later, peers would wait for this rank.
        backend_class(self.opening.backend)

    def run(self, participant: Participant) -> Any:
        __tracebackhide__ = True
        comm = participant.kept.get(self.opening)
        if comm is None:
            participant.leave()
            comm = participant.kept[self.opening] = self.opening.connect(participant.rank)
        # Each job may run in a new thread, and module-level calls use the thread's current
        # communicator.
        session.set_current(comm)
        transport = comm.inner.transport
        try:
            value = self.function(comm, *self.args, **self.options)
        except RankKilled as killed:
            participant.kept.clear()
            raise RankDiedError(str(killed)) from None
        if isinstance(transport, FaultyBackend):
            transport.refuse_unfired()
        if not self.shared:
            participant.leave()
        return value

    def ended(self, rank: int, why: str) -> None:
        size = self.opening.size
        tell_ended(FileStore(self.opening.directory), {rank: why}, [0] * size, size)

    def failed(self, participant: Participant, error: BaseException) -> None:
        comm = participant.kept.pop(self.opening, None)
        if comm is not None:
            comm.__exit__(type(error), error, error.__traceback__)


class RankPool:
    """Ranks that live on from job to job.

    Ranks are threads of this process if the transport connects threads, else processes. They start
    with the first job. A rank that died or hung is replaced for the next job. A pool is a context
    manager, and runs one job at a time.

    After :func:`preload`, processes start almost at once.

    Args:
        size: number of ranks.
        backend: a registered transport's name, ``module:Class``, or a ``Backend`` class. Where
            ranks are processes, the class must be importable.
        timeout: seconds that a job may take, unless the job sets its own.
        mpiexec: launcher of the ranks, for the MPI transport; by default the ``mpiexec`` beside
            this Python, with this Python.
        starter: starter of the ranks, by default the one for ``backend``.

    Raises:
        BackendNotFoundError: there is no such transport.
        BackendUnavailableError: the transport cannot be used here.
    """

    def __init__(
        self,
        size: int,
        backend: str | type[Backend] = "threads",
        *,
        timeout: float = 60.0,
        mpiexec: Mpiexec | None = None,
        starter: Starter | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgumentError(f"RankPool: size {size!r}; pass a positive integer.")
        session.shorten_tracebacks()
        self.size = size
        self.backend = backend
        self.timeout = timeout
        kind = backend_class(backend)
        self.capabilities = capabilities_of(backend, mpiexec)
        if starter is None:
            starter = ProcessStarter()
            if self.capabilities.in_process:
                starter = ThreadStarter()
            elif kind.launcher == "mpiexec":
                starter = under_mpiexec(size, mpiexec or Mpiexec())
        self._ranks = Ranks(size, starter)
        self._directory: str | None = None
        self._shared: Opening | None = None

    def __repr__(self) -> str:
        name = getattr(self.backend, "__name__", self.backend)
        return f"<RankPool of {self.size} ranks over {name}>"

    @overload
    def run(
        self,
        function: Callable[Concatenate[Communicator, P], R],
        *args: P.args,
        **options: P.kwargs,
    ) -> list[R]: ...

    @overload
    def run(
        self,
        function: Callable[[Communicator, *Ts], R],
        *args: *Ts,
        timeout: float | None = None,
        call_timeout: float | None = None,
        shared: bool = False,
        check: str = "auto",
        faults: Sequence[Fault] = (),
        shrink_grace: float = GRACE_S,
        **options: Any,
    ) -> list[R]: ...

    def run(  # type: ignore[misc]  # the keywords of ``function`` may have any name
        self,
        function: Callable[..., R],
        *args: Any,
        timeout: float | None = None,
        call_timeout: float | None = None,
        shared: bool = False,
        check: str = "auto",
        faults: Sequence[Fault] = (),
        shrink_grace: float = GRACE_S,
        **options: Any,
    ) -> list[R]:
        """Call ``function(comm, *args, **options)`` on every rank.

        Args:
            function: function that each rank calls. Where ranks are processes, the function, its
                arguments and its result are pickled, so it must be a global of a module.
            timeout: seconds until ranks that have not returned are stopped: a process is
                killed, a thread has its communicator aborted. The time to start processes does
                not count.
            call_timeout: seconds that one call of the communicator may take; by default
                somewhat less than ``timeout``.
            shared: if true, share one communicator with the other jobs that set this and have the
                same ``call_timeout``, ``check`` and ``shrink_grace``, until one of them fails.
            check: ``"always"`` to compare the ranks' calls on any transport.
            faults: faults to inject; see :mod:`collective.testing.faults`.
            shrink_grace: seconds that a rank may be silent when the other ranks call ``shrink()``.

        Returns:
            The ranks' results, in rank order.

        Raises:
            RanksFailedError: a rank raised, died or hung, or returned before one of its faults
                came; the error has every rank's traceback.
            InvalidArgumentError: a fault is of a rank that the pool does not have.
        """
        __tracebackhide__ = True  # pytest and IPython show the caller's line
        _refuse_absent(faults, self.size)
        seconds = self.timeout if timeout is None else timeout
        calls = _CALL_SHARE * seconds if call_timeout is None else call_timeout
        opening = self._opening(calls, check, tuple(faults), shrink_grace, shared)
        job = CommunicatorJob(function, args, options, opening, shared)
        try:
            return self._ranks.results(job, seconds)
        except RanksFailedError:
            self._shared = None
            raise

    def _opening(
        self, timeout: float, check: str, faults: tuple[Fault, ...], grace: float, shared: bool
    ) -> Opening:
        known = self._shared
        alike = known is not None and (
            (known.timeout, known.check, known.shrink_grace) == (timeout, check, grace)
        )
        if shared and not faults and known is not None and alike:
            return known
        if self._directory is None:
            self._directory = tempfile.mkdtemp(prefix="collective-testing-")
        job = f"testing-{secrets.token_hex(8)}"
        directory = f"{self._directory}/{job}"
        opening = Opening(self.backend, self.size, job, directory, timeout, check, faults, grace)
        self._shared = opening if shared and not faults else None
        return opening

    def close(self) -> None:
        """End the ranks. A second call has no effect."""
        self._ranks.close()
        self._shared = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_absent(plan: Sequence[Fault], size: int) -> None:
    """Refuse faults of ranks that a run of ``size`` ranks does not have.

    Raises:
        InvalidArgumentError: there is such a fault.
    """
    for fault in plan:
        if fault.rank >= size:
            raise InvalidArgumentError(
                f"{fault}: there is no rank {fault.rank}, only ranks 0 to {size - 1}. Name one of "
                "these, or start more ranks."
            )


@overload
def run_ranks(
    n: int,
    function: Callable[Concatenate[Communicator, P], R],
    *args: P.args,
    **options: P.kwargs,
) -> list[R]: ...


# The options of ``function`` are unchecked here: a ParamSpec leaves no room for other keywords.
@overload
def run_ranks(
    n: int,
    function: Callable[[Communicator, *Ts], R],
    *args: *Ts,
    backend: str | type[Backend] = "threads",
    timeout: float = 60.0,
    call_timeout: float | None = None,
    check: str = "auto",
    faults: Sequence[Fault] = (),
    mpiexec: Mpiexec | None = None,
    **options: Any,
) -> list[R]: ...


def run_ranks(  # type: ignore[misc]  # the keywords of ``function`` may have any name
    n: int,
    function: Callable[..., R],
    *args: Any,
    backend: str | type[Backend] = "threads",
    timeout: float = 60.0,
    call_timeout: float | None = None,
    check: str = "auto",
    faults: Sequence[Fault] = (),
    mpiexec: Mpiexec | None = None,
    **options: Any,
) -> list[R]:
    """Call ``function(comm, *args, **options)`` on ``n`` ranks and return their results.

    ::

        def total(comm):
            return comm.all_reduce(np.array([comm.rank])).item()

        assert run_ranks(4, total) == [6, 6, 6, 6]

    Args:
        n: number of ranks.
        function, args, options: function that each rank calls, and its arguments. If the
            transport connects processes, the function must be a global of a module, and all of
            these must be picklable.
        backend: a transport's name or class; ``"threads"`` needs no processes.
        timeout: seconds until ranks that have not returned are stopped.
        call_timeout: seconds that one call of the communicator may take; by default
            somewhat less than ``timeout``.
        check: ``"always"`` to compare the ranks' calls on any transport.
        faults: faults to inject; see :mod:`collective.testing.faults`.
        mpiexec: how to start ranks of MPI; see :class:`RankPool`.

    Returns:
        The ranks' results, in rank order.

    Raises:
        RanksFailedError: a rank raised, died or hung; the error has every rank's traceback.
    """
    __tracebackhide__ = True
    if callable(n):
        raise InvalidArgumentError(
            f"run_ranks: the number of ranks comes first. Call run_ranks({function!r}, "
            f"{getattr(n, '__name__', 'function')})."
        )
    with RankPool(n, backend, timeout=timeout, mpiexec=mpiexec) as pool:
        return pool.run(
            function, *args, call_timeout=call_timeout, check=check, faults=faults, **options
        )
