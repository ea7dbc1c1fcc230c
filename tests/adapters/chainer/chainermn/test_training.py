"""ChainerMN's training tools (its unmodified code) over our transports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.chainermn")

import chainer
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions

from collective.errors import PeerFailedError
from collective.testing import RanksFailedError
from tests.support.chainer_ranks import EVERYWHERE, FEW, QUIETLY, as_chainermn, on, run

pytestmark = QUIETLY


def examples(count: int = 48) -> Any:
    rng = np.random.RandomState(5)
    x = rng.randn(count, 6)
    y = (x @ rng.randn(6, 3)).argmax(axis=1).astype(np.int32)
    return chainer.datasets.TupleDataset(x, y)


def classifier(seed: int) -> Any:
    """Return a small network whose weights depend only on the seed, also if ranks are threads."""
    rng = np.random.RandomState(seed)
    with chainer.using_config("dtype", np.float64):
        net = chainer.Sequential(chainer.links.Linear(6, 8), chainer.functions.tanh,
                                 chainer.links.Linear(8, 3))  # fmt: skip
    for _, param in sorted(net.namedparams()):
        param.array = rng.randn(*param.shape) / 3
    return chainer.links.Classifier(net)


def weights(model: Any) -> Any:
    return np.concatenate([param.array.ravel() for _, param in sorted(model.namedparams())])


def trained_alone(steps: int, batch: int, size: int, optimizer: Any) -> Any:
    """Return the weights after steps on the union of all ranks' batches."""
    model = classifier(0)
    optimizer.setup(model)
    data = examples()
    share = len(data) // size
    for step in range(steps):
        start = step * batch % share
        chosen = [data[rank * share + start + k] for rank in range(size) for k in range(batch)]
        optimizer.update(model, *chainer.dataset.concat_examples(chosen))
    return weights(model)


@on(*EVERYWHERE, chainermn=True)
def test_training_on_shards_equals_training_on_one_rank(comm: Any) -> None:
    # The first update only copies rank 0's weights to all ranks.
    model = classifier(comm.rank)
    data = chainermn.scatter_dataset(examples() if comm.rank == 0 else None, comm)
    assert len(data) == 48 // comm.size
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(0.05), comm)
    optimizer.setup(model)
    model.cleargrads()
    optimizer.update()
    iterator = chainer.iterators.SerialIterator(data, 4, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer)
    for _ in range(6):
        updater.update()
    expected = trained_alone(6, 4, comm.size, chainer.optimizers.Adam(0.05))
    np.testing.assert_allclose(weights(model), expected, rtol=1e-9)
    for other in comm.allgather(weights(model)):
        assert np.array_equal(other, weights(model))


@on(*EVERYWHERE, chainermn=True)
def test_scatter_dataset_distributes_all_examples(comm: Any) -> None:
    data = list(range(10 * comm.size + 1))
    shard = chainermn.scatter_dataset(data if comm.rank == 0 else None, comm, shuffle=True, seed=1)
    every = comm.allreduce_obj(list(shard))
    assert set(every) == set(data)
    assert len(shard) == 11
    root = comm.size - 1
    exact = chainermn.scatter_dataset(
        data if comm.rank == root else None, comm, root=root, force_equal_length=False
    )
    assert sorted(comm.allreduce_obj(list(exact))) == data
    begin, end = chainermn.scatter_index(len(data), comm, force_equal_length=False)
    assert sorted(comm.allreduce_obj(data[begin:end])) == data
    assert list(chainermn.datasets.create_empty_dataset(shard)) == [()] * len(shard)


@on(*EVERYWHERE, chainermn=True)
def test_multi_node_iterator_gives_all_ranks_same_batches(comm: Any) -> None:
    pairs = [(np.full(2, k, "f"), np.int32(k)) for k in range(6)]
    numbers = np.arange(6, dtype="f")
    for data in (pairs, numbers):
        mine = chainer.iterators.SerialIterator(data, 2, shuffle=True, repeat=False)
        iterator = chainermn.iterators.create_multi_node_iterator(mine, comm, rank_master=1)
        count = 0
        for batch in iterator:
            count += len(batch)
            values = [float(np.ravel(item[0] if data is pairs else item)[0]) for item in batch]
            assert comm.allreduce_obj([values]) == [values] * comm.size
        assert count == 6
        assert iterator.is_new_epoch
    mine = chainer.iterators.SerialIterator(np.arange(20), 5, order_sampler=None, shuffle=True)
    iterator = chainermn.iterators.create_synchronized_iterator(mine, comm)
    for _ in range(6):
        batch = [int(item) for item in iterator.next()]
        assert comm.allreduce_obj([batch]) == [batch] * comm.size


class Generic(chainermn.extensions.GenericMultiNodeEvaluator):  # type: ignore[misc]
    """An evaluator that collects each rank's results."""

    def calc_local(self, x: Any) -> Any:
        return [float(value) for value in x * 2]


@on(*FEW, chainermn=True)
def test_multi_node_evaluator_covers_all_shards(comm: Any) -> None:
    model = classifier(0)
    data = examples()
    shard = chainermn.scatter_dataset(data, comm)
    iterator = chainer.iterators.SerialIterator(shard, 6, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(extensions.Evaluator(iterator, model), comm)
    report = evaluator()
    with chainer.using_config("train", False):
        x, y = chainer.dataset.concat_examples(data)
        loss = float(model(x, y).array)
    assert report["main/accuracy"] == pytest.approx(float(model.accuracy.array))
    assert report["main/loss"] == pytest.approx(loss)
    values = [comm.allreduce_obj([value]) for _, value in sorted(report.items())]
    assert all(len(set(map(float, column))) == 1 for column in values)
    # Each rank has a different number of batches.
    uneven = np.arange(3 * comm.rank + 1, dtype="f")
    iterator = chainer.iterators.SerialIterator(uneven, 2, repeat=False, shuffle=False)
    result = Generic(comm, iterator, model)(None)
    if comm.rank == 0:
        every = [2.0 * k for rank in range(comm.size) for k in range(3 * rank + 1)]
        assert sorted(value for part in result for value in part) == sorted(every)
    else:
        assert result is None


def make_trainer(comm: Any, out: Path, epochs: int) -> tuple[Any, Any, Any]:
    model = classifier(comm.rank)
    data = chainermn.scatter_dataset(examples() if comm.rank == 0 else None, comm)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm
    ).setup(model)
    iterator = chainer.iterators.SerialIterator(data, 4, shuffle=False)
    updater = training.StandardUpdater(iterator, optimizer)
    return training.Trainer(updater, (epochs, "epoch"), str(out)), model, optimizer


@on(*FEW, chainermn=True)
def test_trainer_extensions_aggregate_over_ranks(comm: Any, tmp_path: Path) -> None:
    trainer, model, _ = make_trainer(comm, tmp_path / str(comm.rank), 3)
    test = chainermn.scatter_dataset(examples() if comm.rank == 0 else None, comm)
    iterator = chainer.iterators.SerialIterator(test, 6, repeat=False, shuffle=False)
    evaluator = chainermn.create_multi_node_evaluator(extensions.Evaluator(iterator, model), comm)
    trainer.extend(evaluator)
    model.running = np.full(2, comm.rank, "f")
    model.register_persistent("running")
    trainer.extend(chainermn.extensions.AllreducePersistent(model, comm))
    trainer.extend(chainermn.extensions.ObservationAggregator(comm, "main/loss", "all/loss"))
    log = extensions.LogReport(["all/loss", "main/loss", "validation/main/accuracy"])
    trainer.extend(log)
    trainer.run()
    entries = log.log
    assert len(entries) == 3
    every = comm.allreduce_obj([entries])
    for epoch in range(3):
        losses = [entry[epoch]["all/loss"] for entry in every]
        assert losses == pytest.approx([losses[0]] * comm.size)
        assert losses[0] == pytest.approx(np.mean([entry[epoch]["main/loss"] for entry in every]))
        assert len({entry[epoch]["validation/main/accuracy"] for entry in every}) == 1
    assert (model.running == (comm.size - 1) / 2).all()
    assert entries[-1]["all/loss"] < entries[0]["all/loss"]


@on(*FEW, chainermn=True)
def test_early_stopping_ends_training_on_all_ranks_at_once(comm: Any, tmp_path: Path) -> None:
    trigger = chainermn.extensions.MultiNodeEarlyStoppingTrigger(
        comm, check_trigger=(1, "epoch"), monitor="main/loss", patience=1, mode="max",
        max_trigger=(9, "epoch"),
    )  # fmt: skip
    updater = make_trainer(comm, tmp_path / str(comm.rank), 1)[0].updater
    trainer = training.Trainer(updater, trigger, str(tmp_path))
    trainer.run()
    # The loss falls, which counts as getting worse here.
    assert comm.allreduce_obj([trainer.updater.epoch]) == [2] * comm.size


@on(*FEW, chainermn=True)
def test_multi_node_snapshot_resumes_training(comm: Any, tmp_path: Path) -> None:
    def snapshots() -> Any:
        kept = extensions.snapshot(autoload=True)
        return chainermn.extensions.multi_node_snapshot(comm, kept, [[0], range(1, comm.size)])

    trainer, model, _ = make_trainer(comm, tmp_path, 2)
    trainer.extend(snapshots(), trigger=(1, "epoch"))
    trainer.run()
    last = trainer.updater.iteration
    comm.allreduce_obj(0)  # wait until all ranks have written their files
    assert sorted(os.listdir(tmp_path)) == sorted(
        f"snapshot_iter_{last // 2 * epoch}.{rank}" for epoch in (1, 2) for rank in (0, 1)
    )
    again, copy, _ = make_trainer(comm, tmp_path, 2)
    again.extend(snapshots(), trigger=(1, "epoch"))
    again.run()  # resumes at the end, so no further iteration runs
    assert again.updater.iteration == last
    assert np.array_equal(weights(copy), weights(model))


@on(*FEW, chainermn=True)
def test_multi_node_checkpointer_resumes_from_last_common_iteration(
    comm: Any, tmp_path: Path
) -> None:
    updater = make_trainer(comm, tmp_path, 2)[0].updater
    keeper = chainermn.create_multi_node_checkpointer("run", comm, path=str(tmp_path))
    for step in range(8):
        updater.update()
        if step % 2:
            keeper.save(updater, updater.iteration)
    comm.allreduce_obj(0)
    if comm.rank == 1:  # if one rank has lost its latest checkpoint, all ranks use the previous one
        (tmp_path / "run.1.8").unlink()
    comm.allreduce_obj(0)
    again, copy, optimizer = make_trainer(comm, tmp_path, 2)
    resumed = chainermn.create_multi_node_checkpointer("run", comm, path=str(tmp_path))
    resumed.maybe_load(again.updater, optimizer)
    assert again.updater.iteration == 6
    for other in comm.allgather(weights(copy)):
        assert np.array_equal(other, weights(copy))
    comm.allreduce_obj(0)
    resumed.finalize()
    keeper.finalize()


def raise_in_a_step(comm: Any, tmp_path: Path) -> None:
    trainer, _, _ = make_trainer(comm, tmp_path / str(comm.rank), 3)

    @training.make_extension(trigger=(3, "iteration"))
    def fail(trainer: Any) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("in an extension of rank 1")

    trainer.extend(fail)
    if comm.rank == 1:
        trainer.run()
    with pytest.raises(PeerFailedError, match="in an extension of rank 1"):
        trainer.run()


def test_trainer_error_on_rank_ends_trainers_of_other_ranks(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="in an extension of rank 1") as caught:
        run("shm-4", as_chainermn, raise_in_a_step, tmp_path)
    assert sorted(caught.value.errors) == [1]
