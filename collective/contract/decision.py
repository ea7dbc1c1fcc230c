"""Agreement among ranks of which some may die: a leader writes the verdict to one key of a store.

Each rank that takes part publishes a *note* and then waits for the verdict. The leader is the
lowest rank that does not count as lost. The leader concludes once every rank has published a note
or counts as lost, or once the leader has waited long enough. It writes the verdict with
:meth:`~collective.control.store.Store.put_if_absent`, so no rank can replace it. All ranks,
including the leader, then read the verdict from the store and follow it.

There is one key, and it is written once. So the ranks still agree if two of them act as the
leader, if a rank is stopped and resumes later, or if ranks differ about which ranks are lost.

A rank that comes after the decision reads the same verdict. It may find that the verdict covers
only the other ranks.
"""

# The key of a verdict is never deleted: a rank that was stopped for an hour has to read that the
# others went on. A rank's opinion of who is dead decides only when the leader may conclude, and not
# what holds. Agreement by messages among the remaining ranks would need the transport that is
# broken, and a second way for a rank that comes late.

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, RendezvousError

#: Note that a rank publishes, a JSON object. The optional key ``exclude`` lists ranks that the
#: decision does not wait for. The optional key ``patient`` is true if this rank needs no early
#: end of the wait for silent ranks as long as nothing is broken; see :meth:`Decision.made`.
Note = dict[str, Any]

# Shares of the time until the deadline. The first bounds how long a leader waits for silent ranks,
# the second how long a rank waits for silent leaders. The rest is for the steps after the decision.
_SILENT_SHARE, _LEADERLESS_SHARE = 0.25, 0.75
# Pauses between two looks into the store. One look costs some calls of open(2), or some round
# trips to a server.
_PAUSE_FIRST_S, _PAUSE_LAST_S = 0.0005, 0.02


@dataclass(frozen=True)
class Decision:
    """One rank's part in one decision.

    Attributes:
        store: store of the notes and the verdict; all ranks see the same one.
        key: key of the verdict, which no other decision ever uses. Notes are at ``key.rank``.
        me: this rank.
        ranks: all ranks that may take part, ascending.
        lost: function that returns the ranks that count as lost. It may be wrong or late.
        what: name of the operation, for errors.
        shown: function that returns the number by which errors name a rank.
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
        broken: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Take part in the decision, and return the verdict: the same on all ranks.

        Args:
            note: note of this rank.
            conclude: function that makes the verdict from the published notes and the set of lost
                ranks. The verdict must be valid JSON. The notes may include those of ranks that
                are lost by now.
            grace: seconds for which a leader waits for ranks that neither publish a note nor count
                as lost. The wait is at most a quarter of the time until ``deadline``, so
                that the present ranks have time to go on. With None all ranks wait until
                ``deadline``. While all notes are patient and nothing is broken, the grace does not
                begin.
            deadline: moment by which there must be a verdict.
            broken: function that tells whether this rank knows of a loss, so that it may miss the
                news of other ranks.

        Raises:
            CollectiveTimeoutError: there was no verdict in time; names the ranks that did not come.
            RendezvousError: the store is gone.
            UnsupportedError: the store cannot keep the first of several values.
        """
        if (verdict := self._verdict()) is not None:
            return verdict[0]
        self.store.set(f"{self.key}.{self.me}", json.dumps(note).encode())
        notes: dict[int, Note] = {self.me: note}
        # Moment at which the grace began, and the time until the deadline then. Ranks that waited
        # patiently before have waited for nobody who hurries: such ranks may come just now.
        hurried_at, time_limit = math.inf, 0.0
        pause = _PAUSE_FIRST_S
        while True:
            lost = self.lost()
            awaited = self._awaited(notes, lost)
            # Look for the verdict after reading the notes, not before. A rank that has read the
            # verdict may have replaced its note by another text, and this rank must not draw a
            # conclusion from that text.
            if (verdict := self._verdict()) is not None:
                return verdict[0]
            now = time.monotonic()
            ahead = sum(rank < self.me and rank not in lost for rank in notes)
            patient = all(note.get("patient") for note in notes.values()) and not broken()
            if grace is not None and not patient and hurried_at == math.inf:
                hurried_at, time_limit = now, deadline.left()
            enough = now - hurried_at >= _patience(grace or 0.0, ahead, time_limit)
            if enough or not (awaited or ahead):
                self._conclude(conclude(notes, lost))
            elif deadline.expired:
                raise self._late(awaited, deadline, lost)
            else:
                time.sleep(deadline.at_most(pause))
                pause = min(1.3 * pause, _PAUSE_LAST_S)

    def _verdict(self) -> list[Any] | None:
        """Return a list with the verdict; None as long as there is no verdict."""
        text = self.store.try_get(self.key)
        return None if text is None else [_read(self.key, text)]

    def _conclude(self, verdict: Any) -> None:
        # Ignore the return value: the next look reads the same value, which may be the verdict of
        # another leader.
        self.store.put_if_absent(self.key, json.dumps(verdict).encode())

    def _awaited(self, notes: dict[int, Note], lost: Set[int]) -> list[int]:
        """Read the new notes into ``notes``; return the ranks that may still publish theirs."""
        awaited = []
        for rank in self.ranks:
            if rank in notes or rank in lost:
                continue
            text = self.store.try_get(f"{self.key}.{rank}")
            if text is None:
                awaited.append(rank)
            else:
                notes[rank] = _read(f"{self.key}.{rank}", text)
        excluded = {rank for note in notes.values() for rank in note.get("exclude", ())}
        return [rank for rank in awaited if rank not in excluded]

    def _late(
        self, awaited: Sequence[int], deadline: Deadline, lost: Set[int]
    ) -> CollectiveTimeoutError:
        # If no rank is awaited, the leader is at fault: it has not written a verdict.
        leader = min((rank for rank in self.ranks if rank not in lost), default=self.me)
        ranks = tuple(map(self.shown, awaited or (leader,)))
        return CollectiveTimeoutError(
            f"{self.what}: timed out: waited {deadline.seconds:g} s for rank "
            f"{', '.join(map(str, ranks))}, which did not call it, or has been stopped "
            f"[rank {self.shown(self.me)}]",
            ranks,
        )


def _patience(grace: float, ahead: int, time_limit: float) -> float:
    """Return for how many seconds a rank waits for silent ranks.

    ``ahead`` is the number of present ranks that would lead before this one. A leader may be
    stopped and not count as lost; then the next rank must take over. With one leader ahead,
    this rank waits three times ``grace``. The leader may come when this rank has waited one grace
    already. Then the leader waits one grace for silent ranks itself, and has a third one to
    conclude. ``time_limit`` is the time for the whole call.
    """
    alone = min(grace, _SILENT_SHARE * time_limit)
    return min(alone * (1 + 2 * ahead), _LEADERLESS_SHARE * time_limit)


def _read(key: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RendezvousError(
            f"rendezvous: the value of {key!r} in the store was not written by a rank of this job. "
            "Another program writes to the same store: give each launch a store of its own."
        ) from error
