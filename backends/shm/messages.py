"""Messages by the native core, where all ranks have it: what of them is Python's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from collective import native
from collective.contract.backend import ANY_SOURCE
from collective.memory.buffer import Buffer
from collective.native import NOBODY

from .control import Control
from .layout import LINE
from .peer_memory import PeerMemory
from .ring import refuse

__all__ = ["exchange_bytes", "make_exchange"]


# How often C looks at a ring before it yields the processor: a microsecond or two, which a message
# takes to a peer that runs. Where both share a core each message costs as much, and that can be
# where there are others, too. 4 B, both on one core: 15 µs with 1000 looks, 3 with 100.
_LOOKS = 100


def make_exchange(
    control: Control, peers: PeerMemory, crowded: bool, single_copy: bool
) -> native.Exchange:
    """Return what sends and receives over the rings of ``control``'s segment.

    A message goes through a ring, whose two copies run at the same time where both ends have a
    core: 4 MiB take 0.16 ms and not 0.26. Where ranks are more than cores, what a ring does not
    hold is fetched: 4 MiB take 0.8 ms and not 1.4.
    """
    layout = control.layout
    streamed = layout.ring_bytes if crowded else sys.maxsize
    made = native.messages(
        control.segment.map, control.rank, control.size, layout.rings, layout.ring_bytes, streamed,
        _LOOKS, single_copy, _Waiting(control, peers), 8 * LINE,
    )  # fmt: skip
    assert made is not None  # or nobody would make this
    return made


def exchange_bytes(
    exchange: native.Exchange, control: Control, src: Buffer | None, to: int, dst: Buffer | None,
    source: int, tag: int, timeout: float,
) -> int:  # fmt: skip
    """Send, receive, or both, of lengths that the receivers know; return who sent.

    Raises:
        CollectiveError: some rank has failed.
    """
    x, out = (None if each is None else each.array for each in (src, dst))
    done = exchange(x, to, out, source, tag, timeout, False)
    if done is NotImplemented:
        control.refuse_broken(_name(to, source, tag))
        # Of a class that C does not know, such as np.memmap.
        x, out = (None if each is None else each.view(np.uint8, np.ndarray) for each in (x, out))
        done = exchange(x, to, out, source, tag, timeout, False)
        if done is NotImplemented:
            control.refuse_broken(_name(to, source, tag))
            raise TypeError(f"{type(src)}, {type(dst)}: not in memory that C can see")
    return int(done)


def _name(to: int, source: int, tag: int) -> str:
    return f"{'send' * (to != NOBODY)}{'recv' * (source != NOBODY)}(tag={tag})"


class _Waiting:
    """What a message in C asks for when it does not go on by itself."""

    def __init__(self, control: Control, peers: PeerMemory) -> None:
        self._control = control
        self._peers = peers

    def wait(
        self, advance: Callable[[], int], to: int, source: int, tag: int, timeout: float
    ) -> None:
        """Wait for the rest of a message, as the rings in Python do."""
        control, pending = self._control, 3
        sources = [
            rank
            for rank in range(control.size)
            if rank != control.rank and source in (ANY_SOURCE, rank)
        ]

        def ready() -> bool:
            nonlocal pending
            pending = advance()
            return not pending

        def awaited() -> list[int]:
            # A peer that has done its part may have left.
            return sorted({*[to] * (pending & 1), *(sources if pending & 2 else [])})

        what = _name(to, source, tag)
        control.wait(ready, awaited, what, timeout, all_needed=source != ANY_SOURCE)

    def fetch(self, rank: int, address: int, out: Any, tag: int) -> None:
        """Copy the rest of a message from the sender's memory."""
        self._peers.fetch(rank, address, np.frombuffer(out, np.uint8))
        # It waits until it gives up, which is known here before it goes on.
        self._control.refuse_broken(f"recv(tag={tag})")

    def refuse(self, rank: int, what: str) -> None:
        """Break the communicator."""
        refuse(self._control, rank, what)
