"""The updater and the evaluator of several processes, compared with a Trainer on one process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.trainer")

import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.iterators import SerialIterator
from chainer.training import extensions
from chainer.training.extensions import Evaluator

import collective
from collective.adapters.chainer import (
    MultiNodeUpdater,
    ShardedIterator,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
    scatter_dataset,
)
from collective.errors import InvalidArgumentError, MismatchError
from tests.support.chainer_models import Model, assert_close, samples, weights
from tests.support.chainer_ranks import on, run
from tests.support.mpi_launches import needs


def model() -> Any:
    return L.Classifier(Model(), lossfun=F.mean_squared_error, accfun=F.mean_absolute_error)


class InOrder(SerialIterator):
    """An iterator for one process, in the order of all ranks' ``ShardedIterator`` together."""

    def __init__(self, dataset: Any, batch: int) -> None:
        self._all = ShardedIterator(range(len(dataset)), batch, (0, 1), seed=7)
        super().__init__(dataset, batch, shuffle=False)

    def next(self) -> Any:
        super().next()
        return [self.dataset[index] for index in self._all.next()]


def trained_alone(out: Any) -> tuple[dict[str, Any], list[Any]]:
    net = model()
    optimizer = chainer.optimizers.Adam(0.01).setup(net)
    iterator = InOrder(samples(22), 8)
    trainer = training.Trainer(
        training.updaters.StandardUpdater(iterator, optimizer), (4, "epoch"), out=out
    )
    test = SerialIterator(samples(13), 13, repeat=False, shuffle=False)
    trainer.extend(Evaluator(test, net))
    trainer.extend(extensions.ExponentialShift("alpha", 0.5))
    trainer.extend(extensions.LogReport())
    trainer.run()
    return weights(net), json.loads(Path(out, "log").read_text())


def trained(comm: Any, out: str, mean: bool = True) -> Any:
    net = model()
    adam = chainer.optimizers.Adam(0.01)
    optimizer = create_multi_node_optimizer(adam, comm, bucket_mib=0.0002).setup(net)
    iterator = ShardedIterator(samples(22), 8 // comm.size, comm, seed=7)
    updater = MultiNodeUpdater(iterator, optimizer, comm, mean_observations=mean)
    trainer = training.Trainer(updater, (4, "epoch"), out=out)
    shard = scatter_dataset(samples(13), comm)
    test = SerialIterator(shard, 4, repeat=False, shuffle=False)
    trainer.extend(create_multi_node_evaluator(Evaluator(test, net), comm))
    trainer.extend(extensions.ExponentialShift("alpha", 0.5))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss"]))
        trainer.extend(extensions.ProgressBar(update_interval=1))
    trainer.run()
    return weights(net), optimizer.alpha, updater.epoch, updater.iteration, optimizer.epoch


# 22 samples in steps of 8: epochs end in the middle of a batch.
@pytest.mark.parametrize(
    "world",
    ["shm-2", "threads-4", pytest.param("mpi-2", marks=[needs("mpich"), pytest.mark.whole])],
)
def test_trainer_reports_equal_one_process(world: str, tmp_path: Path) -> None:
    expected, log = trained_alone(tmp_path / "alone")
    for net, *others in run(world, trained, str(tmp_path / "together")):
        assert others == [0.01 * 0.5**11, 4, 11, 4]
        assert_close(net, expected, 1e-9)
    together = json.loads((tmp_path / "together" / "log").read_text())
    assert len(together) == len(log) == 4
    for entry, reference in zip(together, log, strict=True):
        for name in ("main/loss", "validation/main/loss", "validation/main/accuracy", "iteration"):
            assert entry[name] == pytest.approx(reference[name], rel=1e-6), name


@on("shm-2")
@pytest.mark.parametrize("mean", [True, False])
def test_updater_observations_are_averaged_only_on_request(comm: Any, mean: bool) -> None:
    net = model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(net)
    iterator = ShardedIterator(samples(22), 4, comm)
    updater = MultiNodeUpdater(iterator, optimizer, comm, mean_observations=mean)
    trainer = training.Trainer(updater, (1, "iteration"))
    with trainer.reporter.scope(trainer.observation):
        updater.update()
    loss = float(chainer.as_array(trainer.observation["main/loss"]))
    assert len(set(comm.all_gather_object(loss))) == (1 if mean else 2)


@on("shm-2")
def test_updater_with_uneven_shards_raises_mismatch_error(comm: Any) -> None:
    net = model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(net)
    shard = scatter_dataset(samples(23), comm)
    lengths = "of 11 samples, in batches of 4, on rank 1, but of 12 samples, .* on rank 0"
    with pytest.raises(MismatchError, match=f"{lengths}.*use a ShardedIterator"):
        MultiNodeUpdater(SerialIterator(shard, 4), optimizer, comm)
    padded = scatter_dataset(samples(23), comm, padded=True)
    MultiNodeUpdater(SerialIterator(padded, 4), optimizer, comm).update()


def test_updater_with_plain_optimizer_raises() -> None:
    with collective.init() as comm:
        optimizer = chainer.optimizers.SGD().setup(model())
        with pytest.raises(InvalidArgumentError, match="'main' is a SGD that steps by itself"):
            MultiNodeUpdater(SerialIterator(samples(4), 2), optimizer, comm)


# -- evaluation on shards ----------------------------------------------------------------------

WORLDS = ["threads-4", "shm-2"]


class Target(chainer.Link):
    """A link that reports a mean, a mean of some samples with their number, and an array."""

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
def test_evaluator_means_are_exact_on_uneven_shards(world: str, count: int, iterator: str) -> None:
    data = values(count)
    reports = run(world, evaluated, count, 4, iterator)
    assert all(report == reports[0] for report in reports)
    assert set(reports[0]) == {"validation/main/mean", "validation/main/large"}
    assert reports[0]["validation/main/mean"] == pytest.approx(data.mean(), rel=1e-14)
    assert reports[0]["validation/main/large"] == pytest.approx(data[data > 0].mean(), rel=1e-14)


@on(*WORLDS)
def test_evaluator_without_samples_returns_empty_report(comm: Any) -> None:
    assert evaluated(comm, 0, 4, "scattered") == {}


class Strange(chainer.Link):
    def forward(self, x: Any) -> Any:
        chainer.report({"nan": float("nan") if x[0] else 1.0}, self)
        chainer.report({"inf": float("inf") if x[0] else 1.0}, self)


@on(*WORLDS)
def test_evaluator_reports_infinity_and_nan(comm: Any) -> None:
    it = ShardedIterator(np.arange(comm.size), 1, comm, repeat=False, shuffle=False)
    report = create_multi_node_evaluator(Evaluator(it, Strange()), comm)()
    assert math.isnan(report["main/nan"])
    assert report["main/inf"] == math.inf


class Own(Evaluator):
    def evaluate(self) -> Any:
        return {}


def test_evaluator_with_custom_evaluate_raises() -> None:
    with collective.init() as comm:
        it = SerialIterator([1], 1, repeat=False)
        with pytest.raises(InvalidArgumentError, match=r"Own has an evaluate\(\) of its own"):
            create_multi_node_evaluator(Own(it, Target()), comm)


def test_evaluator_calls_hooks_functions_and_progress_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
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
