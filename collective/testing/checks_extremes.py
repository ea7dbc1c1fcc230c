"""Checks of the minimum and maximum of floats, bit by bit: zeros with signs, and NaN."""

from __future__ import annotations

import numpy as np

from collective.communicator import Communicator
from collective.contract.capabilities import Capabilities
from collective.memory.dtypes import BY_NAME
from collective.ops import Op

from .checks import Case, on_each_rank
from .samples import LARGE, Array, assert_bits, dtypes_of, of_bits, regions

__all__ = ["INFINITY_AND_NAN", "check_extremes", "extreme"]

_BY_OP: list[Case] = [{"op": "min"}, {"op": "max"}]
#: dtype -> the bits of infinity, and of the NaN that results have.
INFINITY_AND_NAN = {
    "float16": (0x7C00, 0x7E00),
    "bfloat16": (0x7F80, 0x7FC0),
    "float32": (0x7F80_0000, 0x7FC0_0000),
    "float64": (0x7FF0_0000_0000_0000, 0x7FF8_0000_0000_0000),
}
# Columns of two zeros and of NaN are to be frequent, and of NaN alone seldom.
_WEIGHTS = (6, 2, 2, 2, 1, 1, 1)
# A prime: no piece that a transport cuts is a multiple of it.
_DRAWN = 2003


def _on_the_host(capabilities: Capabilities) -> str | None:
    if "cuda" in capabilities.devices:
        return "folds floats in the memory of GPUs, where zeros and NaN are the library's affair"
    return None


@on_each_rank(_BY_OP, needs=_on_the_host)
def check_extremes(comm: Communicator, op: Op) -> None:
    """Of two zeros -0 is the less, and of any NaN comes the same one, bit by bit."""
    if op not in comm.capabilities.ops:
        return
    for dtype in dtypes_of(comm.capabilities.dtypes, "f"):
        every = np.stack([_special(dtype, rank) for rank in range(comm.size)])
        for count in (1, _DRAWN, LARGE) if dtype == "float32" else (1, _DRAWN):
            _fold_all(comm, op, dtype, every, count)


def _fold_all(comm: Communicator, op: Op, dtype: str, every: Array, count: int) -> None:
    """Fold the rows of ``every``, a rank's bits each, by all calls that fold.

    Args:
        count: how many elements, beyond the length of the rows from their beginning again.
    """
    rank = comm.rank
    mine = of_bits(dtype, np.resize(every[rank], count))
    total = np.resize(extreme(op, dtype, every), count)
    what = f"({op}) of {dtype}[{count}]"
    assert_bits(comm.all_reduce(mine, op=op), total, f"all_reduce{what}")
    found = comm.all_reduce(mine, op=op, order="rank")
    assert_bits(found, total, f"all_reduce{what} in rank order")
    for root in {0, comm.size - 1}:
        found = comm.reduce(mine, op=op, root=root)
        if rank == root:
            assert_bits(found, total, f"reduce{what} to {root}")
    part = list(regions(count, comm.size))[rank]
    assert_bits(comm.reduce_scatter(mine, op=op), total[part], f"reduce_scatter{what}")
    first = np.resize(extreme(op, dtype, every[: rank + 1]), count)
    assert_bits(comm.scan(mine, op=op), first, f"scan{what}")
    comm.all_reduce(mine, op=op, out=mine)
    assert_bits(mine, total, f"all_reduce{what} in place")


def _special(dtype: str, rank: int) -> Array:
    """Return bits of numbers of which several ranks have the same size with other signs."""
    infinity, nan = INFINITY_AND_NAN[dtype]
    half_of_all = 8 * BY_NAME[dtype].itemsize - 1
    random = np.random.default_rng(rank)
    # Zero, the least number, a large one, infinity; NaN: quiet, with a payload, signalling.
    sizes = np.array([0, 1, infinity - 7, infinity, nan, nan + 5, infinity + 1], np.uint64)
    drawn = random.choice(sizes, _DRAWN, p=np.array(_WEIGHTS) / sum(_WEIGHTS))
    signs = random.integers(0, 2, _DRAWN).astype(np.uint64) << np.uint64(half_of_all)
    return np.asarray(drawn | signs).astype(f"u{BY_NAME[dtype].itemsize}")


def extreme(op: str, dtype: str, every: Array) -> Array:
    """Return the bits of the minimum or maximum of rows of bits (IEEE 754-2019, section 9.6)."""
    infinity, nan = INFINITY_AND_NAN[dtype]
    sign = every.dtype.type(1 << (8 * every.itemsize - 1))
    size = every & ~sign
    # Integers in the order of the numbers: -0 is -1, and +0 is 0.
    order = np.where(every & sign, -1 - size.astype(np.int64), size.astype(np.int64))
    least = order.min(axis=0) if op == "min" else order.max(axis=0)
    bits = np.where(least < 0, (-1 - least).astype(every.dtype) | sign, least.astype(every.dtype))
    return np.asarray(np.where((size > infinity).any(axis=0), nan, bits)).astype(every.dtype)
