"""Chainer's adapters on the transports and sizes where their own tests do not go: MPI, 4 ranks.

What runs on each rank is what those tests run; here the ranks are others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# First, as it is what makes Chainer's import work.
pytest.importorskip("collective.adapters.chainer.arrays")

import chainer

from collective.testing import RankPool
from tests.adapters.chainer import test_batch_normalization as test_chainer_batch_normalization
from tests.adapters.chainer import test_functional as test_chainer_functional
from tests.adapters.chainer import test_optimizer as test_chainer_optimizer
from tests.adapters.chainer import test_pipeline as test_chainer_pipeline
from tests.adapters.chainer import test_snapshot as test_chainer_snapshot
from tests.adapters.chainer import test_trainer as test_chainer_trainer
from tests.adapters.chainer.chainermn import test_calls as test_chainermn_calls
from tests.adapters.chainer.chainermn import test_gradients as test_chainermn_gradients
from tests.adapters.chainer.chainermn import test_training as test_chainermn_training
from tests.support.chainer_models import assert_close, assert_same, trained_alone
from tests.support.chainer_ranks import as_chainermn
from tests.support.mpi_launches import pool_of, world_of

_WORLDS = [("gloo", 4), ("openmpi", 2), ("mpich", 4)]


@pytest.fixture(scope="module", params=[world_of(*world) for world in _WORLDS])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with pool_of(request.param, chainer) as made:
        yield made


@pytest.mark.parametrize("way", ["lossfun", "backward", "plain"])
def test_an_optimizer(pool: RankPool, way: str) -> None:
    found = pool.run(test_chainer_optimizer.training, "momentum", 0.0002, way)
    assert_same(found)
    assert_close(found[0], trained_alone(5))


def test_gradients_of_dense_layers_in_their_buckets(pool: RankPool) -> None:
    test = test_chainer_optimizer.test_gradients_of_dense_layers_are_computed_in_their_buckets
    pool.run(test.program)


@pytest.mark.parametrize("name", test_chainer_batch_normalization.SHAPES)
def test_batch_normalization(pool: RankPool, name: str) -> None:
    found = pool.run(test_chainer_batch_normalization.joined, name, "float64", False)
    test_chainer_batch_normalization.compare(found, name, False)


def test_differentiable_collectives(pool: RankPool) -> None:
    pool.run(test_chainer_functional.TAPE.check_directions)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline(pool: RankPool, schedule: str) -> None:
    how = {"schedule": schedule, "microbatches": 5}
    found = pool.run(test_chainer_pipeline.piped, test_chainer_pipeline.plain, 12, **how)
    expected = test_chainer_pipeline.whole(test_chainer_pipeline.plain, pool.size, 12)
    test_chainer_pipeline.assert_close(found, expected)


def test_a_stage_of_a_pipeline_that_raises(pool: RankPool) -> None:
    test_chainer_pipeline.check_failure(pool.run(test_chainer_pipeline.failing))


def test_an_evaluator(pool: RankPool) -> None:
    for found in pool.run(test_chainer_trainer.evaluated, 13, 4, "sharded"):
        data = test_chainer_trainer.values(13)
        assert found["validation/main/mean"] == pytest.approx(data.mean(), rel=1e-14)


def test_a_snapshot(pool: RankPool, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    expected = pool.run(test_chainer_snapshot.whole, out, "sharded")
    assert pool.run(test_chainer_snapshot.resumed, out, "sharded") == expected


@pytest.mark.parametrize(
    "check",
    [
        test_chainermn_calls.test_messages_of_one_array_and_of_several,
        test_chainermn_calls.test_objects,
        test_chainermn_gradients.test_gradients_become_their_mean,
        test_chainermn_gradients.test_double_buffering_applies_means_one_step_late,
        test_chainermn_training.test_training_on_shards_equals_training_alone,
        test_chainermn_training.test_iterators_give_all_ranks_the_same_batches,
        test_chainermn_training.test_evaluators_see_all_shards,
    ],
    ids=lambda check: check.__name__,
)
def test_chainermn(pool: RankPool, check: Any) -> None:
    pool.run(as_chainermn, check.program)
