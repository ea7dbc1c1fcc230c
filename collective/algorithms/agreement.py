"""Calls without data: barrier, and the check that all ranks have made the same call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Disagreement

from . import moves, pieces

if TYPE_CHECKING:
    from collective.request import Request

    from .messages import Messages

__all__ = ["agree", "barrier", "compare_headers"]

_INT64, _UINT8 = BY_NAME["int64"], BY_NAME["uint8"]


def agree(messages: Messages, request: Request) -> None:
    """Check that all ranks make the same ``request``.

    One all-gather collects a digest of 8 bytes from each rank. Only if the digests differ, the
    ranks also exchange their descriptions. Every rank compares the same digests, so either all
    ranks exchange descriptions or none does.

    Raises:
        Disagreement: the digests differ; raised on every rank, with all headers.
    """
    if not bool((_collect(messages, request.digest) == request.digest).all()):
        compare_headers(messages, request)


def compare_headers(messages: Messages, request: Request) -> NoReturn:
    """Exchange the headers of the ranks' requests, which differ.

    Raises:
        Disagreement: always, on every rank, with all headers.
    """
    header = request.header()
    lengths = _collect(messages, len(header)).tolist()
    mine = Buffer(np.frombuffer(header, np.uint8), _UINT8)
    every = messages.room(sum(lengths), _UINT8)
    moves.all_gather(messages, mine, every, lengths)
    raise Disagreement([header.array.tobytes() for header in pieces.cut(every, lengths)])


def _collect(messages: Messages, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the ``number`` of each rank, in rank order."""
    every = messages.room(messages.size, _INT64)
    mine = Buffer(np.array([number], np.int64), _INT64)
    moves.all_gather(messages, mine, every, [1] * messages.size)
    return every.array


def barrier(messages: Messages) -> None:
    """Wait until every rank has called this function.

    This is the dissemination barrier: in round k, each rank sends a message to the rank 2**k ahead.
    After ceil(log2(size)) rounds each rank has got word, directly or through others, of all ranks.
    Hensgen, Finkel & Manber, "Two Algorithms for Barrier Synchronization" (1988).
    """
    # Send one byte, since not every transport carries empty messages.
    token = Buffer.empty(2, _UINT8)
    token.array[:] = 0
    out, into = token.part(0, 1), token.part(1, 2)
    distance = 1
    while distance < messages.size:
        to = (messages.rank + distance) % messages.size
        source = (messages.rank - distance) % messages.size
        messages.exchange(out, to, into, source)
        distance *= 2
