"""Chainer's adapters on transports and sizes that their own tests leave out: MPI and 4 ranks.

Each rank runs the programs of those tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.arrays")

import chainer

from collective.testing import RankPool
from tests.adapters.chainer import test_batch_normalization as test_chainer_batch_normalization
from tests.adapters.chainer import test_functional as test_chainer_functional
from tests.adapters.chainer import test_optimizer as test_chainer_optimizer
from tests.adapters.chainer import test_pipeline as test_chainer_pipeline
from tests.adapters.chainer import test_trainer as test_chainer_trainer
from tests.adapters.chainer.chainermn import test_calls as test_chainermn_calls
from tests.adapters.chainer.chainermn import test_gradients as test_chainermn_gradients
from tests.adapters.chainer.chainermn import test_training as test_chainermn_training
from tests.support.chainer_models import assert_close, assert_same, trained_alone
from tests.support.chainer_ranks import as_chainermn
from tests.support.mpi_launches import pool_of, world_of

pytestmark = pytest.mark.whole

_WORLDS = [("tcp", 4), ("gloo", 4), ("openmpi", 2), ("mpich", 4)]


@pytest.fixture(scope="module", params=[world_of(*world) for world in _WORLDS])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with pool_of(request.param, chainer) as ranks:
        yield ranks


@pytest.mark.parametrize("way", ["lossfun", "backward", "plain"])
def test_optimizer_trains_as_one_process(pool: RankPool, way: str) -> None:
    results = pool.run(test_chainer_optimizer.training, "momentum", 0.0002, way)
    assert_same(results)
    assert_close(results[0], trained_alone(5))


def test_dense_layer_gradients_are_computed_in_buckets(pool: RankPool) -> None:
    test = test_chainer_optimizer.test_dense_layer_gradients_are_computed_in_buckets
    pool.run(test.program)


@pytest.mark.parametrize("name", test_chainer_batch_normalization.SHAPES)
def test_batch_normalization_equals_joined_batch(pool: RankPool, name: str) -> None:
    results = pool.run(test_chainer_batch_normalization.joined, name, "float64", False)
    test_chainer_batch_normalization.compare(results, name, False)


def test_differentiable_collectives_have_right_derivatives(pool: RankPool) -> None:
    pool.run(test_chainer_functional.TAPE.check_directions)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipeline_step_equals_one_process(pool: RankPool, schedule: str) -> None:
    how = {"schedule": schedule, "microbatches": 5}
    results = pool.run(test_chainer_pipeline.piped, test_chainer_pipeline.plain, 12, **how)
    expected = test_chainer_pipeline.whole(test_chainer_pipeline.plain, pool.size, 12)
    test_chainer_pipeline.assert_close(results, expected)


def test_pipeline_stage_error_raises_on_all_ranks(pool: RankPool) -> None:
    test_chainer_pipeline.check_failure(pool.run(test_chainer_pipeline.failing))


def test_evaluator_averages_over_all_samples(pool: RankPool) -> None:
    for report in pool.run(test_chainer_trainer.evaluated, 13, 4, "sharded"):
        data = test_chainer_trainer.values(13)
        assert report["validation/main/mean"] == pytest.approx(data.mean(), rel=1e-14)


@pytest.mark.parametrize(
    "check",
    [
        test_chainermn_calls.test_send_and_recv_carry_single_array_and_tuple,
        test_chainermn_calls.test_object_collectives_return_equal_objects,
        test_chainermn_gradients.test_multi_node_mean_grad_averages_gradients,
        test_chainermn_gradients.test_double_buffering_applies_mean_one_step_late,
        test_chainermn_training.test_training_on_shards_equals_training_on_one_rank,
        test_chainermn_training.test_multi_node_iterator_gives_all_ranks_same_batches,
        test_chainermn_training.test_multi_node_evaluator_covers_all_shards,
    ],
    ids=lambda check: check.__name__,
)
def test_chainermn_calls_succeed(pool: RankPool, check: Any) -> None:
    pool.run(as_chainermn, check.program)
