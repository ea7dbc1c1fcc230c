"""What a communicator knows of the generations of its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from collective.errors import RendezvousError

from .arrivals import Arrivals
from .joining import Joiner
from .lineage import Lineage
from .next_generation import usual_seconds

__all__ = ["Succession"]


class Succession:
    """What a communicator knows of the generations before it, and hands to the next one.

    Args:
        lineage: where the ranks met, and which of them are left; None for a communicator that was
            made of a transport, whose ranks met nobody knows where.

    Attributes:
        lineage: the same.
        joiner: of a process that is alone, how it joins the ranks that it waits for.
        on_next: called with the communicator of the next generation, before this one closes.
        owns_store: whether the store in which the ranks met closes with the last generation. All
            generations meet in it.
        agreements: how often :func:`agree` was called.
    """

    def __init__(self, lineage: Lineage | None) -> None:
        self.lineage = lineage
        self.joiner: Joiner | None = None
        self.on_next: Callable[[Any], None] | None = None
        self.owns_store = False
        self.agreements = 0
        # The processes that wait to be let in, once some rank has asked for them.
        self._arrivals: Arrivals | None = None

    @property
    def generation(self) -> int:
        """Number of calls of ``shrink()`` and ``grow()`` that led here."""
        return self.lineage.generation if self.lineage is not None else 0

    @property
    def lost(self) -> frozenset[int]:
        """The ranks of the last generation that are not in this one."""
        return self.lineage.lost if self.lineage is not None else frozenset()

    @property
    def founders(self) -> int:
        """Number of the first ranks; 0 where nobody can join, as in a group."""
        return self.lineage.founders if self.lineage is not None else 0

    def origin(self, size: int) -> tuple[int, ...]:
        """Return the ranks that the present ones were in generation 0.

        Args:
            size: number of present ranks.
        """
        return self.lineage.origin if self.lineage is not None else tuple(range(size))

    def shrink_timeout(self, timeout: float) -> float:
        """Return the seconds that ``shrink()`` may take where the call names no other deadline.

        Args:
            timeout: the communicator's, in seconds.
        """
        return timeout if self.lineage is None else usual_seconds(self.lineage.grace, timeout)

    def arrivals(self, backend: str) -> Arrivals:
        """Return the queue of processes that wait to join ranks over the transport ``backend``."""
        assert self.lineage is not None
        if self._arrivals is None:
            self._arrivals = Arrivals(self.lineage.root.store, backend)
        return self._arrivals

    def hand_over(self, successor: Succession, backend: str, speaks: bool) -> None:
        """Give the next generation what there is only one of.

        Args:
            successor: the next generation's.
            backend: the name of its transport.
            speaks: whether this rank speaks for the ranks of the next generation.
        """
        successor.on_next = self.on_next
        successor.owns_store, self.owns_store = self.owns_store, False
        if self._arrivals is None:
            return
        self._arrivals = None
        arrivals = successor.arrivals(backend)
        if speaks:
            # A process that waits may have seen that the rank which spoke before is gone.
            with contextlib.suppress(RendezvousError):
                arrivals.announce()

    def keep_announcement(self) -> None:
        """Leave the announcement of this rank in place: this rank goes, and other ranks go on."""
        if self._arrivals is not None:
            self._arrivals.keep()

    def end_arrivals(self) -> None:
        """Tell the processes that wait that nobody lets them in any more."""
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            with contextlib.suppress(RendezvousError):
                arrivals.end()

    def close(self) -> None:
        """End the arrivals, and close the store if no other generation or program uses it."""
        self.end_arrivals()
        if self.owns_store and self.lineage is not None:
            self.lineage.root.store.close()
