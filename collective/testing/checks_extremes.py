"""Checks of the minimum and maximum of floats, bit by bit: signed zeros and NaN."""

from __future__ import annotations

import numpy as np

from collective import Communicator
from collective.inner import Capabilities, Op

from .checks import Case, on_each_rank
from .checks_reduce import hold_fold
from .samples import LARGE, Array, dtypes_of, extreme, of_bits, special_bits

_BY_OP: list[Case] = [{"op": "min"}, {"op": "max"}]
# A prime, so that it is not a multiple of any piece that a transport cuts.
_DRAWN = 2003


def _on_the_host(capabilities: Capabilities) -> str | None:
    if "cuda" in capabilities.devices:
        return "folds floats in the memory of GPUs, where zeros and NaN are the library's affair"
    return None


@on_each_rank(_BY_OP, needs=_on_the_host)
def check_extremes(comm: Communicator, op: Op) -> None:
    """Check that -0 is less than +0, and that any NaN gives the same NaN, bit by bit."""
    if op not in comm.capabilities.ops:
        return
    for dtype in dtypes_of(comm.capabilities.dtypes, "f"):
        generators = map(np.random.default_rng, range(comm.size))
        every = np.stack([special_bits(random, dtype, _DRAWN) for random in generators])
        for count in (1, _DRAWN, LARGE) if dtype == "float32" else (1, _DRAWN):
            _fold_all(comm, op, dtype, every, count)


def _fold_all(comm: Communicator, op: Op, dtype: str, every: Array, count: int) -> None:
    """Fold the rows of ``every``, which are the ranks' bits, with every call that folds.

    Args:
        count: number of elements; a longer array than a row repeats the row.
    """
    mine = of_bits(dtype, np.resize(every[comm.rank], count))
    total = np.resize(extreme(op, dtype, every), count)
    first = np.resize(extreme(op, dtype, every[: comm.rank + 1]), count)
    hold_fold(comm, op, mine, total, first, f"({op}) of {dtype}[{count}]")
