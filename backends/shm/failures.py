"""Reports of failures in the control segment: each rank may write one, and all ranks read them."""

from __future__ import annotations

import json
import threading
import time

from collective.contract.failure import Failure

from .fence import fence
from .layout import FAILURE_BYTES, LINE
from .segment import Segment

__all__ = ["Reports"]


class Reports:
    """Reports of the failures by which the ranks have broken the communicator.

    Args:
        segment: the control segment.
        rank: this rank.
        places: offset of each rank's report in the segment.
        failed_at, length: words of a rank's line with the time and the length of its report.
    """

    def __init__(
        self, segment: Segment, rank: int, places: list[int], failed_at: int, length: int
    ) -> None:
        self.words = memoryview(segment.map).cast("q")
        self._segment = segment
        self._rank = rank
        self._places = places
        self._failed_at = failed_at
        self._length = length
        # A signal handler may abort the communicator while its thread holds this lock.
        self._writing = threading.RLock()

    def write(self, failure: Failure) -> None:
        """Write this rank's failure where the peers look for causes, unless it has written one."""
        # Several threads of this rank may fail at once, in calls of the foreground and background.
        with self._writing:
            if not self.words[(1 + self._rank) * LINE + self._failed_at]:
                self._write(failure)

    def _write(self, failure: Failure) -> None:
        words, line = self.words, (1 + self._rank) * LINE
        head = json.dumps([failure.kind, failure.rank, failure.ranks]).encode() + b"\n"
        text = failure.text.encode(errors="backslashreplace")
        room = FAILURE_BYTES - len(head)
        if len(text) > room:  # keep the end of a traceback, which says most
            text = b"..." + text[3 - room :]
        raw = head + text
        at = self._places[self._rank]
        self._segment.map[at : at + len(raw)] = raw
        words[line + self._length] = len(raw)
        fence()
        # Write the time after the text and its length, which cause() reads as soon as the time is
        # not 0. All processes of the host share this clock, so cause() finds the earliest report.
        words[line + self._failed_at] = time.monotonic_ns()

    def cause(self) -> Failure:
        """Return the earliest failure; the caller has seen that the communicator is broken.

        The failure of a rank whose own code raised comes before all others.
        """
        words = self.words
        causes: list[tuple[bool, int, Failure]] = []
        for rank in range(len(self._places)):
            if at := words[(1 + rank) * LINE + self._failed_at]:
                fence()
                failure = self._read(rank)
                # If the code of a rank itself raised, that is a cause. The failures of other kinds
                # may be consequences of it.
                causes.append((failure.kind != "failed", at, failure))
        if not causes:
            text = "shared memory is damaged: its flag shows a failure, but no rank reported one"
            causes.append((True, 0, Failure("aborted", self._rank, text)))
        return min(causes, key=lambda cause: cause[:2])[2]

    def _read(self, rank: int) -> Failure:
        """Return the failure by which ``rank`` has broken the communicator."""
        where, length = self._places[rank], self.words[(1 + rank) * LINE + self._length]
        raw = self._segment.map[where : where + min(max(length, 0), FAILURE_BYTES)]
        head, _, text = raw.partition(b"\n")
        try:
            kind, reporter, ranks = json.loads(head)
            fields = str(kind), int(reporter), text.decode(errors="ignore"), tuple(map(int, ranks))
            return Failure(*fields)
        except (TypeError, ValueError):
            return Failure("aborted", rank, f"rank {rank} has failed, and its report is damaged")
