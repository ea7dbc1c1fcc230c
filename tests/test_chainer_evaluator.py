"""Evaluation on shards, against one process that has all samples."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

# First, as it is what makes Chainer's import work.
pytest.importorskip("collective.adapters.chainer.evaluator")

import chainer
from chainer.iterators import SerialIterator
from chainer.training.extensions import Evaluator

import collective
from collective.adapters.chainer import (
    ShardedIterator,
    create_multi_node_evaluator,
    scatter_dataset,
)
from collective.errors import InvalidArgumentError
from tests.chainer_ranks import on, run

WORLDS = ["threads-4", "shm-2"]


class Target(chainer.Link):
    """Reports a mean; a mean over some of the samples, with their number; and texts."""

    def forward(self, x: Any) -> Any:
        assert not chainer.config.train
        chainer.report({"mean": chainer.Variable(x).array.mean()}, self)
        large = x[x > 0]
        if len(large):
            chainer.report({"large": (large.mean(), len(large))}, self)
        chainer.report({"all": x}, self)


def values(count: int) -> Any:
    return np.random.RandomState(8).standard_normal(count)


def evaluated(comm: Any, count: int, batch: int, iterator: str) -> Any:
    data = values(count)
    if iterator == "sharded":
        it = ShardedIterator(data, batch, comm, repeat=False)
    else:
        it = SerialIterator(scatter_dataset(data, comm), batch, repeat=False, shuffle=False)
    evaluator = create_multi_node_evaluator(Evaluator(it, Target()), comm)
    evaluator.name = "validation"
    first = evaluator()
    assert repr(evaluator()) == repr(first)
    return first


# With 3 samples some ranks have none; batches of 4 leave short ones.
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("count", [3, 13, 32])
@pytest.mark.parametrize("iterator", ["sharded", "scattered"])
def test_means_are_exact_on_uneven_shards(world: str, count: int, iterator: str) -> None:
    data = values(count)
    found = run(world, evaluated, count, 4, iterator)
    assert all(each == found[0] for each in found)
    assert set(found[0]) == {"validation/main/mean", "validation/main/large"}
    assert found[0]["validation/main/mean"] == pytest.approx(data.mean(), rel=1e-14)
    assert found[0]["validation/main/large"] == pytest.approx(data[data > 0].mean(), rel=1e-14)


@on(*WORLDS)
def test_no_samples_at_all(comm: Any) -> None:
    assert evaluated(comm, 0, 4, "scattered") == {}


class Strange(chainer.Link):
    def forward(self, x: Any) -> Any:
        chainer.report({"nan": float("nan") if x[0] else 1.0}, self)
        chainer.report({"inf": float("inf") if x[0] else 1.0}, self)


@on(*WORLDS)
def test_infinities_and_nan(comm: Any) -> None:
    it = ShardedIterator(np.arange(comm.size), 1, comm, repeat=False, shuffle=False)
    found = create_multi_node_evaluator(Evaluator(it, Strange()), comm)()
    assert math.isnan(found["main/nan"])
    assert found["main/inf"] == math.inf


class Own(Evaluator):
    def evaluate(self) -> Any:
        return {}


def test_an_evaluate_of_its_own_is_refused() -> None:
    with collective.init() as comm:
        it = SerialIterator([1], 1, repeat=False)
        with pytest.raises(InvalidArgumentError, match=r"Own has an evaluate\(\) of its own"):
            create_multi_node_evaluator(Own(it, Target()), comm)


def test_hooks_functions_and_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    with collective.init() as comm:
        it = SerialIterator([{"x": 1.0}, {"x": 3.0}], 2, repeat=False)
        evaluator = Evaluator(
            it,
            Target(),
            eval_hook=seen.append,
            eval_func=lambda x: chainer.report({"x": x.mean()}),
            progress_bar=True,
        )
        assert create_multi_node_evaluator(evaluator, comm)() == {"x": 2.0}
    assert seen == [evaluator]
    assert "validation" in capsys.readouterr().out
