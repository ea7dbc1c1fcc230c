"""Process that joins ranks which are connected already."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from collective.contract.backend import Backend
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import ExcludedError

from .arrivals import Knock
from .lineage import Lineage
from .next_generation import NextGeneration

__all__ = ["Joiner"]


@dataclass(frozen=True)
class Joiner:
    """Process that joins connected ranks, from its first request to their next generation.

    Attributes:
        world: store in which the ranks met, and host of this process; rank and size are not used.
        find: function that returns the transport class for the name of the ranks' transport.
        grace, min_ranks: as in :class:`Lineage`.
    """

    world: World
    find: Callable[[str], type[Backend]]
    grace: float
    min_ranks: int

    def run(self, alone: Backend, deadline: Deadline) -> tuple[Backend, Lineage]:
        """Wait to be let in; return the transport of the grown generation, and its lineage.

        Args:
            alone: transport of this process alone, until it has joined.
            deadline: deadline of the whole operation.

        Raises:
            CollectiveTimeoutError: no rank let this process in, or the ranks did not connect.
            ExcludedError: the ranks have ended, or continued without this process.
            ConfigError: the ranks have another transport, or use another protocol.
        """
        knock = Knock(self.world.store, self.world.host, self.grace)
        kind = self.find(knock.backend(deadline))
        while True:
            offer = knock.admitted(deadline)
            founders = offer["founders"]
            lineage = Lineage(
                root=replace(self.world, rank=offer["number"], size=founders),
                name=offer["name"],
                origin=tuple(offer["origin"]),
                generation=offer["generation"] - 1,
                grace=self.grace,
                min_ranks=self.min_ranks,
                founders=founders,
            )
            try:
                return NextGeneration(lineage, alone, deadline, kind=kind).run()
            except ExcludedError:
                # The ranks first failed to connect, and then decided on a generation without this
                # process. Take a new ticket and try again.
                if deadline.expired:
                    raise
