"""Data that a communicator keeps about its generations, and the process that joins the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from collective.contract.backend import Backend
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import ExcludedError, RendezvousError

from .arrivals import Arrivals, Knock
from .lineage import Lineage
from .next_generation import NextGeneration, usual_seconds


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


class Succession:
    """Data about previous generations, which a communicator hands over to the next generation.

    Args:
        lineage: store in which the ranks met, and the surviving ranks; None if the communicator
            was made directly from a transport, so that the store is unknown.

    Attributes:
        lineage: the same lineage.
        joiner: object that joins the ranks, in a process that is alone and waits for them.
        on_next: function that is called with the communicator of the next generation before this
            one closes.
        at_end: functions that are called when the last generation closes. One of them closes the
            store in which the ranks met, which all generations use.
        agreements: number of calls of :func:`agree`.
    """

    def __init__(self, lineage: Lineage | None) -> None:
        self.lineage = lineage
        self.joiner: Joiner | None = None
        self.on_next: Callable[[Any], None] | None = None
        self.at_end: list[Callable[[], None]] = []
        self.agreements = 0
        # Queue of the processes that wait to be let in; None until it is first needed.
        self._arrivals: Arrivals | None = None

    @property
    def generation(self) -> int:
        """Number of calls of ``shrink()`` and ``grow()`` that led here."""
        return self.lineage.generation if self.lineage is not None else 0

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of the previous generation that are not in this one."""
        return self.lineage.lost if self.lineage is not None else frozenset()

    @property
    def founders(self) -> int:
        """Number of ranks in generation 0; 0 if processes cannot join, as in a group."""
        return self.lineage.founders if self.lineage is not None else 0

    def origin(self, size: int) -> tuple[int, ...]:
        """Return the original number of each present rank.

        Args:
            size: number of present ranks.
        """
        return self.lineage.origin if self.lineage is not None else tuple(range(size))

    def shrink_timeout(self, timeout: float) -> float:
        """Return the seconds that ``shrink()`` may take if the call passes no ``timeout``.

        Args:
            timeout: timeout of the communicator, in seconds.
        """
        return timeout if self.lineage is None else usual_seconds(self.lineage.grace, timeout)

    def arrivals(self, backend: str) -> Arrivals:
        """Return the queue of processes that wait to join ranks over the transport ``backend``."""
        assert self.lineage is not None
        if self._arrivals is None:
            self._arrivals = Arrivals(self.lineage.root.store, backend)
        return self._arrivals

    def hand_over(self, successor: Succession, backend: str, speaks: bool) -> None:
        """Move the data that exists only once from this generation to the next one.

        Args:
            successor: succession of the next generation.
            backend: name of the next generation's transport.
            speaks: whether this rank announces the ranks of the next generation to processes that
                want to join.
        """
        successor.on_next = self.on_next
        successor.at_end, self.at_end = self.at_end, []
        if self._arrivals is None:
            return
        self._arrivals = None
        arrivals = successor.arrivals(backend)
        if speaks:
            # The rank that made the last announcement may be gone, and waiting processes may have
            # noticed. A new announcement shows them that the ranks continue.
            with contextlib.suppress(RendezvousError):
                arrivals.announce()

    def announce(self) -> None:
        """Announce that the ranks go on, if processes may wait to join them."""
        if self._arrivals is not None:
            self._arrivals.announce()

    def keep_announcement(self) -> None:
        """Leave the announcement of this rank in place: this rank leaves, other ranks continue."""
        if self._arrivals is not None:
            self._arrivals.keep()

    def end_arrivals(self) -> None:
        """Announce to waiting processes that no rank will let them in any more."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            with contextlib.suppress(RendezvousError):
                arrivals.end()

    def close(self) -> None:
        """End the arrivals, and call the functions in ``at_end``, which a successor takes over."""
        self.end_arrivals()
        at_end, self.at_end = self.at_end, []
        for function in at_end:
            function()
