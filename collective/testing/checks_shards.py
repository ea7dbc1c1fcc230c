"""Checks of virtual shards: ``order=Shards(…)`` gives the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from collective import Communicator, ShardFold, Shards, user_op
from collective.ops import Op

from .checks import Case, folds_for_users, on_each_rank
from .frameworks import encoded, widened
from .samples import Array, assert_bits, assert_same, dtypes_of, folded, of_bits, plain, regions

_CASES: list[Case] = [
    {"dtype": dtype, "op": op}
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64")
    for op in ("sum", "prod")
]


@on_each_rank(_CASES)
def check_shards(comm: Communicator, dtype: str, op: Op) -> None:
    """Check that a fold of shards has the bits of the fold along the tree, for any size."""
    for total, count in ((1, 5), (5, 1001), (8, 3)):
        _compare(comm, dtype, op, total, count)


@on_each_rank([{"dtype": name} for name in ("bfloat16", "float32")])
def check_shards_large(comm: Communicator, dtype: str) -> None:
    """Check the bits of long shards, which the ranks fold in pieces."""
    _compare(comm, dtype, "sum", 3, 200_001)


def _compare(comm: Communicator, dtype: str, op: Op, total: int, count: int) -> None:
    if dtype not in dtypes_of(comm.capabilities.dtypes):
        return
    rows = _rough(dtype, total, count)
    wanted = widened(_tree(list(rows), lambda a, b: folded(op, [a, b], dtype)), dtype)
    for shards in _divisions(total, comm):
        mine = _array(dtype, rows[shards.mine.start : shards.mine.stop])
        what = f"of {shards} of {dtype}[{count}], op {op}"
        found = plain(comm.all_reduce(mine, op=op, order=shards))
        assert_bits(found, wanted, f"all_reduce {what}")
        root = comm.size // 2
        reduced = comm.reduce(mine, op=op, order=shards, root=root)
        if comm.rank == root:
            assert_bits(plain(reduced), wanted, f"reduce {what}")
        part = regions(count, comm.size)[comm.rank]
        piece = plain(comm.reduce_scatter(mine, op=op, order=shards))
        assert_bits(piece, wanted[part], f"reduce_scatter {what}")


@on_each_rank()
def check_shards_avg(comm: Communicator) -> None:
    """Check that ``avg`` divides by the number of shards, and not by that of the ranks."""
    for total, count in ((5, 1001), (8, 3)):
        rows = _rough("float32", total, count)
        wanted = _tree(list(rows), np.add) / np.float32(total)
        for shards in _divisions(total, comm):
            mine = rows[shards.mine.start : shards.mine.stop]
            found = comm.all_reduce(mine, op="avg", order=shards)
            assert_bits(plain(found), wanted, f"all_reduce of {shards}, op avg")


@on_each_rank(own_arrays=True)
def check_shards_one_by_one(comm: Communicator) -> None:
    """Check that a :class:`ShardFold` gives the bits of all shards at once."""
    rows = _rough("float32", 7, 1001)
    for shards in _divisions(7, comm):
        fold = ShardFold(shards, like=rows[0])
        for _ in range(2):  # the second time in the memory of the first
            for shard in shards.mine:
                array = rows[shard].copy()
                fold.add(array)
                array[:] = np.nan  # the caller may change it
            found = comm.all_reduce(fold, order=shards)
            assert_bits(
                plain(found), _tree(list(rows), np.add), f"all_reduce of a fold of {shards}"
            )
            fold.clear()


@on_each_rank(needs=folds_for_users)
def check_shards_user_op(comm: Communicator) -> None:
    """Check that a user's operator gets earlier shards on the left."""
    rows = np.arange(1, 6).reshape(5, 1) * np.ones(1001, np.int64)
    for shards in _divisions(5, comm):
        mine = rows[shards.mine.start : shards.mine.stop]
        found = comm.all_reduce(mine, op=user_op(lambda a, b: b), order=shards)
        assert_same(plain(found), rows[-1], f"all_reduce of {shards} by the right operand")


def _divisions(total: int, comm: Communicator) -> Iterator[Shards]:
    """Yield divisions of shards: even ones, and uneven ones in another order than the ranks'."""
    yield Shards(total, comm)
    # Rank 0 has the last shards, the last rank has none of them, and the others have one each.
    size = comm.size
    singles = [range(shard, shard + 1) for shard in range(min(size - 2, total - 1))]
    rest = range(len(singles), total)
    yield Shards(total, comm, held=([rest, *singles] + [range(0)] * size)[:size])


def _tree(values: list[Array], fold: Callable[[Array, Array], Array]) -> Array:
    """Return the fold of values, each half by itself; the left half is a power of two."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    joined: Array = fold(_tree(values[:half], fold), _tree(values[half:], fold))
    return joined


def _rough(dtype: str, total: int, count: int) -> Array:
    """Return rows of numbers whose sums depend on the order, in the storage of ``dtype``."""
    random = np.random.default_rng([total, count])
    numbers: Array = random.uniform(0.5, 2, (total, count)) * random.choice([-1, 1], (total, count))
    if dtype.startswith("complex"):
        numbers = numbers * (1 - 0.5j)
    if dtype == "bfloat16":
        return encoded(numbers.astype(np.float32), dtype)
    return numbers.astype(dtype)


def _array(dtype: str, rows: Array) -> Any:
    return of_bits(dtype, rows) if dtype == "bfloat16" else rows
