"""All-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import pieces
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer

__all__ = ["all_to_all"]


def all_to_all(
    backend: PointToPoint,
    src: Buffer,
    dst: Buffer,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    timeout: float,
) -> None:
    """Send piece ``j`` of ``src`` to rank ``j``; concatenate what arrives in ``dst``.

    Pairwise exchange: in step d with the ranks d after and d before this one, so that
    nobody is sent to by two at once. Thakur, Rabenseifner & Gropp, "Optimization of
    Collective Communication Operations in MPICH" (2005), section 4.3. A rank knows only
    its own counts, so there is no choosing by size.
    """
    messages = Messages(backend, timeout)
    rank, size = messages.rank, messages.size
    outs, intos = pieces.limits(send_counts), pieces.limits(recv_counts)
    pieces.copy(src.part(outs[rank], outs[rank + 1]), dst.part(intos[rank], intos[rank + 1]))
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        messages.exchange(
            src.part(outs[to], outs[to + 1]),
            to,
            dst.part(intos[source], intos[source + 1]),
            source,
        )
