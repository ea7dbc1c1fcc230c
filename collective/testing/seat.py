"""One rank of a pool: connects when a job needs it, and runs the jobs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collective.communicator import Communicator
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.world import World
from collective.start import session
from collective.start.file_store import FileStore

from .failed import Outcome, RankDiedError
from .faults import Fault, FaultyBackend, RankKilled

__all__ = ["Job", "Opening", "Seat", "backend_class"]

# A check of deadlines wants short ones, and ranks that meet on a busy machine need long ones.
_START_S = 20.0


def backend_class(backend: str | type[Backend]) -> type[Backend]:
    """Return the transport that ``backend`` names, or is."""
    return registry.find(backend) if isinstance(backend, str) else backend


@dataclass(frozen=True)
class Opening:
    """How the ranks of a pool get a communicator. Equal openings share one.

    Attributes:
        backend: a registered name, ``module:Class``, or a class.
        size: how many ranks.
        job: a text that no other opening has.
        directory: where they meet.
        timeout: seconds that a call may take.
        check: ``"always"`` to compare calls on any transport.
        faults: what goes wrong on the way.
    """

    backend: str | type[Backend]
    size: int
    job: str
    directory: str
    timeout: float
    check: str = "auto"
    faults: tuple[Fault, ...] = ()

    def world(self, rank: int) -> World:
        """Return the world as ``rank`` sees it."""
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
        start = max(self.timeout, _START_S)
        backend: Backend = backend_class(self.backend).connect(world, start)
        if self.faults:
            backend = FaultyBackend(backend, self.faults)
        return Communicator(
            backend,
            local_rank=world.local_rank,
            local_size=world.local_size,
            host=world.host,
            timeout=self.timeout,
            check=self.check,
        )


@dataclass(frozen=True)
class Job:
    """What all ranks of a pool do once.

    Attributes:
        function: called as ``function(comm, *args, **options)``.
        shared: whether the communicator stays for the next job of the same opening.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    opening: Opening
    shared: bool = False


class Seat:
    """One rank; keeps a shared communicator between jobs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.comm: Communicator | None = None
        self._opening: Opening | None = None

    def run(self, job: Job) -> Outcome:
        """Do this rank's part of ``job``."""
        try:
            comm = self._sit(job.opening)
            value = job.function(comm, *job.args, **job.options)
            if not job.shared:
                self.leave()
            return Outcome(value)
        except RankKilled as killed:
            self._forget()
            return Outcome(error=RankDiedError(str(killed)), traceback=str(killed))
        except BaseException as error:  # it is told to whoever runs the pool
            outcome = Outcome.failed(error)
            comm_then, self.comm = self.comm, None
            self._forget()
            if comm_then is not None:
                comm_then.__exit__(type(error), error, error.__traceback__)
            return outcome

    def leave(self) -> None:
        """Close the communicator, if there is one."""
        comm = self.comm
        self._forget()
        if comm is not None:
            comm.close()

    def _sit(self, opening: Opening) -> Communicator:
        if self.comm is None or self._opening != opening:
            self.leave()
            self.comm = opening.connect(self.rank)
            self._opening = opening
        # Threads come and go: the current communicator of module-level calls is this one's.
        session.set_current(self.comm)
        return self.comm

    def _forget(self) -> None:
        self.comm = self._opening = None
