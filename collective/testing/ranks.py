"""Several ranks in one test: `run_ranks`, and pools that keep them for the next test."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from collective.contract.backend import Backend
from collective.contract.capabilities import Capabilities
from collective.errors import InvalidArgumentError
from collective.launch.command_starter import under_mpiexec
from collective.launch.mpiexec import Mpiexec
from collective.launch.outcome import RanksFailedError
from collective.launch.process_starter import ProcessStarter
from collective.launch.ranks import Ranks, Starter
from collective.launch.thread_starter import ThreadStarter

from .faults import Fault
from .opening import GRACE_S, CommunicatorJob, Opening, backend_class

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RankPool", "capabilities_of", "run_ranks"]

# A call gives up before the job does: its error names the ranks that did not come.
_CALL_SHARE = 0.75


def capabilities_of(backend: str | type[Backend], mpiexec: Mpiexec | None = None) -> Capabilities:
    """Return what a transport can whose ranks a pool starts.

    Of MPI's the class does not know which library it will be: whether its ranks can go on after a
    loss is the ``mpiexec``'s affair.
    """
    kind = backend_class(backend)
    if kind.launcher == "mpiexec" and (mpiexec or Mpiexec()).outlasts_ranks():
        return replace(kind.capabilities, shrinks=True)
    return kind.capabilities


class RankPool:
    """Ranks that are kept from job to job.

    Ranks are threads of this process if the transport says that it is one among threads,
    else processes, started when the first job comes; one that died or hung is replaced for
    the next job. A context manager; one job runs at a time.

    Processes start in no time after :func:`preload`.

    Args:
        size: how many ranks.
        backend: a registered transport's name, ``module:Class``, or a ``Backend`` class
            (importable, where ranks are processes).
        timeout: seconds that a job may take, unless it says otherwise.
        mpiexec: with what the ranks are started if the transport is MPI's; by default with
            this Python and the ``mpiexec`` beside it.

    Raises:
        BackendNotFoundError, BackendUnavailableError: no such transport, or not here.
    """

    def __init__(
        self,
        size: int,
        backend: str | type[Backend] = "threads",
        *,
        timeout: float = 60.0,
        mpiexec: Mpiexec | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgumentError(f"RankPool: size {size!r}; a positive integer.")
        self.size = size
        self.backend = backend
        self.timeout = timeout
        kind = backend_class(backend)
        self.capabilities = capabilities_of(backend, mpiexec)
        starter: Starter = ProcessStarter()
        if self.capabilities.in_process:
            starter = ThreadStarter()
        elif kind.launcher == "mpiexec":
            starter = under_mpiexec(size, mpiexec or Mpiexec())
        self._ranks = Ranks(size, starter)
        self._directory: str | None = None
        self._shared: Opening | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        call_timeout: float | None = None,
        shared: bool = False,
        check: str = "auto",
        faults: Sequence[Fault] = (),
        shrink_grace: float = GRACE_S,
        **options: Any,
    ) -> list[Any]:
        """Call ``function(comm, *args, **options)`` on every rank.

        Args:
            function: what to do; where ranks are processes, it, its arguments and its result
                are pickled, so it has to stand at the top of a module.
            timeout: seconds until ranks that have not returned are stopped: processes are
                killed, threads find their communicator aborted. Starting processes does
                not count.
            call_timeout: seconds that one call of the communicator may take; by default
                somewhat less than ``timeout``.
            shared: use one communicator for all jobs that say so and do not differ in
                ``call_timeout``, ``check`` and ``shrink_grace``, for as long as none of them
                fails.
            check: ``"always"`` to compare the ranks' calls on any transport.
            faults: what is to go wrong; see :mod:`collective.testing.faults`.
            shrink_grace: seconds that a rank may be silent when the others call ``shrink()``.

        Returns:
            The ranks' results, in rank order.

        Raises:
            RanksFailedError: a rank raised, died or hung; holds every rank's traceback.
        """
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
        self._shared = opening if shared else None
        return opening

    def close(self) -> None:
        """End the ranks. A second close does nothing."""
        self._ranks.close()
        self._shared = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str | type[Backend] = "threads",
    timeout: float = 60.0,
    call_timeout: float | None = None,
    check: str = "auto",
    faults: Sequence[Fault] = (),
    mpiexec: Mpiexec | None = None,
    **options: Any,
) -> list[Any]:
    """Call ``function(comm, *args, **options)`` on ``n`` ranks and return their results.

    ::

        def total(comm):
            return comm.all_reduce(np.array([comm.rank])).item()

        assert run_ranks(4, total) == [6, 6, 6, 6]

    Args:
        n: how many ranks.
        function, args, options: what each rank does; with a transport among processes it has
            to stand at the top of a module, and everything has to be picklable.
        backend: a transport's name or class; ``"threads"`` needs no processes.
        timeout: seconds until ranks that have not returned are stopped.
        call_timeout: seconds that one call of the communicator may take; by default
            somewhat less than ``timeout``.
        check: ``"always"`` to compare the ranks' calls on any transport.
        faults: what is to go wrong; see :mod:`collective.testing.faults`.
        mpiexec: with what ranks of MPI are started; see :class:`RankPool`.

    Returns:
        The ranks' results, in rank order.

    Raises:
        RanksFailedError: a rank raised, died or hung; holds every rank's traceback.
    """
    with RankPool(n, backend, timeout=timeout, mpiexec=mpiexec) as pool:
        return pool.run(
            function, *args, call_timeout=call_timeout, check=check, faults=faults, **options
        )
