"""Checks of the order of a fold: user-defined operators and order="rank"."""

from __future__ import annotations

import functools

import numpy as np

from collective import Communicator, user_op

from .checks import Case, folds_for_users, on_each_rank
from .frameworks import encoded
from .samples import LARGE, Array, assert_bits, dtypes_of, expected, of_bits, plain, regions, values

_DTYPES: list[Case] = [{"dtype": name} for name in ("float16", "float32", "float64", "complex64")]


def _affine(a: Array, b: Array) -> Array:
    """Compose two maps x -> 16 x + d, packed as hexadecimal digits.

    The composition is associative, and each order of the operands gives another result.
    """
    digits: Array = a * 16 + b % 16
    return digits


def _last(a: Array, b: Array) -> Array:
    return b


def _smaller(a: Array, b: Array) -> Array:
    return np.where(a < b, a, b)


@on_each_rank(needs=folds_for_users)
def check_user_op(comm: Communicator) -> None:
    """Check that a user-defined commutative operator folds every rank's elements."""
    op = user_op(_smaller, commutative=True)
    for dtype in ("int64", "float32"):
        for count in (0, 1, 7, 1001, LARGE):
            inputs = [values(dtype, count, rank, 20) for rank in range(comm.size)]
            wanted = functools.reduce(np.minimum, inputs)
            found = comm.all_reduce(inputs[comm.rank], op=op)
            assert_bits(found, wanted, f"all_reduce(user_op) of {dtype}[{count}]")


@on_each_rank(at_least=2, needs=folds_for_users)
def check_user_op_order(comm: Communicator) -> None:
    """Check that a non-commutative operator gets lower ranks on the left, in every reduction."""
    op = user_op(_last)
    for count in (1, 7, 1001, LARGE):
        inputs = [values("int64", count, rank, 21) for rank in range(comm.size)]
        mine, last = inputs[comm.rank], inputs[-1]
        what = f"by an operator that keeps its right argument, of {count} elements"
        assert_bits(comm.all_reduce(mine, op=op), last, f"all_reduce {what}")
        for root in {0, comm.size - 1}:
            found = comm.reduce(mine, op=op, root=root)
            if comm.rank == root:
                assert_bits(found, last, f"reduce to {root} {what}")
        part = list(regions(count, comm.size))[comm.rank]
        assert_bits(comm.reduce_scatter(mine, op=op), last[part], f"reduce_scatter {what}")
        assert_bits(comm.scan(mine, op=op), mine, f"scan {what}")
    digits = comm.all_reduce(np.array([comm.rank + 1]), op=user_op(_affine), order="rank")
    wanted = functools.reduce(lambda a, b: a * 16 + b, range(1, comm.size + 1))
    assert digits[0] == wanted, f"all_reduce in rank order: {digits[0]:x}; expected {wanted:x}"


@on_each_rank(_DTYPES)
def check_order_rank(comm: Communicator, dtype: str) -> None:
    """Check that order="rank" gives the bits of a fold from rank 0 up, for any size."""
    if dtype not in dtypes_of(comm.capabilities.dtypes):
        return
    for count in (1, 5, 1001, LARGE):
        inputs = [_rough(dtype, count, rank) for rank in range(comm.size)]
        mine = inputs[comm.rank]
        total = expected("sum", inputs)
        what = f"of {dtype}[{count}] in rank order"
        found = comm.all_reduce(mine, order="rank")
        assert_bits(found, total, f"all_reduce {what}")
        root = comm.size // 2
        reduced = comm.reduce(mine, order="rank", root=root)
        if reduced is not None:
            assert_bits(reduced, total, f"reduce {what}")
        piece = comm.reduce_scatter(mine, order="rank")
        part = list(regions(count, comm.size))[comm.rank]
        assert_bits(piece, total[part], f"reduce_scatter {what}")


@on_each_rank()
def check_order_rank_bfloat16(comm: Communicator) -> None:
    """Check that order="rank" rounds bfloat16 to nearest even at every step."""
    if "bfloat16" not in dtypes_of(comm.capabilities.dtypes):
        return
    numbers = [encoded(_rough("float32", 5001, rank), "bfloat16") for rank in range(comm.size)]
    inputs = [of_bits("bfloat16", bits) for bits in numbers]
    found = comm.all_reduce(inputs[comm.rank], order="rank")
    assert_bits(plain(found), expected("sum", inputs), "all_reduce of bfloat16 in rank order")


def _rough(dtype: str, count: int, rank: int) -> Array:
    """Return numbers of very different magnitudes, whose sums depend on the order."""
    random = np.random.default_rng([rank, count])
    numbers = random.standard_normal(count) * 10.0 ** random.integers(-2, 3, count)
    return (numbers * (1 - 0.5j) if dtype.startswith("complex") else numbers).astype(dtype)
