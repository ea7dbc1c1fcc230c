"""Checksums of results, with the same value in C and in NumPy."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np

from collective import native

__all__ = ["Sums", "checksum", "joined", "on_host", "sums"]

# The same numbers as in collective/native/sums.c.
_BLOCK_WORDS = 1 << 13
_BLOCK_WEIGHT = 0x9E3779B97F4A7C15
# NumPy adds the words of a block by rows and by columns. The index of a word is the sum of its
# column and of the index at which its row begins.
_COLUMNS = 128
_SHAPE = _BLOCK_WORDS // _COLUMNS, _COLUMNS
# Number of blocks that NumPy adds at a time, so that intermediate arrays stay in the caches.
_AT_ONCE = 4

Array = np.ndarray[Any, Any]
#: The sum of the words, and the sum of the words times their weights, both modulo 2**64.
Sums = tuple[int, int]


def checksum(*arrays: Any) -> int:
    """Return a checksum of 64 bits of the bytes of contiguous arrays.

    Any single flipped bit changes the checksum, and so does any exchange of bytes, unless sums of
    64 bits happen to be equal.
    """
    views = [on_host(array) for array in arrays]
    return joined([(*sums(view), view.nbytes) for view in views])


def on_host(array: Any) -> Array:
    """Return the array of a buffer as a NumPy array; a copy if it is on a GPU."""
    return array if isinstance(array, np.ndarray) else np.asarray(array.to_host())


def joined(parts: list[tuple[int, int, int]]) -> int:
    """Return the checksum of arrays from the sums and the number of bytes of each."""
    words = [word for part in parts for word in part]
    packed = struct.pack(f"<{len(words)}Q", *words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def sums(array: Array) -> Sums:
    """Return the two sums of an array's bytes; ``collective/native/sums.h`` says what they are."""
    data = array.reshape(-1).view(np.uint8)
    in_c = native.sums()
    return _sums_by_numpy(data) if in_c is None else in_c(data)


def _sums_by_numpy(data: Array) -> Sums:
    whole = data.size // 8 * 8
    words = data[:whole].view(np.uint64)
    if whole < data.size:
        rest = np.zeros(8, np.uint8)
        rest[: data.size - whole] = data[whole:]
        words = np.concatenate([words, rest.view(np.uint64)])
    full = words.size // _BLOCK_WORDS
    blocks = words[: full * _BLOCK_WORDS].reshape(full, *_SHAPE)
    parts = [blocks[start : start + _AT_ONCE] for start in range(0, full, _AT_ONCE)]
    if words.size % _BLOCK_WORDS:
        last = np.zeros(_BLOCK_WORDS, np.uint64)
        last[: words.size % _BLOCK_WORDS] = words[full * _BLOCK_WORDS :]
        parts.append(last.reshape(1, *_SHAPE))
    total = placed = 0
    rows = np.arange(0, _BLOCK_WORDS, _COLUMNS, dtype=np.uint64)
    columns = np.arange(_COLUMNS, dtype=np.uint64)
    first = 1
    for part in parts:  # NumPy's arithmetic on arrays wraps silently
        counted = part + (part >> np.uint64(32))
        of_rows, of_columns = counted.sum(axis=2), counted.sum(axis=1)
        of_blocks = of_rows.sum(axis=1)
        weights = np.arange(first, first + len(part), dtype=np.uint64) * np.uint64(_BLOCK_WEIGHT)
        total += int(of_blocks.sum())
        for weighted in (of_blocks * weights, of_rows * rows, of_columns * columns):
            placed += int(weighted.sum())
        first += len(part)
    return total % 2**64, placed % 2**64
