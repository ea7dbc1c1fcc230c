"""Generations of a communicator's ranks: which are lost, and who wants to join."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collective.deadline import Deadline
from collective.generations import changes

if TYPE_CHECKING:
    from .communicator import Communicator


class Membership:
    """Ranks of a communicator, from one generation to the next, as ``comm.membership``."""

    __slots__ = ("_comm", "_succession")

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._succession = comm.inner.succession

    def __repr__(self) -> str:
        return f"<Membership of generation {self.generation}: {list(self.origin)}>"

    @property
    def generation(self) -> int:
        """Number of calls of ``shrink()`` and ``grow()`` that led to this communicator."""
        return self._succession.generation

    @property
    def origin(self) -> tuple[int, ...]:
        """Original number of each present rank, in the order of the present ranks.

        Original numbers are the ranks of the communicator of generation 0; for a group, the ranks
        in the group as it was made. A process that joined later has a new number, greater than all
        numbers that were used before.
        """
        return self._succession.origin(self._comm.size)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks of the previous generation that are not in this one."""
        return self._succession.lost

    @property
    def shrink_timeout(self) -> float:
        """Seconds that ``shrink()`` may take if the call passes no ``timeout``.

        This is the communicator's timeout, or the time needed to continue without silent ranks if
        that is longer: four times ``COLLECTIVE_SHRINK_GRACE``, plus the time to connect.
        """
        return self._succession.shrink_timeout(self._comm.timeout)

    @property
    def joins(self) -> bool:
        """Whether this process is alone and will join other ranks when it calls ``grow()``.

        It is true after ``init(join="late")``, as in a process that ``collective run --replace``
        starts in place of a lost one.
        """
        return self._succession.joiner is not None

    @property
    def grows(self) -> bool:
        """Whether processes can join: some transports and all groups do not support it."""
        return self._comm.capabilities.grows and self._succession.founders > 0

    def waiting(self) -> int:
        """Return the number of processes that wait to join, the same on all ranks.

        Rank 0 reads the number from the store and broadcasts it. While no process waits, the cost
        is one look-up of a missing key (a file) and one small broadcast. Processes can find these
        ranks from the first call on.

        Collective: every rank calls it.

        Raises:
            RendezvousError: the store in which the ranks met is gone; raised on all ranks.
            UnsupportedError: processes cannot join over this transport, or cannot join a group.
        """
        return changes.waiting(self._comm)

    def agree(self, flag: bool = True, timeout: float | None = None) -> bool:
        """Return whether every living rank passes a true ``flag``: the same answer on all of them.

        Collective among the living ranks, on a broken or a sound communicator; the call never
        breaks it. If a rank dies meanwhile, the other ranks do not wait for it; its vote counts if
        it had voted before. The votes go through the store in which the ranks met, so the call
        takes milliseconds, where a reduction takes microseconds.

        Args:
            flag: vote of this rank.
            timeout: deadline in seconds; by default the communicator's timeout.

        Raises:
            CollectiveTimeoutError: a rank did not call it, and was not detected as lost.
            CommunicatorAbortedError: another rank has given up waiting and calls ``shrink()``.
            RendezvousError: the store in which the ranks met is gone.
            UnsupportedError: this transport or that store does not support it.

        See Also:
            MPIX_Comm_agree.
        """
        deadline = Deadline(self._comm._path.check_timeout(timeout))
        return changes.agree(self._comm, bool(flag), deadline)
