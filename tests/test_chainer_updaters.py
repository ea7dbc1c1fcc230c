# ruff: noqa: F811  # the fixture
"""The updater of several processes under a Trainer, with extensions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective.errors import InvalidArgumentError, MismatchError
from collective.testing import RankPool
from tests.chainer_ranks import Run, ranks  # noqa: F401
from tests.mpi_launches import launch_of, needs

if importlib.util.find_spec("chainer") is None:
    pytest.skip("chainer is not installed", allow_module_level=True)

from collective.adapters.chainer.dataset import ShardedIterator, scatter_dataset
from collective.adapters.chainer.evaluator import create_multi_node_evaluator
from collective.adapters.chainer.optimizer import create_multi_node_optimizer
from collective.adapters.chainer.updaters import MultiNodeUpdater

import chainer  # isort: skip  # by the adapter's leave
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip
from chainer import training  # isort: skip
from chainer.iterators import SerialIterator  # isort: skip
from chainer.training import extensions  # isort: skip


def samples(count: int) -> Any:
    draw = np.random.RandomState(5)
    return chainer.datasets.TupleDataset(
        draw.standard_normal((count, 6)), draw.standard_normal((count, 2))
    )


def model() -> Any:
    draw = np.random.RandomState(3).standard_normal
    with chainer.using_config("dtype", np.dtype("f8")):
        made = chainer.Sequential(
            L.Linear(6, 8, initialW=draw((8, 6)) / 4), F.tanh,
            L.Linear(8, 2, initialW=draw((2, 8)) / 4),
        )  # fmt: skip
    return L.Classifier(made, lossfun=F.mean_squared_error, accfun=F.mean_absolute_error)


class InOrder(SerialIterator):
    """The samples in the order of all ranks' ``ShardedIterator``, in one process."""

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
    trainer.extend(extensions.Evaluator(test, net))
    trainer.extend(extensions.ExponentialShift("alpha", 0.5))
    trainer.extend(extensions.LogReport())
    trainer.run()
    return weights(net), json.loads(Path(out, "log").read_text())


def weights(link: Any) -> dict[str, Any]:
    return {name: np.array(p.array) for name, p in sorted(link.namedparams())}


def trained(comm: Any, out: str, mean: bool = True) -> Any:
    net = model()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.Adam(0.01), comm, bucket_mib=0.0002
    ).setup(net)
    iterator = ShardedIterator(samples(22), 8 // comm.size, comm, seed=7)
    updater = MultiNodeUpdater(iterator, optimizer, comm, mean_observations=mean)
    trainer = training.Trainer(updater, (4, "epoch"), out=out)
    shard = scatter_dataset(samples(13), comm)
    test = SerialIterator(shard, 4, repeat=False, shuffle=False)
    trainer.extend(create_multi_node_evaluator(extensions.Evaluator(test, net), comm))
    trainer.extend(extensions.ExponentialShift("alpha", 0.5))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(["epoch", "main/loss"]))
        trainer.extend(extensions.ProgressBar(update_interval=1))
    trainer.run()
    return weights(net), optimizer.alpha, updater.epoch, updater.iteration, optimizer.epoch


# 22 samples in steps of 8: epochs end in the middle of a batch.
@pytest.mark.parametrize("world", ["shm-2", "threads-4", pytest.param("mpi", marks=needs("mpich"))])
def test_a_trainer_reports_what_one_process_does(ranks: Run, world: str, tmp_path: Path) -> None:
    expected, log = trained_alone(tmp_path / "alone")
    out = str(tmp_path / "together")
    if world == "mpi":
        with RankPool(2, "mpi", timeout=60.0, mpiexec=launch_of("mpich")) as pool:
            found = pool.run(trained, out)
    else:
        found = ranks(world, trained, out)
    for net, *others in found:
        assert others == [0.01 * 0.5**11, 4, 11, 4]
        for name, array in expected.items():
            np.testing.assert_allclose(net[name], array, rtol=1e-9, atol=1e-12)
    together = json.loads((tmp_path / "together" / "log").read_text())
    assert len(together) == len(log) == 4
    for mine, theirs in zip(together, log, strict=True):
        for name in ("main/loss", "validation/main/loss", "validation/main/accuracy", "iteration"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6), name


def test_observations_are_this_ranks_unless_asked_for(ranks: Run, tmp_path: Path) -> None:
    for mean in (True, False):
        values = ranks("shm-2", observed, mean)
        assert (values[0] == values[1]) is mean


def observed(comm: Any, mean: bool) -> float:
    net = model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(net)
    iterator = ShardedIterator(samples(22), 4, comm)
    updater = MultiNodeUpdater(iterator, optimizer, comm, mean_observations=mean)
    trainer = training.Trainer(updater, (1, "iteration"))
    with trainer.reporter.scope(trainer.observation):
        updater.update()
    return float(chainer.as_array(trainer.observation["main/loss"]))


def test_shards_of_different_lengths_are_refused(ranks: Run) -> None:
    for text in ranks("shm-2", uneven):
        assert "rank 1: 11 samples, batches of 4; rank 0: 12 samples, batches of 4" in text
        assert "use a ShardedIterator" in text


def uneven(comm: Any) -> str:
    net = model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(net)
    shard = scatter_dataset(samples(23), comm)
    with pytest.raises(MismatchError) as caught:
        MultiNodeUpdater(SerialIterator(shard, 4), optimizer, comm)
    padded = scatter_dataset(samples(23), comm, padded=True)
    MultiNodeUpdater(SerialIterator(padded, 4), optimizer, comm).update()
    return str(caught.value)


def test_an_optimizer_that_steps_alone_is_refused() -> None:
    with collective.init() as comm:
        optimizer = chainer.optimizers.SGD().setup(model())
        with pytest.raises(InvalidArgumentError, match="'main' is a SGD that steps by itself"):
            MultiNodeUpdater(SerialIterator(samples(4), 2), optimizer, comm)
