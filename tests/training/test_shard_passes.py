"""State around the passes of virtual shards: generators, folded arrays and numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from collective.errors import MismatchError
from collective.testing import RankPool, run_ranks
from collective.training.replicas import StateEntry, check_values
from collective.training.shard_passes import ShardPasses, StateFold
from tests.support.on_ranks import ranks_of

TOTAL = 3
# Several threads would share the generators.
pool = ranks_of(("threads", 1), ("shm", 2), ("shm", 4))


def _drawn(comm: Any) -> Any:
    random.seed(comm.rank)
    np.random.seed(comm.rank)
    passes = ShardPasses(TOTAL, comm)
    numbers = [(shard, random.random(), np.random.rand()) for _ in range(2) for shard in passes]
    return numbers, random.random(), np.random.rand()


def test_numbers_drawn_in_passes_do_not_depend_on_the_ranks(pool: RankPool) -> None:
    outcomes = pool.run(_drawn)
    alone = run_ranks(1, _drawn)[0][0]
    assert sorted(row for numbers, *_ in outcomes for row in numbers) == sorted(alone)
    assert len({row[1:] for row in alone}) == 2 * TOTAL


def test_generators_continue_after_the_passes_as_before_them() -> None:
    ((_, of_python, of_numpy),) = run_ranks(1, _drawn)
    assert of_python == random.Random(0).random()
    assert of_numpy == np.random.RandomState(0).rand()


def _abandoned(comm: Any) -> Any:
    random.seed(0)
    passes = ShardPasses(TOTAL, comm)
    abandoned = iter(passes)
    next(abandoned)
    shards = []
    for shard in passes:
        abandoned.close()  # as if a traceback had kept it alive until now
        shards.append((shard, passes.running))
    return shards, random.random()


def test_abandoned_loop_does_not_disturb_the_next_one() -> None:
    ((shards, of_python),) = run_ranks(1, _abandoned)
    assert shards == [(0, True), (1, True), (2, True)]
    assert of_python == random.Random(0).random()


def _resumed(comm: Any) -> Any:
    np.random.seed(comm.rank)
    passes = ShardPasses(TOTAL, comm)
    before = [np.random.rand() for _ in passes]
    np.random.seed(5)
    passes.rebind(comm.dup())
    passes.step = 0
    return before == [np.random.rand() for _ in passes]


def test_step_after_rebind_has_the_seeds_of_the_step_before(pool: RankPool) -> None:
    assert all(pool.run(_resumed))


def test_generator_of_another_kind_is_seeded_and_restored() -> None:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        first, second = (run_ranks(1, _drawn_from_present_generator)[0] for _ in range(2))
        after = np.random.rand()
    finally:
        np.random.set_bit_generator(own)
    assert first == second
    assert len(set(first)) == TOTAL
    assert after == np.random.RandomState(np.random.PCG64(3)).rand()


def _drawn_from_present_generator(comm: Any) -> list[float]:
    return [np.random.rand() for _ in ShardPasses(TOTAL, comm)]


def _folded(comm: Any) -> Any:
    passes = ShardPasses(TOTAL, comm)
    mask, mean, count = np.full(2, -3e38, np.float32), np.ones(1), np.zeros(1, np.int64)
    state = StateFold(passes, [mask, mean, count], np.stack, [0.1, 1, 0.1])
    for shard in passes:
        state.restore()
        mean *= shard
        count += shard
        state.add(numbers=[0.1, 1 + shard, 0.1 + shard])
    state.reduce()
    return mask.tolist(), mean.tolist(), count.tolist(), state.numbers


def test_unchanged_state_stays_and_changed_state_is_folded(pool: RankPool) -> None:
    masked = np.full(2, -3e38, np.float32).tolist()
    average = (0.1 + 1.1 + 2.1) / 3
    for outcome in pool.run(_folded):
        assert outcome == (masked, [1.0], [2], [0.1, 3, average])


def _compared(comm: Any) -> str:
    same = StateEntry("same", np.zeros(2))
    try:
        check_values(comm, [same], "Remedy.", "step")
        check_values(comm, [same, StateEntry("own", comm.rank)], "Remedy.", "step")
    except MismatchError as error:
        return str(error)
    return "no error"


def test_comparison_of_values_names_call_and_first_difference() -> None:
    for rank, text in enumerate(run_ranks(2, _compared)):
        assert text.startswith("step: the values of own on rank 1 differ from those on rank 0")
        assert f"[rank {rank} of 2]" in text
