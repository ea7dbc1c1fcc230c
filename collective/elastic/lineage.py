"""Where a communicator's ranks met, and who they once were."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collective.algorithms.barrier import barrier
from collective.algorithms.broadcast import broadcast
from collective.contract.backend import Backend
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    RendezvousError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME

__all__ = ["OF_PEERS", "Lineage"]

_TOKEN_BYTES = 8
_UINT8 = BY_NAME["uint8"]
#: What a rank meets on the way that is an affair of its peers, and not of its own.
OF_PEERS = (
    RendezvousError, CommunicatorAbortedError, CollectiveTimeoutError, BackendError,
    ConnectionError,
)  # fmt: skip


@dataclass(frozen=True)
class Lineage:
    """Where a communicator's ranks met, and which of them are left.

    Attributes:
        root: the world of generation 0, whose rank this one was.
        name: the same on all ranks, and no other communicator's that meets in the same store.
        origin: the ranks of generation 0 that are in this one, in the order of their present ranks.
        generation: how often it was shrunk, or grew.
        lost: of the parent's ranks, those that are not here.
        local_rank, local_size: this rank among those of its host.
        grace: seconds that a rank may be silent when the others shrink.
        min_ranks: with fewer, nobody goes on.
        founders: how many ranks there were at first; 0 for a group, which nobody joins.
    """

    root: World
    name: str
    origin: tuple[int, ...]
    generation: int = 0
    lost: frozenset[int] = frozenset()
    local_rank: int = 0
    local_size: int = 1
    grace: float = 5.0
    min_ranks: int = 1
    founders: int = 0

    @classmethod
    def begin(
        cls, backend: Backend, world: World, deadline: Deadline, *, grace: float, min_ranks: int
    ) -> Lineage:
        """Return the lineage of a transport that has just been connected; all ranks call it.

        Raises:
            RendezvousError: of a transport whose ranks have to be told a name yet: one is gone.
        """
        name = backend.meeting or secrets.token_hex(_TOKEN_BYTES)
        if not backend.meeting and world.size > 1 and backend.capabilities.shrinks:
            token = Buffer(np.frombuffer(bytearray(name.encode()), np.uint8), _UINT8)
            try:
                broadcast(backend, token, 0, deadline)
            except OF_PEERS as error:
                raise RendezvousError(
                    f"{backend.name}: the ranks are connected, and one comes no further [rank "
                    f"{world.rank} of {world.size}]: {error}"
                ) from error
            name = token.array.tobytes().decode()
            # Nobody goes on before all have it: the first call of one may break them all. Then it
            # is for the others' first calls to say so.
            with contextlib.suppress(*OF_PEERS):
                barrier(backend, deadline)
        return cls(
            root=replace(world, store=backend.lasting(world.store)),
            name=name,
            origin=tuple(range(world.size)),
            local_rank=world.local_rank,
            local_size=world.local_size,
            grace=grace,
            min_ranks=min_ranks,
            founders=world.size,
        )

    @property
    def rank(self) -> int:
        """This rank's present number."""
        return self.origin.index(self.root.rank)

    def group(self, backend: Backend, ranks: Sequence[int], name: str) -> Lineage:
        """Return the lineage of a group among ``ranks``, whose generations begin with this one's.

        Args:
            backend: the group's.
            name: the same on all members, and no other group's of this lineage.
        """
        world = replace(
            self.root,
            rank=backend.rank, size=backend.size, local_rank=backend.rank, local_size=backend.size,
            secret=self.root.secret and self.root.secret.within("group", self.name, name),
        )  # fmt: skip
        return replace(
            self,
            root=world,
            name=f"{self.name}-{self.generation}-{name}",
            origin=tuple(range(len(ranks))),
            lost=frozenset(),
            local_rank=backend.rank,
            local_size=backend.size,
            founders=0,
        )
