"""Virtual shards: their division among ranks, and what a call with them refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collective
from collective import ShardBatches, ShardFold, Shards
from collective.errors import DtypeError, InvalidArgumentError, ShapeError
from collective.testing import RankPool
from tests.support.on_ranks import ranks_of

two = ranks_of(("threads", 2))


def _of(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=rank, size=size)


# -- divisions ------------------------------------------------------------------------------------


def test_shards_are_divided_evenly_in_rank_order() -> None:
    assert [Shards(8, _of(rank, 3)).mine for rank in range(3)] == [
        range(3), range(3, 6), range(6, 8),
    ]  # fmt: skip


def test_ranks_beyond_the_number_of_shards_hold_none() -> None:
    assert len(Shards(2, _of(3, 4)).mine) == 0


@pytest.mark.parametrize("total", [0, -1, 4097, True, 2.0, "8"])
def test_total_that_is_no_number_of_shards_is_refused(total: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="Shards: total"):
        Shards(total, _of(0, 1))


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([range(4), range(3, 8)], "ranks 0, 1 hold shard 3"),
        ([range(2), range(5, 8)], "no rank holds shards 2-4"),
        ([range(4), range(4, 9)], r"rank 1 holds range\(4, 9\); expected consecutive shards of 0"),
        ([range(0, 8, 2), range(1, 8, 2)], "rank 0 holds"),
        ([range(8)], "one range for each of 2 ranks"),
        ([[0, 1], [2, 3]], "one range for each of 2 ranks"),
    ],
)
def test_division_that_is_no_partition_is_refused(held: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Shards(8, _of(0, 2), held=held)


def test_divisions_with_the_same_shards_are_equal() -> None:
    assert Shards(4, _of(0, 2)) == Shards(4, _of(1, 2), held=[range(2), range(2, 4)])


def test_seed_differs_by_shard_and_place() -> None:
    shards = Shards(8, _of(0, 1))
    seeds = {shards.seed(shard, step) for shard in range(8) for step in range(1000)}
    assert len(seeds) == 8000


def test_seed_fits_the_generator_of_numpy() -> None:
    shards = Shards(8, _of(0, 1))
    seeds = [shards.seed(shard, step) for shard in range(8) for step in range(100)]
    assert 2**31 < max(seeds) < 2**32
    np.random.RandomState(max(seeds))


def test_seed_does_not_depend_on_the_ranks() -> None:
    assert Shards(8, _of(0, 1)).seed(5, 2) == Shards(8, _of(2, 3)).seed(5, 2)


# -- calls ----------------------------------------------------------------------------------------


def _refused(comm: Any, case: str) -> str:
    """Make a call that is refused on every rank before anything is sent; return the error."""
    shards = Shards(4, comm)
    fold = ShardFold(shards)
    fold.add(np.ones(2))
    calls = {
        "too few rows": lambda: comm.all_reduce(np.ones((1, 2)), order=shards),
        "a number": lambda: comm.all_reduce(1.0, order=shards),
        "other size": lambda: comm.all_reduce(np.ones((4, 2)), order=Shards(4, _of(0, 1))),
        "other numbers": lambda: comm.all_reduce(
            np.ones((2, 2)), order=Shards(4, _of(1 - comm.rank, 2))
        ),
        "not full": lambda: comm.all_reduce(fold, order=shards),
        "other op": lambda: comm.all_reduce(fold, op="prod", order=shards),
        "out of another shape": lambda: comm.all_reduce(
            np.ones((2, 3)), out=np.ones((2, 3)), order=shards
        ),
        "op of another dtype": lambda: comm.all_reduce(np.ones((2, 3)), op="band", order=shards),
    }
    try:
        calls[case]()
    except collective.CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("too few rows", "ShapeError: all_reduce: an array of shape (1, 2); expected a first axis"),
        ("a number", "ShapeError: all_reduce: an array of shape ()"),
        ("other size", "InvalidArgumentError: all_reduce: order divides the shards among 1 ranks"),
        ("other numbers", "InvalidArgumentError: all_reduce: order is a division by another"),
        ("not full", "InvalidArgumentError: all_reduce: a ShardFold of 1 shards; this rank has 2"),
        ("other op", "InvalidArgumentError: all_reduce: a ShardFold with op sum of"),
        ("out of another shape", "ShapeError: all_reduce: out has shape (2, 3); the result has"),
        ("op of another dtype", "DtypeError: all_reduce: op band: dtype float64"),
    ],
)
def test_call_that_does_not_fit_its_shards_is_refused(two: RankPool, case: str, text: str) -> None:
    for told in two.run(_refused, case):
        assert told.startswith(text)


def _structure(comm: Any) -> Any:
    shards = Shards(4, comm)
    mine = np.arange(4.0)[shards.mine.start : shards.mine.stop]
    x = {"a": mine, "b": [np.stack([mine, mine], axis=1).astype(np.float32)]}
    return comm.all_reduce(x, order=shards)


def test_structure_is_reduced_leaf_by_leaf(two: RankPool) -> None:
    for found in two.run(_structure):
        assert found["a"] == 6
        assert found["b"][0].tolist() == [6, 6]


def _cut(comm: Any) -> Any:
    shards = Shards(4, comm)
    x = np.arange(24.0).reshape(4, 2, 3)[shards.mine.start : shards.mine.stop]
    return comm.reduce_scatter(x, order=shards, axis=1, counts=[1, 2])


def test_reduce_scatter_cuts_the_result_along_any_axis(two: RankPool) -> None:
    total = np.arange(24.0).reshape(4, 2, 3).sum(axis=0)
    left, right = two.run(_cut)
    assert np.array_equal(left, total[:, :1])
    assert np.array_equal(right, total[:, 1:])


def _overlapping(comm: Any) -> Any:
    shards = Shards(2, comm)
    x = np.array([[1.0, 2.0, 3.0]])
    return comm.all_reduce(x, out=x[0], order=shards)


def test_out_may_be_a_row_of_the_input(two: RankPool) -> None:
    for found in two.run(_overlapping):
        assert found.tolist() == [2, 4, 6]


# -- ShardFold ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "error"), [(np.ones(3), ShapeError), (np.ones(2, np.float32), DtypeError)]
)
def test_fold_refuses_a_shard_unlike_the_first(x: Any, error: type[Exception]) -> None:
    fold = ShardFold(Shards(4, _of(0, 1)))
    fold.add(np.ones(2))
    with pytest.raises(error, match="the first shard has"):
        fold.add(x)


def test_fold_refuses_more_shards_than_the_rank_has() -> None:
    fold = ShardFold(Shards(2, _of(0, 2)))
    fold.add(np.ones(2))
    with pytest.raises(InvalidArgumentError, match="all 1 shards of this rank were added"):
        fold.add(np.ones(2))


# -- batches --------------------------------------------------------------------------------------


def test_batches_use_each_sample_once_an_epoch() -> None:
    batches = ShardBatches(20, batch=8, total=4)
    used = [
        i for step in range(batches.steps) for shard in range(4) for i in batches.of(step, shard)
    ]
    assert len(used) == len(set(used)) == 16


def test_batches_differ_between_epochs() -> None:
    batches = ShardBatches(16, batch=16, total=2)
    assert batches.of(0, 0) != batches.of(1, 0)


def test_batches_of_a_step_do_not_depend_on_earlier_steps() -> None:
    batches = ShardBatches(64, batch=8, total=4)
    before = batches.of(3, 1)
    batches.of(20, 2)
    assert batches.of(3, 1) == before


@pytest.mark.parametrize(("length", "batch"), [(100, 10), (7, 8)])
def test_batches_that_cannot_be_divided_are_refused(length: int, batch: int) -> None:
    with pytest.raises(InvalidArgumentError, match="ShardBatches"):
        ShardBatches(length, batch=batch, total=8)
