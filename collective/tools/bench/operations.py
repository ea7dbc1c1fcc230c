"""The operations that are measured: their arrays, their bus factors, and their results.

With ``n`` ranks and an operation of ``nbytes``, the larger of a rank's two arrays is *whole*. A
whole array has as many elements as fit into ``nbytes``; if the operation cuts the array, their
number is rounded up to a multiple of ``n``. If the other array has another length, that array is a
*part*, of which ``n`` make a whole. Rank 0 is the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from collective.memory.dtypes import BY_NAME
from collective.testing.frameworks import encoded

__all__ = [
    "ALL", "DTYPES", "OPERATIONS", "Operation", "Sample", "count_wrong", "lengths",
    "value_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]
#: Function of a rank (or ranks) and an index (or indices) that returns elements of the input.
Sample = Callable[[Any, Array], Array]

#: The dtypes whose sums every transport on the CPU can compute.
DTYPES = tuple(name for name in BY_NAME if name != "bool" and not name.startswith("float8"))
# Integers up to these limits are exact, also as sums.
_EXACT = {
    "float16": 1 << 11, "bfloat16": 1 << 8, "int8": 127, "uint8": 255,
    "int16": (1 << 15) - 1, "uint16": (1 << 16) - 1,
}  # fmt: skip
_LARGEST = 1 << 14
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Operation:
    """Operation to measure.

    Attributes:
        x, y: length of a rank's input and output: ``"whole"``, ``"part"``, or None if there is
            none. Without an output, the operation works in place.
        x_at_root, y_at_root: if true, only the root passes this array.
        cut: whether a whole array consists of one part for each rank.
        busbw: factor for ``algbw``, for ``n`` ranks, so that the product can be compared with the
            speed of the hardware; from nccl-tests' PERFORMANCE.md, and 1 for operations that are
            not in it.
        expect: function of the sample, indices of the result, rank, number of ranks and length of
            a part that returns the result at these indices, or None if there is none to check.
        halves: whether the measured call is a round trip.
    """

    x: str | None
    y: str | None
    busbw: Callable[[int], float]
    expect: Callable[[Sample, Array, int, int, int], Array | None]
    x_at_root: bool = False
    y_at_root: bool = False
    cut: bool = False
    halves: bool = False

    @property
    def share(self) -> float:
        """The share of a call's time that counts: 1/2 for a round trip."""
        return 0.5 if self.halves else 1.0


def _one(n: int) -> float:
    return 1.0


def _others(n: int) -> float:
    return (n - 1) / n


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


def _sum(value: Sample, i: Array, ranks: int) -> Array:
    total = value(0, i)
    for rank in range(1, ranks):
        total = total + value(rank, i)
    return total


def _of_peer(value: Sample, i: Array, rank: int, n: int, part: int) -> Array | None:
    return value(rank ^ 1, i) if rank ^ 1 < n else None


ALL: dict[str, Operation] = {
    "all_reduce": Operation("whole", None, _twice, lambda v, i, r, n, p: _sum(v, i, n)),
    "broadcast": Operation("whole", None, _one, lambda v, i, r, n, p: v(0, i)),
    "reduce": Operation(
        "whole", "whole", _one, lambda v, i, r, n, p: _sum(v, i, n), y_at_root=True
    ),
    "scatter": Operation(
        "whole", "part", _others, lambda v, i, r, n, p: v(0, r * p + i), x_at_root=True, cut=True
    ),
    "gather": Operation(
        "part", "whole", _others, lambda v, i, r, n, p: v(i // p, i % p), y_at_root=True, cut=True
    ),
    "all_gather": Operation(
        "part", "whole", _others, lambda v, i, r, n, p: v(i // p, i % p), cut=True
    ),
    "reduce_scatter": Operation(
        "whole", "part", _others, lambda v, i, r, n, p: _sum(v, r * p + i, n), cut=True
    ),
    "all_to_all": Operation(
        "whole", "whole", _others, lambda v, i, r, n, p: v(i // p, r * p + i % p), cut=True
    ),
    "scan": Operation("whole", "whole", _one, lambda v, i, r, n, p: _sum(v, i, r + 1)),
    "send_recv": Operation("whole", "whole", _one, _of_peer, halves=True),
    "sendrecv": Operation("whole", "whole", _one, lambda v, i, r, n, p: v((r - 1) % n, i)),
    "barrier": Operation(None, None, _one, lambda v, i, r, n, p: None),
    # No communication: the speed of memory when all ranks use it at the same time.
    "copy": Operation("whole", "whole", _one, lambda v, i, r, n, p: v(r, i)),
}
OPERATIONS = tuple(name for name in ALL if name != "copy")


def lengths(name: str, nbytes: int, itemsize: int, size: int) -> tuple[Any, Any, int]:
    """Return the numbers of elements of input, output (None if there is none) and part."""
    operation = ALL[name]
    part = max(1, -(-nbytes // (itemsize * size)))
    whole = part * size if operation.cut else max(1, nbytes // itemsize)
    of = {"whole": whole, "part": part, None: None}
    return of[operation.x], of[operation.y], part


def value_of(dtype: str, size: int) -> Sample:
    """Return inputs whose sums over ``size`` ranks are exact in ``dtype``.

    Neighbouring elements differ, as do elements a power of two apart, and ranks.
    """
    period = max(2, (_EXACT.get(dtype, _LARGEST * size) // size - 1) | 1)
    return lambda rank, i: (i + i // period + 37 * rank) % period


def count_wrong(name: str, dtype: str, rank: int, size: int, part: int, result: Array) -> int:
    """Return the number of wrong elements in a rank's result.

    Args:
        result: array in the storage of ``dtype``.
    """
    value = value_of(dtype, size)
    wrong = 0
    for low in range(0, result.size, _BLOCK):
        i = np.arange(low, min(low + _BLOCK, result.size))
        expected = ALL[name].expect(value, i, rank, size, part)
        if expected is None:
            return 0
        wrong += int(np.count_nonzero(result[i[0] : i[-1] + 1] != encoded(expected, dtype)))
    return wrong
