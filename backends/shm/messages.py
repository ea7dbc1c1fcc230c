"""Messages over the rings in Python, for ranks of which not all have the native core."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from collective.contract.backend import ANY_SOURCE
from collective.memory.buffer import Buffer

from .control import Control, fence
from .memory import Heap, PeerMemory
from .ring import MessageRing, Receiving, Sending

__all__ = ["RingMessages"]


class RingMessages:
    """The messages of one rank.

    The arguments of its methods are as those of :class:`collective.contract.backend.Backend`.

    Args:
        control, heap, peers: of the rank.
        single_copy: whether all ranks can have the kernel read each other's memory.
    """

    def __init__(self, control: Control, heap: Heap, peers: PeerMemory, single_copy: bool) -> None:
        self._control = control
        self._heap = heap
        self._single_copy = single_copy
        rank = control.rank
        self._rings = {
            (src, dst): MessageRing(control, src, dst, peers.fetch_from)
            for peer in range(control.size)
            for src, dst in ((rank, peer), (peer, rank))
            if peer != rank
        }

    def send(self, src: Buffer, dst: int, tag: int, timeout: float) -> None:
        """Send to a rank."""
        sending = self._sending(src, dst, tag)
        if not self._spin(sending.advance):
            self._control.wait(sending.advance, lambda: (dst,), f"send(tag={tag})", timeout)

    def recv(self, dst: Buffer, src: int, tag: int, timeout: float) -> int:
        """Receive from a rank, or from any; return whose message it was."""
        control, what = self._control, f"recv(tag={tag})"
        receiving = self._receiving(dst, src, tag)
        if not self._spin(receiving.advance):
            sources = [
                r for r in range(control.size) if r != control.rank and src in (ANY_SOURCE, r)
            ]
            control.wait(receiving.advance, lambda: sources, what, timeout, all_needed=False)
        if receiving.fetched:
            self._refuse_stale(what)
        return receiving.source

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, timeout: float
    ) -> None:
        """Send and receive, neither waiting for the other; not of the rank itself."""
        sending, receiving = self._sending(src, to, tag), self._receiving(dst, source, tag)

        def advance() -> bool:
            sent = sending.advance()
            return receiving.advance() and sent

        def awaited() -> list[int]:
            # A peer that has done its part may have left.
            return [to] * (not sending.over) + [source] * (not receiving.over)

        if not self._spin(advance):
            self._control.wait(advance, awaited, f"sendrecv(tag={tag})", timeout)
        if receiving.fetched:
            self._refuse_stale(f"sendrecv(tag={tag})")

    def _refuse_stale(self, what: str) -> None:
        """Raise if what was fetched from the sender's memory may not be what it sent.

        The sender waits for the receiver until it gives up, which is known here before it goes on.
        """
        fence()
        self._control.refuse_broken(what)

    def _spin(self, advance: Callable[[], bool]) -> bool:
        return any(advance() for _ in range(self._control.polls))

    def _sending(self, src: Buffer, dst: int, tag: int) -> Sending:
        ring = self._rings[self._control.rank, dst]
        raw = src.array.view(np.uint8)
        location = None
        if raw.size > ring.capacity // 2:
            segment, offset, address = self._heap.locate(raw)
            # A peer that has dropped its part of the segment needs the address.
            if self._single_copy:
                location = (address, segment, offset)
        return Sending(ring, raw, tag, location)

    def _receiving(self, dst: Buffer, src: int, tag: int) -> Receiving:
        control = self._control
        sources = range(control.size) if src == ANY_SOURCE else (src,)
        rings = [self._rings[r, control.rank] for r in sources if r != control.rank]
        return Receiving(rings, dst.array.view(np.uint8), tag)
