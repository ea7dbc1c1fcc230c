"""Layout of the control segment: offsets of the ranks' lines, texts, slots, areas and rings."""

from __future__ import annotations

#: Words of a rank's line: 512 bytes, so that prefetches of the neighbours' lines do not reach it.
LINE = 64
#: Bytes of a slot. Arrays up to this length are copied through slots: two copies in cache cost less
#: than a second wait.
SLOT_BYTES = 256 << 10
#: Bytes that a rank writes for its peers in one round of :meth:`.control.Control.share`.
PAYLOAD_BYTES = 64 << 10
#: Bytes of the report in which a rank explains why it has broken the communicator.
FAILURE_BYTES = 32 << 10
#: Number of a rank's last calls that are described for its peers (CALLS_KEPT in C), and bytes of a
#: description.
CALLS, CALL_BYTES = 64, 256
#: Bytes of a rank's notice about the call in which it waits; see :mod:`.board`.
NOTICE_BYTES = 4 << 10
#: Bytes of the description of what a rank waits for: three calls of 2600 bytes each at most.
WAITS_BYTES = 8 << 10
# Areas and rings are several times as long as one core's own caches, if their sum is not too much.
# Then other writes have driven a cache line out of these caches before the line is written again.
# Only pages that have been written once take memory.
_AREA_BYTES, _LEAST_AREA_BYTES, _AREAS_BYTES = 1 << 20, 256 << 10, 32 << 20
_RING_BYTES, _RINGS_BYTES = 2 << 20, 32 << 20


class Layout:
    """Offsets in the control segment of ``size`` ranks, in bytes.

    Attributes:
        payloads, failures, calls, notices, waits: offset of each rank's part, by rank.
        slots: offsets of the ranks' slots for even steps, and for odd steps.
        areas, area_bytes: offset of the areas, which calls in C use, and length of one area. Each
            rank has two.
        rings, ring_bytes: offset of the rings, and the capacity of one ring. Each ordered pair of
            ranks has a ring, which begins with a page of counters.
        nbytes: length of the segment.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        ring_bytes = max(4096, min(_RING_BYTES, _RINGS_BYTES // max(1, size * (size - 1))))
        self.ring_bytes = ring_bytes - ring_bytes % 4096
        area_bytes = max(_LEAST_AREA_BYTES, min(_AREA_BYTES, _AREAS_BYTES // (2 * size)))
        self.area_bytes = area_bytes - area_bytes % 4096
        at = (1 + size) * LINE * 8
        at += -at % 4096
        self.payloads = [at + r * PAYLOAD_BYTES for r in range(size)]
        at += size * PAYLOAD_BYTES
        self.failures = [at + r * FAILURE_BYTES for r in range(size)]
        at += size * FAILURE_BYTES
        self.calls = [at + r * CALLS * CALL_BYTES for r in range(size)]
        at += size * CALLS * CALL_BYTES
        self.notices = [at + r * NOTICE_BYTES for r in range(size)]
        at += size * NOTICE_BYTES
        self.waits = [at + r * WAITS_BYTES for r in range(size)]
        at += size * WAITS_BYTES
        self.slots = [
            [at + (parity * size + r) * SLOT_BYTES for r in range(size)] for parity in (0, 1)
        ]
        at += 2 * size * SLOT_BYTES
        self.areas = at
        at += 2 * size * self.area_bytes
        self.rings = at
        self.nbytes = at + size * (size - 1) * (4096 + self.ring_bytes)

    def ring(self, src: int, dst: int) -> int:
        """Return the offset of the ring from ``src`` to ``dst``."""
        index = src * (self.size - 1) + dst - (dst > src)
        return self.rings + index * (4096 + self.ring_bytes)
