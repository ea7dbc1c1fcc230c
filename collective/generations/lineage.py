"""Lineage of a communicator: the store in which its ranks met, and their original numbers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from collective.algorithms.agreement import barrier
from collective.algorithms.messages import Messages
from collective.algorithms.moves import broadcast
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

_TOKEN_BYTES = 8
_UINT8 = BY_NAME["uint8"]
#: Errors that a rank's peers cause, and not the rank itself.
OF_PEERS = (
    RendezvousError, CommunicatorAbortedError, CollectiveTimeoutError, BackendError,
    ConnectionError,
)  # fmt: skip


@dataclass(frozen=True)
class Lineage:
    """Store in which a communicator's ranks met, and the surviving ranks.

    Attributes:
        root: world of generation 0, with this rank's original number.
        name: name that is the same on all ranks, and unique among the communicators that meet in
            the same store.
        origin: original number of each present rank, in the order of the present ranks.
        generation: number of times that the communicator has shrunk or grown.
        lost: ranks of the previous generation that are not in this one.
        local_rank, local_size: number of this rank among the ranks of its host, and their number.
        grace: seconds that a rank may be silent while the other ranks shrink.
        min_ranks: minimum number of ranks to continue with.
        founders: number of ranks in generation 0; 0 for a group, which processes cannot join.
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

        Nothing is sent if the transport has a name for the meeting. Otherwise a rank that dies or
        shrinks right after its ``init()`` would break the ``init()`` of ranks that still gather.

        Raises:
            RendezvousError: rank 0 must send the name to the other ranks, because the transport has
                none, and a rank is gone.
        """
        name = backend.meeting or secrets.token_hex(_TOKEN_BYTES)
        if not backend.meeting and world.size > 1 and backend.capabilities.shrinks:
            token = Buffer(np.frombuffer(bytearray(name.encode()), np.uint8), _UINT8)
            try:
                broadcast(Messages(backend, deadline), token, 0)
            except OF_PEERS as error:
                raise RendezvousError(
                    f"{backend.name}: the ranks have connected, but one failed right afterwards "
                    f"[rank {world.rank} of {world.size}]: {error}"
                ) from error
            name = token.array.tobytes().decode()
            # No rank may continue before all ranks have the name: the first call of a fast rank may
            # break the communicator for all. If the barrier fails, ignore its error here: the first
            # calls of the other ranks report it.
            with contextlib.suppress(*OF_PEERS):
                barrier(Messages(backend, deadline))
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
        """Present number of this rank."""
        return self.origin.index(self.root.rank)

    def group(self, backend: Backend, ranks: Sequence[int], name: str) -> Lineage:
        """Return the lineage of a group among ``ranks``.

        The group's generations are counted from this lineage's generation.

        Args:
            backend: transport of the group.
            ranks: members of the group.
            name: name that is the same on all members, and unique among this lineage's groups.
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
