"""The control segment's layout: where the ranks' lines, notes, slots, areas and rings are in it."""

from __future__ import annotations

__all__ = [
    "CALLS", "CALL_BYTES", "FAILURE_BYTES", "LINE", "NOTE_BYTES", "NOTICE_BYTES", "SLOT_BYTES",
    "Layout",
]  # fmt: skip

#: A rank's line of words: 512 bytes, to stay out of its neighbours' prefetches.
LINE = 64
#: Bytes of a slot. Arrays up to here are copied through slots: two copies in cache cost less than a
#: second wait.
SLOT_BYTES = 256 << 10
#: Bytes that a rank writes for the others in a step of an exchange.
NOTE_BYTES = 64 << 10
#: Bytes of the report in which a rank says why it has broken the communicator.
FAILURE_BYTES = 32 << 10
#: Number of a rank's calls that are described for the others (NOTES_KEPT in C), and bytes of a
#: description.
CALLS, CALL_BYTES = 64, 256
#: Bytes of a rank's notice about the call in which it waits; see :mod:`.board`.
NOTICE_BYTES = 4 << 10
# Areas and rings are several times as long as one core's own caches, where that is not too much in
# all. Other writes have then driven a line out of these caches before it is written again. Only
# pages that have been written once take memory.
_AREA_BYTES, _LEAST_AREA_BYTES, _AREAS_BYTES = 1 << 20, 256 << 10, 32 << 20
_RING_BYTES, _RINGS_BYTES = 2 << 20, 32 << 20


class Layout:
    """Where things are in the control segment of ``size`` ranks, in bytes.

    Attributes:
        notes, failures, calls, notices: where each rank's are.
        slots: where each rank's are for even steps, and for odd ones.
        areas, area_bytes: where the areas are, for what is done in C, and how long each of them:
            two of each rank.
        rings, ring_bytes: where the rings are, of each ordered pair one, and how much each holds,
            behind a page of counters.
        nbytes: the length of all.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        ring_bytes = max(4096, min(_RING_BYTES, _RINGS_BYTES // max(1, size * (size - 1))))
        self.ring_bytes = ring_bytes - ring_bytes % 4096
        area_bytes = max(_LEAST_AREA_BYTES, min(_AREA_BYTES, _AREAS_BYTES // (2 * size)))
        self.area_bytes = area_bytes - area_bytes % 4096
        at = (1 + size) * LINE * 8
        at += -at % 4096
        self.notes = [at + r * NOTE_BYTES for r in range(size)]
        at += size * NOTE_BYTES
        self.failures = [at + r * FAILURE_BYTES for r in range(size)]
        at += size * FAILURE_BYTES
        self.calls = [at + r * CALLS * CALL_BYTES for r in range(size)]
        at += size * CALLS * CALL_BYTES
        self.notices = [at + r * NOTICE_BYTES for r in range(size)]
        at += size * NOTICE_BYTES
        self.slots = [
            [at + (parity * size + r) * SLOT_BYTES for r in range(size)] for parity in (0, 1)
        ]
        at += 2 * size * SLOT_BYTES
        self.areas = at
        at += 2 * size * self.area_bytes
        self.rings = at
        self.nbytes = at + size * (size - 1) * (4096 + self.ring_bytes)

    def ring(self, src: int, dst: int) -> int:
        """Return where the ring from ``src`` to ``dst`` begins."""
        index = src * (self.size - 1) + dst - (dst > src)
        return self.rings + index * (4096 + self.ring_bytes)
