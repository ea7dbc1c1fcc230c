"""A process that joins ranks which are connected already."""

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
    """A process that joins ranks which are connected: from its knock to their next generation.

    Attributes:
        world: where the ranks met, and this process's host; its numbers are of no account.
        find: returns the transport that this process is to have, given the name of the ranks'.
        grace, min_ranks: as of :class:`Lineage`.
    """

    world: World
    find: Callable[[str], type[Backend]]
    grace: float
    min_ranks: int

    def run(self, alone: Backend, deadline: Deadline) -> tuple[Backend, Lineage]:
        """Wait to be let in; return the transport of the grown generation, and its lineage.

        Args:
            alone: what this process has until then.
            deadline: for all of it.

        Raises:
            CollectiveTimeoutError: nobody let it in, or they did not connect.
            ExcludedError: there are no ranks any more, or they went on without it.
            ConfigError: they have another transport, or speak another protocol.
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
                # They could not connect at first, and then did without this process.
                if deadline.expired:
                    raise
