"""Notices of the ranks of one segment: waits, descriptions of calls, and reports of failures."""

from __future__ import annotations

import contextlib
import json
import mmap
from typing import Any

from .fence import fence
from .layout import LINE


class Board:
    """Board with one notice from each rank, which every rank may read at any time.

    A board keeps only the memory of the control segment alive. The owner of the segment may close
    or drop it while groups of that communicator go on.

    Args:
        segment: memory of the control segment.
        rank: this rank.
        notices: offset of each rank's notice in the segment.
        nbytes: bytes of a notice.
        word: word of a rank's line with the version of its notice.
    """

    def __init__(
        self, segment: mmap.mmap, rank: int, notices: list[int], nbytes: int, word: int
    ) -> None:
        self._rank = rank
        self._map = segment
        self._words = memoryview(segment).cast("q")
        self._notices = notices
        self._nbytes = nbytes
        self._versions = [(1 + each) * LINE + word for each in range(len(notices))]
        self._version = 0

    def post(self, notice: Any) -> bool:
        """Replace this rank's notice; keep the old one, and return False, if this is too long."""
        raw = json.dumps(notice).encode()
        if len(raw) >= self._nbytes:
            return False
        at = self._notices[self._rank]
        # The version is odd while the notice is written. A peer that reads the notice meanwhile
        # sees an odd version, or different versions before and after its read.
        self._words[self._versions[self._rank]] = self._version + 1
        fence()
        self._map[at : at + len(raw) + 1] = raw + b"\0"
        fence()
        self._version += 2
        self._words[self._versions[self._rank]] = self._version
        return True

    def read(self) -> dict[int, Any]:
        """Return the notices by rank, except those that are damaged or being written."""
        notices = {}
        for rank, version in enumerate(self._versions):
            before = self._words[version]
            fence()
            raw = self._map[self._notices[rank] : self._notices[rank] + self._nbytes]
            fence()
            if before and before % 2 == 0 and self._words[version] == before:
                with contextlib.suppress(RecursionError, ValueError):
                    notices[rank] = json.loads(raw.partition(b"\0")[0])
        return notices
