"""All-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import pieces
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.memory.buffer import Buffer

__all__ = ["all_to_all"]


def all_to_all(
    backend: PointToPoint,
    src: Buffer,
    dst: Buffer,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    deadline: Deadline,
) -> None:
    """Send piece ``j`` of ``src`` to rank ``j``; concatenate the received pieces in ``dst``.

    The algorithm is pairwise exchange: in step d, each rank sends to the rank d after it and
    receives from the rank d before it. So no rank receives from two ranks at once. Thakur,
    Rabenseifner & Gropp, "Optimization of Collective Communication Operations in MPICH" (2005),
    section 4.3. A rank knows only its own counts, so the ranks cannot choose an algorithm by size.
    """
    messages = Messages(backend, deadline)
    rank, size = messages.rank, messages.size
    outs, intos = pieces.cut(src, send_counts), pieces.cut(dst, recv_counts)
    pieces.copy(outs[rank], intos[rank])
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        messages.exchange(outs[to], to, intos[source], source)
