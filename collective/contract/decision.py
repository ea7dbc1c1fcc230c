"""How ranks that may be dying agree: one decides, and what it decided is one key of a store.

Each rank that takes part publishes a *note* and then waits for the decision. The lowest that is not
known to be lost leads: it concludes once every rank has come or is known to be lost, or once it has
waited long enough, and puts its verdict where nobody can replace it
(:meth:`~collective.contract.store.Store.put_if_absent`). Everybody, the leader too, goes by what is
read there. So it does not matter for what is decided if two ranks take themselves for the leader,
if one is stopped and goes on later, or what a rank thinks of another: there is one key, and
it is written once.

A rank that comes after the decision reads it like all others, and may find that it is about the
others alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, RendezvousError

from .store import Store

__all__ = ["Decision", "Note"]

#: What a rank publishes: anything that JSON has. ``exclude`` names ranks that need not come, and
#: ``patient`` is that of one that does not want the others hurried: see :meth:`Decision.made`.
Note = dict[str, Any]

# Shares of the deadline: how long a leader waits for silent ranks at most, and a rank whose leaders
# are silent. The rest is for what follows the decision.
_SILENT_SHARE, _LEADERLESS_SHARE = 0.25, 0.75
# A round of looking is some calls of open(2), or round trips to a server.
_PAUSE_FIRST_S, _PAUSE_LAST_S = 0.0005, 0.02


@dataclass(frozen=True)
class Decision:
    """One decision, as one rank takes part in it.

    Attributes:
        store: where it is made; as far as it is known to all ranks.
        key: of the verdict, used for no other decision ever. Notes are at ``key.rank``.
        me: this rank.
        ranks: all that may come, ascending.
        lost: returns those that are known not to come any more. It may be wrong or late.
        what: the operation, for errors.
        shown: returns a rank's number as errors tell it.
    """

    store: Store
    key: str
    me: int
    ranks: Sequence[int]
    lost: Callable[[], Set[int]]
    what: str
    shown: Callable[[int], int]

    def made(
        self,
        note: Note,
        conclude: Callable[[Mapping[int, Note], Set[int]], Any],
        *,
        grace: float | None,
        deadline: Deadline,
    ) -> Any:
        """Take part, and return the verdict: the same on all ranks.

        Args:
            note: this rank's.
            conclude: makes the verdict, which JSON has, of the notes of those who came and of the
                lost. The notes of ranks that are lost by now may be among them.
            grace: seconds for which a leader waits for ranks that neither come nor are known to
                be lost, but no more than a quarter of the time until ``deadline``, so that the
                ranks that have come go on by then. With None all ranks wait until ``deadline``,
                and so they do while all notes are patient.
            deadline: moment by which there has to be a verdict.

        Raises:
            CollectiveTimeoutError: there was no verdict in time; names the ranks that did not come.
            RendezvousError: the store is gone.
            UnsupportedError: it cannot keep the first of several values.
        """
        began, time_limit = time.monotonic(), deadline.left()
        if (verdict := self._verdict()) is not None:
            return verdict[0]
        self.store.set(f"{self.key}.{self.me}", json.dumps(note).encode())
        notes: dict[int, Note] = {self.me: note}
        pause = _PAUSE_FIRST_S
        while True:
            lost = self.lost()
            awaited = self._awaited(notes, lost)
            # After the notes: who has read a verdict may have put something else in its note's
            # place by now, of which nothing is to be concluded.
            if (verdict := self._verdict()) is not None:
                return verdict[0]
            waited = time.monotonic() - began
            ahead = sum(rank < self.me and rank not in lost for rank in notes)
            hurried = grace is not None and not all(note.get("patient") for note in notes.values())
            enough = hurried and waited >= _patience(grace or 0.0, ahead, time_limit)
            if enough or not (awaited or ahead):
                self._conclude(conclude(notes, lost))
            elif deadline.expired:
                raise self._late(awaited, deadline, lost)
            else:
                time.sleep(deadline.at_most(pause))
                pause = min(1.3 * pause, _PAUSE_LAST_S)

    def _verdict(self) -> list[Any] | None:
        """Return what was decided, in a list of one; None as long as nothing was."""
        found = self.store.try_get(self.key)
        return None if found is None else [_read(self.key, found)]

    def _conclude(self, verdict: Any) -> None:
        # What this returns is what the next look finds, too: it is the only word that counts.
        self.store.put_if_absent(self.key, json.dumps(verdict).encode())

    def _awaited(self, notes: dict[int, Note], lost: Set[int]) -> list[int]:
        """Look who has come since, and return those who may still."""
        awaited = []
        for rank in self.ranks:
            if rank in notes or rank in lost:
                continue
            found = self.store.try_get(f"{self.key}.{rank}")
            if found is None:
                awaited.append(rank)
            else:
                notes[rank] = _read(f"{self.key}.{rank}", found)
        excluded = {rank for note in notes.values() for rank in note.get("exclude", ())}
        return [rank for rank in awaited if rank not in excluded]

    def _late(
        self, awaited: Sequence[int], deadline: Deadline, lost: Set[int]
    ) -> CollectiveTimeoutError:
        # If all have come it is the leader that has not decided.
        leader = min((rank for rank in self.ranks if rank not in lost), default=self.me)
        ranks = tuple(map(self.shown, awaited or (leader,)))
        return CollectiveTimeoutError(
            f"{self.what}: timed out: waited {deadline.seconds:g} s for rank "
            f"{', '.join(map(str, ranks))}, which did not call it, or has been stopped "
            f"[rank {self.shown(self.me)}]",
            ranks,
        )


def _patience(grace: float, ahead: int, time_limit: float) -> float:
    """Return for how many seconds a rank waits for silent ones, with ``ahead`` leaders before it.

    A leader that is stopped, and so not known to be lost, is not waited for forever. It may have
    come when this rank had waited for a whole grace, waits for another itself, and has a third to
    conclude. ``time_limit`` is what all of that may take.
    """
    alone = min(grace, _SILENT_SHARE * time_limit)
    return min(alone * (1 + 2 * ahead), _LEADERLESS_SHARE * time_limit)


def _read(key: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RendezvousError(
            f"rendezvous: what the store holds for {key!r} is not what a rank of this job puts "
            "there. Somebody else writes to it: use a store of this launch's own."
        ) from error
