"""A vote of the ranks that live, by way of the store in which they met."""

from __future__ import annotations

import time

from collective.contract.backend import Backend
from collective.contract.decision import Decision
from collective.deadline import Deadline
from collective.errors import CommunicatorAbortedError

from .lineage import Lineage

__all__ = ["agreed"]

# How often a rank that waits in agree() looks whether another one has given it up.
_GIVEN_UP_LOOK_S = 0.05


def agreed(lineage: Lineage, backend: Backend, number: int, flag: bool, deadline: Deadline) -> bool:
    """Return whether all living ranks say yes; the same on all of them.

    Args:
        number: ordinal of this agreement on this communicator, from 1.

    Raises:
        CollectiveTimeoutError: a rank that lives, as far as is known, did not come.
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
            # The verdict second: a rank may have read it, and have shrunk since.
            if store.try_get(opened) is not None and store.try_get(key) is None:
                raise CommunicatorAbortedError(
                    f"agree: another rank has given up waiting, and calls shrink(); call it too, "
                    f"to go on with that rank [rank {lineage.origin.index(me)} of "
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
    # Who has come to this one has read the last, and nobody else will: the lost do not come back.
    store.delete(f"{before}.{me}")
    if me == lineage.origin[0]:
        store.delete(before)
    return bool(verdict)
