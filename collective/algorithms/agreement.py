"""Agreement: did all ranks make the same call?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Disagreement

from . import all_gather, pieces
from .messages import Messages, PointToPoint

if TYPE_CHECKING:
    from collective.deadline import Deadline
    from collective.request import Request

__all__ = ["agree"]

_INT64, _UINT8 = BY_NAME["int64"], BY_NAME["uint8"]


def agree(backend: PointToPoint, request: Request, deadline: Deadline) -> None:
    """Compare ``request`` with the other ranks'.

    One all-gather of 8 bytes a rank. Only if they differ the descriptions travel; since
    every rank compares the same digests, all of them go on to that or none.

    Raises:
        Disagreement: on every rank, with all headers.
    """
    messages = Messages(backend, deadline)
    if bool((_collect(messages, request.digest) == request.digest).all()):
        return
    header = request.header()
    lengths = _collect(messages, len(header)).tolist()
    mine = Buffer(np.frombuffer(header, np.uint8), _UINT8)
    every = Buffer.empty(sum(lengths), _UINT8)
    all_gather.collect(messages, mine, every, lengths)
    raise Disagreement([header.array.tobytes() for header in pieces.cut(every, lengths)])


def _collect(messages: Messages, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the ranks' numbers, in rank order."""
    every = Buffer.empty(messages.size, _INT64)
    mine = Buffer(np.array([number], np.int64), _INT64)
    all_gather.collect(messages, mine, every, [1] * messages.size)
    return every.array
