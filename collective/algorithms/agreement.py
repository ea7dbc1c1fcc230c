"""Agreement: did all ranks make the same call, and have all of them memory for it?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from collective.algorithms import all_gather, pieces
from collective.algorithms.messages import Messages
from collective.buffer import Buffer
from collective.call import Disagreement
from collective.dtypes import BY_NAME

if TYPE_CHECKING:
    from collective.backend import Backend
    from collective.call import Call

__all__ = ["agree", "lacking"]

_INT64, _UINT8 = BY_NAME["int64"], BY_NAME["uint8"]


def agree(backend: Backend, call: Call, timeout: float) -> None:
    """Compare ``call`` with the other ranks'.

    One all-gather of 8 bytes a rank. Only if they differ the descriptions travel; since
    every rank compares the same digests, all of them go on to that or none.

    Raises:
        Disagreement: on every rank, with all headers.
    """
    messages = Messages(backend, timeout)
    if bool((_collect(messages, call.digest) == call.digest).all()):
        return
    header = call.header()
    lengths = _collect(messages, len(header)).tolist()
    mine = Buffer(np.frombuffer(header, np.uint8), _UINT8)
    every = Buffer.empty(sum(lengths), _UINT8)
    all_gather.collect(messages, mine, every, lengths)
    limits = pieces.limits(lengths)
    raise Disagreement([every.array[start:stop].tobytes() for start, stop in pairwise(limits)])


def lacking(backend: Backend, lacks: bool, call: Call, timeout: float) -> list[int]:
    """Tell all ranks whether this one lacks memory; return those that do, the same on every rank.

    Args:
        backend: of the ranks; its ``all_gather`` carries it, and compares ``call`` where it does.
        lacks: whether this rank does.
        call: what the memory is for.
        timeout: seconds.
    """
    mine = Buffer(np.array([lacks], np.uint8), _UINT8)
    every = Buffer.empty(backend.size, _UINT8)
    work = backend.all_gather(mine, every, [1] * backend.size, call, timeout)
    if work is not None:
        work.wait()
    return [rank for rank, lacks in enumerate(every.array) if lacks]


def _collect(messages: Messages, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the ranks' numbers, in rank order."""
    every = Buffer.empty(messages.size, _INT64)
    mine = Buffer(np.array([number], np.int64), _INT64)
    all_gather.collect(messages, mine, every, [1] * messages.size)
    return every.array
