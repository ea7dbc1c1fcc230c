"""What the ranks of a pool do: connect when a job needs it, and call the job's function."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collective.communicator import Communicator
from collective.communicator.lineage import Lineage
from collective.contract import registry
from collective.contract.backend import Backend
from collective.contract.world import World
from collective.launch.outcome import RankDiedError
from collective.launch.ranks import Job, Participant
from collective.start import session
from collective.start.file_store import FileStore

from .faults import Fault, FaultyBackend, RankKilled

__all__ = ["GRACE_S", "CommunicatorJob", "Opening", "backend_class"]

# A check of deadlines wants short ones, and ranks that meet on a busy machine need long ones.
_START_S = 20.0
#: How late a rank may come to ``shrink()`` that lives. On a busy machine one that is in MPI's own
#: operation when another dies was seconds behind the others.
GRACE_S = 15.0


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
        shrink_grace: seconds that a rank may be silent when the others shrink.
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
        lineage = Lineage.begin(backend, world, start, grace=self.shrink_grace, min_ranks=1)
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
    """A function that every rank calls with its communicator.

    Attributes:
        function: called as ``function(comm, *args, **options)``.
        shared: whether the communicator stays for the next job of the same opening.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    options: Mapping[str, Any]
    opening: Opening
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.function!r} and its arguments"

    def load(self) -> None:
        # A transport that cannot be imported would keep the peers waiting for this rank.
        backend_class(self.opening.backend)

    def run(self, participant: Participant) -> Any:
        __tracebackhide__ = True
        comm = participant.kept.get(self.opening)
        if comm is None:
            participant.leave()
            comm = participant.kept[self.opening] = self.opening.connect(participant.rank)
        # Threads come and go: the current communicator of module-level calls is this one's.
        session.set_current(comm)
        try:
            value = self.function(comm, *self.args, **self.options)
        except RankKilled as killed:
            participant.kept.clear()
            raise RankDiedError(str(killed)) from None
        if not self.shared:
            participant.leave()
        return value

    def failed(self, participant: Participant, error: BaseException) -> None:
        comm = participant.kept.pop(self.opening, None)
        if comm is not None:
            comm.__exit__(type(error), error, error.__traceback__)
