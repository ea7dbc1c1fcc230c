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

_INT64, _UINT8 = BY_NAME["int64"], BY_NAME["uint8"]


def agree(messages: Messages, request: Request) -> None:
    """Check that all ranks make the same ``request``.

    Only if the ranks' digests differ, they also exchange their descriptions.

    Raises:
        Disagreement: the digests differ; raised on every rank, with all headers.
    """
    if not _all_have(messages, request.digest or 1):
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
    """Wait until every rank has called this function."""
    _all_have(messages, 1)


def _all_have(messages: Messages, number: int) -> bool:
    """Return, once every rank has called this function, whether all have passed the same number.

    The messages are those of the dissemination barrier: in round k, each rank sends one to the rank
    2**k ahead. After ceil(log2(size)) rounds each rank has got word, directly or through others, of
    all ranks. Hensgen, Finkel & Manber, "Two Algorithms for Barrier Synchronization" (1988). A rank
    that has got word of another number sends 0 from then on. So all ranks return the same.

    Args:
        number: a number other than 0, of at most 63 bits.
    """
    out = Buffer(np.array([number], np.int64), _INT64)
    into = Buffer(np.array([number], np.int64), _INT64)
    distance = 1
    while distance < messages.size:
        to = (messages.rank + distance) % messages.size
        source = (messages.rank - distance) % messages.size
        messages.exchange(out, to, into, source)
        if into.array[0] != number:
            out.array[0] = 0
        distance *= 2
    return bool(out.array[0])
