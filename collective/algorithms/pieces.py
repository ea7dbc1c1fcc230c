"""Arithmetic on the pieces of a buffer, or of anything else that the ranks share out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from collective.errors import ShapeError

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer

#: Length of the pieces in which long messages are folded, and so of scratch memory. Two
#: pieces fill a second-level cache of 1 MiB. One piece is four times the bytes that could be
#: carried while a message starts (``costs.START_BYTES``). With pieces of 128 KiB, a long all-reduce
#: took about twice as long.
CHUNK_BYTES = 512 << 10


def chunk(itemsize: int) -> int:
    """Return the number of elements in a chunk."""
    return max(1, CHUNK_BYTES // itemsize)


def chunks(buffer: Buffer) -> list[Buffer]:
    """Return the chunks of ``buffer``, as views; only the last one may be shorter."""
    step = chunk(buffer.dtype.itemsize)
    if buffer.count <= step:
        return [buffer]
    return [buffer.part(low, low + step) for low in range(0, buffer.count, step)]


def even(count: int, size: int) -> list[int]:
    """Return the lengths of ``size`` pieces as even as possible, longer ones first.

    The lengths are those of ``numpy.array_split``. If there are fewer elements than pieces, the
    last pieces are empty.
    """
    least, longer = divmod(count, size)
    return [least + (rank < longer) for rank in range(size)]


def split_sizes(what: str, length: int, size: int, counts: Sequence[int] | None) -> list[int]:
    """Return the lengths of the ranks' pieces: ``counts``, or as ``numpy.array_split`` cuts.

    Raises:
        ShapeError: the counts are not ``size`` non-negative integers whose sum is ``length``.
    """
    if counts is None:
        return even(length, size)
    sizes = check_counts(what, counts, size)
    if sum(sizes) != length:
        raise ShapeError(f"{what}: counts {sizes} add up to {sum(sizes)}; the axis has {length}.")
    return sizes


def check_counts(what: str, counts: Sequence[int], size: int) -> list[int]:
    """Return ``counts`` as a list of ``size`` non-negative integers.

    Raises:
        ShapeError: ``counts`` is not a sequence of ``size`` non-negative integers.
    """
    try:
        sizes = list(map(int, counts))
    except (TypeError, ValueError):
        sizes = [-1]
    if len(sizes) != size or min(sizes) < 0 or sizes != list(counts):
        raise ShapeError(
            f"{what}: counts {counts!r}; expected one non-negative integer for each of {size} "
            "ranks."
        )
    return sizes


def limits(counts: Sequence[int]) -> list[int]:
    """Return the start of each piece, followed by the end of the last one."""
    return [0, *accumulate(counts)]


def cut(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Return the pieces of ``buffer``, with ``counts`` elements each, as views."""
    return [buffer.part(start, stop) for start, stop in pairwise(limits(counts))]


def copy(src: Buffer, dst: Buffer) -> None:
    """Copy ``src`` to ``dst``; if they are the same memory, NumPy does nothing."""
    np.copyto(dst.array, src.array)
