"""Notices of the ranks of one segment, about the call in which each rank waits."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from .control import Control, fence
from .layout import NOTICE_BYTES

__all__ = ["Board"]


class Board:
    """Notices in the segment of all ranks, one of each rank, which every rank may read at any time.

    A board keeps the memory of the control segment and nothing else. The owner of the segment may
    close or drop it while groups that were made of it go on.
    """

    def __init__(self, control: Control) -> None:
        self._rank = control.rank
        self._map = control.segment.map
        self._words = control.words
        self._notices = control.layout.notices
        self._versions = [control.version_of_notice(rank) for rank in range(control.size)]
        self._version = 0

    def post(self, notice: Any) -> None:
        """Replace this rank's notice; keep the last one if this one is too long."""
        raw = json.dumps(notice).encode()
        if len(raw) >= NOTICE_BYTES:
            return
        at = self._notices[self._rank]
        # The version is odd while the notice is written: a peer that reads meanwhile sees an odd
        # version, or another one after than before.
        self._words[self._versions[self._rank]] = self._version + 1
        fence()
        self._map[at : at + len(raw) + 1] = raw + b"\0"
        fence()
        self._version += 2
        self._words[self._versions[self._rank]] = self._version

    def read(self) -> dict[int, Any]:
        """Return the notices by rank, without damaged ones and those that are being written."""
        found = {}
        for rank, version in enumerate(self._versions):
            before = self._words[version]
            fence()
            raw = self._map[self._notices[rank] : self._notices[rank] + NOTICE_BYTES]
            fence()
            if before and before % 2 == 0 and self._words[version] == before:
                with contextlib.suppress(ValueError):
                    found[rank] = json.loads(raw.partition(b"\0")[0])
        return found
