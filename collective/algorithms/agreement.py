"""Check that all ranks have made the same call."""

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
    """Check that all ranks make the same ``request``.

    One all-gather collects a digest of 8 bytes from each rank. Only if the digests differ, the
    ranks also exchange their descriptions. Every rank compares the same digests, so either all
    ranks exchange descriptions or none does.

    Raises:
        Disagreement: the digests differ; raised on every rank, with all headers.
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
    """Return the ``number`` of each rank, in rank order."""
    every = Buffer.empty(messages.size, _INT64)
    mine = Buffer(np.array([number], np.int64), _INT64)
    all_gather.collect(messages, mine, every, [1] * messages.size)
    return every.array
