"""Checks of booleans with bytes other than 0 and 1, which views of other memory may hold."""

from __future__ import annotations

import numpy as np

from collective import Communicator, user_op
from collective.inner import Capabilities, as_op

from .checks import Case, on_each_rank
from .checks_reduce import hold_fold
from .samples import LARGE, OPS, Array, assert_bits, expected, laid_out, moved

_BY_OP: list[Case] = [{"op": op} for op in (*(op for op in OPS if "b" in OPS[op]), "user")]
# A bitwise fold of two true bytes may be 0 (1 and 2), and their maximum is not 1.
_BYTES = np.array([0, 0, 0, 0, 0, 1, 2, 3, 128, 254, 255], np.uint8)
# One element, a few, more than any vector, more than a mebibyte. The last two are not multiples
# of any piece that a transport cuts.
_COUNTS = (1, 13, 2003, 4 * LARGE + 1)


def _takes_bools(capabilities: Capabilities) -> str | None:
    return None if "bool" in capabilities.dtypes else "folds no booleans"


@on_each_rank(_BY_OP, needs=_takes_bools)
def check_bools_folded(comm: Communicator, op: str) -> None:
    """Check that a fold takes every non-zero byte for true, and gives bytes of 0 and 1."""
    if op not in comm.capabilities.ops:
        return
    for count in _COUNTS:
        _fold_all(comm, op, [_drawn(rank, count) for rank in range(comm.size)])


def _fold_all(comm: Communicator, op: str, inputs: list[Array]) -> None:
    """Fold the ranks' booleans with every call that folds."""
    rank, count = comm.rank, inputs[0].size
    mine, total = inputs[rank], _folded(op, inputs)
    # NumPy's functions return bytes of 0 and 1. This one returns an operand's byte, unchanged.
    reducer = user_op(_either) if op == "user" else as_op(op)
    what = f"({op}) of bool[{count}]"
    for layout in ("offset", "strided"):
        result = comm.all_reduce(_like(layout, mine), op=reducer)
        assert_bits(result, total, f"all_reduce{what} of a {layout} array")
    for result in comm.all_reduce([mine, mine.copy()], op=reducer):
        assert_bits(result, total, f"all_reduce{what} in a structure")
    hold_fold(comm, reducer, mine, total, _folded(op, inputs[: rank + 1]), what)


@on_each_rank(needs=_takes_bools)
def check_bools_moved(comm: Communicator) -> None:
    """Check that calls that only move booleans keep their bytes."""
    size, rank = comm.size, comm.rank
    for count in _COUNTS[1:]:
        inputs = [_drawn(peer, count) for peer in range(size)]
        mine, own = inputs[rank], inputs[rank].view(np.uint8).copy()
        results = {
            "broadcast": comm.broadcast(mine.copy(), root=size - 1),
            "all_gather": comm.all_gather(mine),
            "gather": comm.gather(mine, root=0),
            "scatter": comm.scatter(inputs[0] if rank == 0 else None, root=0, like=mine),
            "sendrecv": comm.sendrecv(mine, dst=(rank + 1) % size, src=(rank - 1) % size),
            "all_to_all": comm.all_to_all(mine),
        }
        for call, result in results.items():
            if call != "gather" or rank == 0:
                root = size - 1 if call == "broadcast" else 0
                wanted = moved(call, inputs.__getitem__, rank, size, root=root)
                assert_bits(result, wanted.view(np.uint8), f"{call} of bool[{count}]")
        assert_bits(mine, own, f"the input of bool[{count}]")


def _drawn(rank: int, count: int) -> Array:
    """Return the booleans that a rank contributes."""
    drawn = np.random.default_rng([rank, count]).choice(_BYTES, count)
    return np.asarray(drawn).view(bool)


def _like(layout: str, array: Array) -> Array:
    """Return a copy, byte by byte, in memory of a ``layout`` of :func:`laid_out`."""
    return laid_out(layout, array.view(np.uint8)).view(bool)


def _folded(op: str, inputs: list[Array]) -> Array:
    """Return the bytes of a fold of booleans."""
    truths = [array.view(np.uint8) != 0 for array in inputs]
    return expected("lor" if op == "user" else op, truths).view(np.uint8)


def _either(a: Array, b: Array) -> Array:
    """Return the logical or of two arrays, where true is an operand's byte and not always 1."""
    return np.bitwise_or(a.view(np.uint8), b.view(np.uint8)).view(bool)
