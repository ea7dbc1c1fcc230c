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

from collective.inner import BY_NAME, encoded

from .libraries import BenchLibrary

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
class Workload:
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
        share: share of a call's time that counts: 1/2 for a round trip.
    """

    x: str | None
    y: str | None
    busbw: Callable[[int], float]
    expect: Callable[[Sample, Array, int, int, int], Array | None]
    x_at_root: bool = False
    y_at_root: bool = False
    cut: bool = False
    share: float = 1.0


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


ALL: dict[str, Workload] = {
    "all_reduce": Workload("whole", None, _twice, lambda v, i, r, n, p: _sum(v, i, n)),
    "broadcast": Workload("whole", None, _one, lambda v, i, r, n, p: v(0, i)),
    "reduce": Workload("whole", "whole", _one, lambda v, i, r, n, p: _sum(v, i, n), y_at_root=True),
    "scatter": Workload(
        "whole", "part", _others, lambda v, i, r, n, p: v(0, r * p + i), x_at_root=True, cut=True
    ),
    "gather": Workload(
        "part", "whole", _others, lambda v, i, r, n, p: v(i // p, i % p), y_at_root=True, cut=True
    ),
    "all_gather": Workload(
        "part", "whole", _others, lambda v, i, r, n, p: v(i // p, i % p), cut=True
    ),
    "reduce_scatter": Workload(
        "whole", "part", _others, lambda v, i, r, n, p: _sum(v, r * p + i, n), cut=True
    ),
    "all_to_all": Workload(
        "whole", "whole", _others, lambda v, i, r, n, p: v(i // p, r * p + i % p), cut=True
    ),
    "scan": Workload("whole", "whole", _one, lambda v, i, r, n, p: _sum(v, i, r + 1)),
    "send_recv": Workload("whole", "whole", _one, _of_peer, share=0.5),
    "sendrecv": Workload("whole", "whole", _one, lambda v, i, r, n, p: v((r - 1) % n, i)),
    "barrier": Workload(None, None, _one, lambda v, i, r, n, p: None),
    # No communication: the speed of memory when all ranks use it at the same time.
    "copy": Workload("whole", "whole", _one, lambda v, i, r, n, p: v(r, i)),
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


class Prepared:
    """Operation of a library, with its arrays.

    The arrays hold zeros, which stay zeros however often they are summed in place.

    Args:
        library: the library, connected.
        operation: one of :data:`~collective.tools.bench.operations.ALL`.
        nbytes: size of the larger array, before it is rounded up.
        memory: ``"ordinary"`` or ``"symmetric"``.
        dtype: dtype of the elements.

    Attributes:
        call: function that makes the call.
        x, y: input and output; None if there is none.
        nbytes: size of the larger array.
        what: names of the library and the operation.
    """

    def __init__(
        self,
        library: BenchLibrary,
        operation: str,
        nbytes: int,
        memory: str = "ordinary",
        dtype: str = "float32",
    ) -> None:
        about, itemsize = ALL[operation], BY_NAME[dtype].itemsize
        *counts, self._part = lengths(operation, nbytes, itemsize, library.size)
        self.x: Any
        self.y: Any
        self.x, self.y = (None if n is None else library.new(n, memory, dtype) for n in counts)
        self.call = library.call(
            operation,
            None if about.x_at_root and library.rank else self.x,
            None if about.y_at_root and library.rank else self.y,
        )
        self.nbytes = itemsize * max((n or 0 for n in counts), default=0)
        self.what = f"{library.version}: {operation}"
        self._library, self._operation, self._dtype = library, operation, dtype

    def count_wrong(self, together: Callable[[], object]) -> int:
        """Make the call on data for which every element of the result can be computed.

        Args:
            together: function that waits for all ranks.

        Returns:
            The number of wrong elements in this rank's result.
        """
        library, rank = self._library, self._library.rank
        self._fill()
        together()
        returned = self.call()
        in_place = self.y is None or returned is self.x
        result = self.x if in_place else self.y
        if library.framework.on_gpu:
            library.synchronize()
        together()
        if result is None or (rank and ALL[self._operation].y_at_root):
            return 0
        stored = library.framework.read(result)
        return count_wrong(self._operation, self._dtype, rank, library.size, self._part, stored)

    def _fill(self) -> None:
        library, x = self._library, self.x
        value, arrays = value_of(self._dtype, library.size), library.framework
        for low in range(0, x.shape[0], _BLOCK):
            block = x[low : low + _BLOCK]
            numbers = value(library.rank, np.arange(low, low + block.shape[0]))
            data = encoded(numbers, self._dtype)
            arrays.fill(block, arrays.make(data, self._dtype, (slice(None),)))
