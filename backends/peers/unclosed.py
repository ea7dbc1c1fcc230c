"""The communicators that a process has not closed, and what peers hear of those that it dropped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from collective.contract.recorder import Recorder

from .link import Link

__all__ = ["Unclosed", "tell_dropped"]

#: The communicators that a process has not closed, by name: their members, and their calls.
Unclosed = dict[str, tuple[Sequence[int], Sequence[Recorder]]]


def tell_dropped(link: Link | None, unclosed: Unclosed, names: Sequence[str], owner: int) -> None:
    """Tell the peers of communicators that were collected, and that their rank had not closed.

    Args:
        unclosed: those of this process.
        names: of the communicators.
        owner: the process; a forked child of it tells nothing.
    """
    if link is None or os.getpid() != owner:
        return
    for name in names:
        members, calls = unclosed.pop(name, ((), ()))
        if members:
            finished = calls[0].finished if calls else 0
            left = {"kind": "left", "finished": finished, "dropped": True}
            # Called by the garbage collector, maybe in a thread that is sending: send() would wait
            # for the lock that this very thread holds.
            with contextlib.suppress(OSError):
                link.send_when_free({**left, "channel": name, "members": members})
