"""The communicators that a process has not closed, and the message to peers when it drops them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from collective.contract.recorder import Recorder

from .link import Link
from .reports import last_call_of

__all__ = ["Unclosed", "tell_dropped"]

#: The communicators that a process has not closed, by name: their members, and their calls.
Unclosed = dict[str, tuple[Sequence[int], Sequence[Recorder]]]


def tell_dropped(link: Link | None, unclosed: Unclosed, names: Sequence[str], owner: int) -> None:
    """Tell the peers that this rank has dropped communicators without closing them.

    Args:
        link: link to the hub; if None, no message is sent.
        unclosed: communicators that this process has not closed.
        names: names of the dropped communicators.
        owner: id of the process that made the communicators. A forked child of that process sends
            no message.
    """
    if link is None or os.getpid() != owner:
        return
    for name in names:
        members, calls = unclosed.pop(name, ((), ()))
        if members:
            finished = calls[0].finished if calls else 0
            last = last_call_of(calls[0] if calls else None)
            left = {"kind": "left", "finished": finished, "dropped": True, "last": last}
            # The garbage collector may run this in a thread that is sending. There send() would
            # wait for a lock that the same thread holds.
            with contextlib.suppress(OSError):
                link.send_when_free({**left, "channel": name, "members": members})
