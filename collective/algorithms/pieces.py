"""Arithmetic on the pieces of a buffer, or of anything else that the ranks share out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer

__all__ = ["CHUNK_BYTES", "chunk", "copy", "cut", "even", "limits"]

#: Length of the pieces in which long messages are folded, and so of scratch memory. Two
#: pieces fill a second-level cache of 1 MiB. One piece is four times the bytes that could be
#: carried while a message starts (``costs.START_BYTES``). With pieces of 128 KiB, a long all-reduce
#: took about twice as long.
CHUNK_BYTES = 512 << 10


def chunk(itemsize: int) -> int:
    """Return the number of elements in a chunk."""
    return max(1, CHUNK_BYTES // itemsize)


def even(count: int, size: int) -> list[int]:
    """Return the lengths of ``size`` pieces as even as possible, longer ones first.

    The lengths are those of ``numpy.array_split``. If there are fewer elements than pieces, the
    last pieces are empty.
    """
    least, longer = divmod(count, size)
    return [least + (rank < longer) for rank in range(size)]


def limits(counts: Sequence[int]) -> list[int]:
    """Return the start of each piece, followed by the end of the last one."""
    return [0, *accumulate(counts)]


def cut(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return the pieces of ``buffer``, with ``counts`` elements each, as views."""
    return [buffer.part(start, stop) for start, stop in pairwise(limits(counts))]


def copy(src: Buffer, dst: Buffer) -> None:
    """Copy ``src`` to ``dst``; if they are the same memory, NumPy does nothing."""
    np.copyto(dst.array, src.array)
