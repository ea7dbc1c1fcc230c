"""Vote of the living ranks, through the store in which the ranks met."""

from __future__ import annotations

import time

from collective.contract.backend import Backend
from collective.contract.decision import Decision
from collective.deadline import Deadline
from collective.errors import CommunicatorAbortedError

from .lineage import Lineage

__all__ = ["agreed"]

# Interval at which a rank that waits in agree() checks whether another rank has given up.
_GIVEN_UP_LOOK_S = 0.05


def agreed(lineage: Lineage, backend: Backend, number: int, flag: bool, deadline: Deadline) -> bool:
    """Return whether all living ranks vote yes; the result is the same on all of them.

    Args:
        lineage: lineage of the communicator.
        backend: transport of the communicator, which knows the lost ranks.
        number: ordinal of this agreement on this communicator, from 1.
        flag: vote of this rank.
        deadline: deadline of the vote.

    Raises:
        CollectiveTimeoutError: a rank did not vote, and was not detected as lost.
        CommunicatorAbortedError: another rank has given up this agreement, and shrinks.
        RendezvousError: the store is gone.
    """
    if len(lineage.origin) == 1:
        return flag
    store, me = lineage.root.store, lineage.root.rank
    before, key = (f"{lineage.name}.{lineage.generation}.agree.{n}" for n in (number - 1, number))

    opened = f"{lineage.name}.{lineage.generation + 1}.open"
    looked_at = time.monotonic()

    def lost() -> set[int]:
        nonlocal looked_at
        if (now := time.monotonic()) >= looked_at + _GIVEN_UP_LOOK_S:
            looked_at = now
            # Read the verdict after `opened`: the rank that shrinks may have read the verdict first
            # and shrunk since. Then it has not given up this agreement.
            if store.try_get(opened) is not None and store.try_get(key) is None:
                raise CommunicatorAbortedError(
                    f"agree: another rank has given up waiting, and calls shrink(); call shrink() "
                    f"too, to continue with that rank [rank {lineage.origin.index(me)} of "
                    f"{len(lineage.origin)}]"
                )
        return {lineage.origin[rank] for rank in backend.lost()}

    decision = Decision(store, key, me, lineage.origin, lost, "agree", lineage.origin.index)
    verdict = decision.made(
        {"flag": flag},
        lambda notes, lost: all(note["flag"] for note in notes.values()),
        grace=None,
        deadline=deadline,
    )
    # Delete the keys of the previous agreement. Every rank that took part in this one has read the
    # previous verdict, and lost ranks do not come back to read it.
    store.delete(f"{before}.{me}")
    if me == lineage.origin[0]:
        store.delete(before)
    return bool(verdict)
