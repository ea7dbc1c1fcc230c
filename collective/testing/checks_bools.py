"""Checks of booleans whose bytes are neither 0 nor 1: views of other memory may hold any."""

from __future__ import annotations

import numpy as np

from collective.communicator import Communicator
from collective.contract.capabilities import Capabilities
from collective.ops import as_op, user_op

from .checks import Case, on_each_rank
from .samples import LARGE, OPS, Array, assert_bits, expected, laid_out, regions

_BY_OP: list[Case] = [{"op": op} for op in (*(op for op in OPS if "b" in OPS[op]), "user")]
# A bitwise fold of two true bytes may be 0 (1 and 2), and their maximum is not 1.
_BYTES = np.array([0, 0, 0, 0, 0, 1, 2, 3, 128, 254, 255], np.uint8)
# One element, a few, more than any vector, more than a mebibyte; no piece divides the last ones.
_COUNTS = (1, 13, 2003, 4 * LARGE + 1)


def _takes_bools(capabilities: Capabilities) -> str | None:
    return None if "bool" in capabilities.dtypes else "folds no booleans"


@on_each_rank(_BY_OP, needs=_takes_bools)
def check_bools_folded(comm: Communicator, op: str) -> None:
    """A fold takes every byte but 0 for true and gives bytes of 0 and 1: every op and size."""
    if op not in comm.capabilities.ops:
        return
    for count in _COUNTS:
        _fold_all(comm, op, [_drawn(rank, count) for rank in range(comm.size)])


def _fold_all(comm: Communicator, op: str, inputs: list[Array]) -> None:
    """Fold the ranks' booleans by all calls that fold."""
    rank, count = comm.rank, inputs[0].size
    mine, total = inputs[rank], _folded(op, inputs)
    # NumPy's function returns 0 and 1; this one an operand, as it is.
    reducer = user_op(_either) if op == "user" else as_op(op)
    what = f"({op}) of bool[{count}]"
    assert_bits(comm.all_reduce(mine, op=reducer), total, f"all_reduce{what}")
    found = comm.all_reduce(mine, op=reducer, order="rank")
    assert_bits(found, total, f"all_reduce{what} in rank order")
    for layout in ("offset", "strided"):
        found = comm.all_reduce(_like(layout, mine), op=reducer)
        assert_bits(found, total, f"all_reduce{what} of a {layout} array")
    for found in comm.all_reduce([mine, mine.copy()], op=reducer):
        assert_bits(found, total, f"all_reduce{what} in a structure")
    for root in {0, comm.size - 1}:
        reduced = comm.reduce(mine, op=reducer, root=root)
        if rank == root:
            assert_bits(reduced, total, f"reduce{what} to {root}")
    part = list(regions(count, comm.size))[rank]
    found = comm.reduce_scatter(mine, op=reducer)
    assert_bits(found, total[part], f"reduce_scatter{what}")
    assert_bits(comm.scan(mine, op=reducer), _folded(op, inputs[: rank + 1]), f"scan{what}")
    result = mine.copy()
    comm.all_reduce(result, op=reducer, out=result)
    assert_bits(result, total, f"all_reduce{what} in place")


@on_each_rank(needs=_takes_bools)
def check_bools_moved(comm: Communicator) -> None:
    """Calls that only move booleans keep their bytes."""
    size, rank = comm.size, comm.rank
    for count in _COUNTS[1:]:
        inputs = [_drawn(each, count) for each in range(size)]
        mine, every = inputs[rank], np.concatenate(inputs).view(np.uint8)
        what = f"of bool[{count}]"
        own, last = mine.view(np.uint8), inputs[-1].view(np.uint8)
        found = comm.broadcast(mine.copy(), root=size - 1)
        assert_bits(found, last, f"broadcast {what}")
        assert_bits(comm.all_gather(mine), every, f"all_gather {what}")
        gathered = comm.gather(mine, root=0)
        if rank == 0:
            assert_bits(gathered, every, f"gather {what}")
        found = comm.scatter(inputs[0] if rank == 0 else None, root=0, like=mine)
        part = list(regions(count, size))[rank]
        assert_bits(found, inputs[0][part].view(np.uint8), f"scatter {what}")
        found = comm.sendrecv(mine, dst=(rank + 1) % size, src=(rank - 1) % size)
        assert_bits(found, inputs[rank - 1].view(np.uint8), f"sendrecv {what}")
        found = comm.all_to_all(mine)
        wanted = np.concatenate([x[list(regions(count, size))[rank]] for x in inputs])
        assert_bits(found, wanted.view(np.uint8), f"all_to_all {what}")
        assert_bits(mine, own, f"the input {what}")


def _drawn(rank: int, count: int) -> Array:
    """Return what a rank contributes."""
    drawn = np.random.default_rng([rank, count]).choice(_BYTES, count)
    return np.asarray(drawn).view(bool)


def _like(layout: str, array: Array) -> Array:
    """Return a copy, byte by byte, that lies in memory as ``layout`` says."""
    return laid_out(layout, array.view(np.uint8)).view(bool)


def _folded(op: str, inputs: list[Array]) -> Array:
    """Return the bytes of a fold of booleans."""
    truths = [array.view(np.uint8) != 0 for array in inputs]
    return expected("lor" if op == "user" else op, truths).view(np.uint8)


def _either(a: Array, b: Array) -> Array:
    """Return the logical or of two arrays: where it is true, the byte of an operand."""
    return np.bitwise_or(a.view(np.uint8), b.view(np.uint8)).view(bool)
