"""Checks of the minimum and maximum of floats, bit by bit: zeros with signs, and NaN."""

from __future__ import annotations

import numpy as np

from collective.communicator import Communicator
from collective.contract.capabilities import Capabilities
from collective.ops import Op

from .checks import Case, on_each_rank
from .samples import (
    LARGE,
    Array,
    assert_bits,
    dtypes_of,
    extreme,
    of_bits,
    regions,
    special_bits,
)

_BY_OP: list[Case] = [{"op": "min"}, {"op": "max"}]
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
        generators = map(np.random.default_rng, range(comm.size))
        every = np.stack([special_bits(random, dtype, _DRAWN) for random in generators])
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
