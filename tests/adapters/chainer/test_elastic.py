"""Chainer training that continues after ranks are lost: its weights and its samples."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.elastic")

import chainer
import chainer.functions as F
import chainer.links as L

from collective import elastic
from collective.adapters.chainer import (
    MultiNodeUpdater,
    ShardedIterator,
    SyncBatchNormalization,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
)
from collective.errors import InvalidArgumentError, RankError
from tests.support.chainer_ranks import on, run

SAMPLES, BATCH, STEPS = 96, 4, 20
#: Rank 2 is lost in step 2, and rank 0 in step 9, in the second epoch.
LOSSES = {2: 2, 0: 9}


def made() -> tuple[Any, np.ndarray, np.ndarray]:
    drawn = np.random.RandomState(3)
    initial = chainer.initializers.LeCunNormal(rng=drawn)
    link = chainer.Sequential(
        L.Linear(8, 16, initialW=initial), F.tanh, L.Linear(16, 3, initialW=initial)
    )
    return link, drawn.rand(SAMPLES, 8).astype("f"), drawn.randint(0, 3, SAMPLES).astype("i")


def set_up(link: Any, comm: Any) -> Any:
    def in_rank_order(bucket):
        array = bucket.array
        inner = optimizer.comm
        return inner.all_reduce(array, op="avg", out=array, order="rank", async_op=True)

    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, reduce=in_rank_order
    )
    return optimizer.setup(link)


def step(link: Any, optimizer: Any, inputs: np.ndarray, targets: np.ndarray) -> None:
    optimizer.update(lambda: F.softmax_cross_entropy(link(inputs), targets))


def outcome(link: Any) -> bytes:
    arrays = [(p.array, p.update_rule.state["v"]) for _, p in sorted(link.namedparams())]
    return b"".join(array.tobytes() for pair in arrays for array in pair)


def elastically(comm) -> Any:
    origin = comm.rank
    link, inputs, targets = made()
    optimizer = set_up(link, comm)
    iterator = ShardedIterator(range(SAMPLES), BATCH, comm, seed=1)
    state = elastic.State(comm, model=link, optimizer=optimizer, iterator=iterator, step=0)
    taken = []
    for generation in elastic.generations(comm, state):
        with generation as comm:
            del taken[state.step :]  # drop the batch of a step that was undone
            while state.step < STEPS:
                epoch = iterator.epoch
                batch = iterator.next()
                if LOSSES.get(origin) == state.step:
                    comm.close()
                    return taken, b""
                step(link, optimizer, inputs[batch], targets[batch])
                taken.append((epoch, batch))
                state.step += 1
                state.commit()
    return taken, outcome(link)


def by_hand(comm) -> bytes:
    """Run the same steps over fixed groups of equal sizes, and compute each batch's indices."""
    link, inputs, targets = made()
    momenta = {name: np.zeros_like(p.array) for name, p in link.namedparams()}
    orders = [np.random.default_rng((1, epoch)).permutation(SAMPLES) for epoch in range(3)]
    samples, at, begun = np.concatenate(orders), 0, 0
    for members, stop in (([0, 1, 2], 2), ([0, 1], 9), ([1], STEPS)):
        if comm.rank not in members:
            break
        group = comm.group(members)
        optimizer = set_up(link, group)
        for name, parameter in link.namedparams():
            parameter.update_rule._state = {"v": momenta[name].copy()}
        for _ in range(begun, stop):
            wide = samples[at : at + BATCH * len(members)]
            mine = wide[members.index(comm.rank) :: len(members)]
            step(link, optimizer, inputs[mine], targets[mine])
            at += len(wide)
        momenta = {name: p.update_rule.state["v"].copy() for name, p in link.namedparams()}
        begun = stop
    comm.barrier()  # ranks that have finished wait here until the other ranks have finished
    return outcome(link) if comm.rank in members else b""


def test_elastic_loop_equals_fixed_groups_and_covers_every_sample():
    results, expected = run("threads-3", elastically), run("threads-3", by_hand)
    assert [bytes_ for _, bytes_ in results] == expected
    assert expected[1] != b""
    counted = collections.Counter(
        int(index)
        for taken, _ in results
        for epoch, batch in taken
        for index in batch
        if epoch == 0
    )
    assert set(counted) == set(range(SAMPLES))


class Gone(Exception):
    """An error that ends a rank which the other ranks then count as lost."""


def with_a_trainer(comm, folder: str) -> Any:
    origin = comm.rank
    link, inputs, targets = made()
    samples = chainer.datasets.TupleDataset(inputs, targets)

    def loss_of(inputs, targets):
        loss = F.softmax_cross_entropy(link(inputs), targets)
        chainer.report({"loss": loss}, link)
        if chainer.config.enable_backprop and LOSSES.get(origin) == updater.iteration:
            updater.comm.close()
            raise Gone
        return loss

    def commit(trainer):
        state.commit()

    updater = MultiNodeUpdater(
        ShardedIterator(samples, BATCH, comm, seed=1), set_up(link, comm), comm,
        loss_func=loss_of, mean_observations=True,
    )  # fmt: skip
    trainer = chainer.training.Trainer(updater, (STEPS, "iteration"), folder)
    rest = ShardedIterator(samples, 7, comm, repeat=False)
    evaluator = chainer.training.extensions.Evaluator(rest, link, eval_func=loss_of)
    trainer.extend(create_multi_node_evaluator(evaluator, comm), trigger=(5, "iteration"))
    log = chainer.training.extensions.LogReport(trigger=(1, "iteration"), log_name=None)
    trainer.extend(log)
    trainer.extend(commit, trigger=(1, "iteration"), priority=-1000)
    state = elastic.State(comm, trainer=trainer)
    try:
        for generation in elastic.generations(comm, state):
            with generation:
                trainer.run(show_loop_exception_msg=False)
    except Gone:
        return b""
    last = log.log[-1]
    with chainer.no_backprop_mode():
        expected = F.softmax_cross_entropy(link(inputs), targets).item()
    assert [entry["iteration"] for entry in log.log] == list(range(1, STEPS + 1))
    assert last["validation/main/loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.elapsed_time >= last["elapsed_time"] > log.log[0]["elapsed_time"] > 0
    return outcome(link)


def test_elastic_trainer_equals_manual_loop(tmp_path: Path):
    assert run("threads-3", with_a_trainer, str(tmp_path)) == run("threads-3", by_hand)


@on("threads-3")
def test_finished_trainer_runs_again_after_restore(comm, tmp_path: Path):
    """Check that the second run starts from the state before the first step."""
    link, inputs, targets = made()
    iterator = ShardedIterator(chainer.datasets.TupleDataset(inputs, targets), 32, comm)
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(link)

    def loss_of(inputs, targets):
        chainer.report({"loss": F.sum(link(inputs))}, link)
        return F.softmax_cross_entropy(link(inputs), targets)

    updater = MultiNodeUpdater(iterator, optimizer, comm, loss_func=loss_of)
    trainer = chainer.training.Trainer(updater, (2, "epoch"), str(tmp_path))
    log = chainer.training.extensions.LogReport(trigger=(1, "epoch"), log_name=None)
    trainer.extend(log)
    state = elastic.State(comm, trainer=trainer)
    runs = []
    for _ in range(2):
        trainer.run()
        entries = [[entry["epoch"], entry["iteration"], entry["main/loss"]] for entry in log.log]
        runs.append([entries, optimizer.t, b"".join(p.array.tobytes() for p in link.params())])
        state.restore()
    assert len(runs[0][0]) == 2
    assert runs[0] == runs[1]


@on("threads-1")
def test_state_of_unknown_updater_raises_invalid_argument_error(comm):
    class Updater(chainer.training.Updater):
        def get_all_optimizers(self):
            return {}

        def connect_trainer(self, trainer):
            pass

    with pytest.raises(InvalidArgumentError, match="expected a StandardUpdater"):
        elastic.State(comm, trainer=chainer.training.Trainer(Updater()))


@pytest.mark.parametrize("consumed", [0, 7, 24])
def test_reshard_distributes_rest_of_epoch(consumed: int):
    order = np.random.default_rng((5, 0)).permutation(25)
    taken: list[int] = []
    for rank in range(3):
        iterator = ShardedIterator(range(25), 3, (rank, 4), seed=5, repeat=False)
        iterator.reshard((rank, 3), consumed)
        taken += [index for batch in iterator for index in batch]
    assert sorted(taken) == sorted(order[consumed:])


@pytest.mark.parametrize(
    ("where", "error"), [(((3, 3), 0), RankError), (((0, 3), 25), InvalidArgumentError)]
)
def test_reshard_to_bad_position_raises(where: Any, error: type[Exception]):
    with pytest.raises(error):
        ShardedIterator(range(25), 3, (0, 4)).reshard(*where)


@on("threads-1")
def test_restore_brings_back_exact_optimizer_state(comm):
    """Check restores before the first step, when the optimizer's rules have no state, and later."""
    link, inputs, targets = made()
    optimizer = chainer.optimizers.Adam()
    optimizer.setup(link)
    state = elastic.State(comm, model=link, optimizer=optimizer)

    def steps() -> bytes:
        for _ in range(2):
            step(link, optimizer, inputs, targets)
            optimizer.hyperparam.alpha *= 0.5
        return b"".join(p.array.tobytes() for _, p in sorted(link.namedparams()))

    fresh = steps()
    state.restore()
    assert steps() == fresh
    state.commit()
    later = steps()
    for _ in range(2):  # if restore() shared its copy, the first round would modify that copy
        state.restore()
        assert steps() == later != fresh


@on("threads-1")
def test_restore_brings_back_scales_rates_and_wide_parameters(comm):
    """Check what Chainer's own snapshots leave out."""
    with chainer.using_config("dtype", np.float16):
        link = L.Linear(8, 3, initialW=chainer.initializers.One())
    optimizer = chainer.optimizers.MomentumSGD(0.01).setup(link)
    optimizer.use_fp32_update()
    optimizer.loss_scaling(interval=2)
    rates = link.W.update_rule.hyperparam
    rates.lr = 1e-4
    state = elastic.State(comm, model=link, optimizer=optimizer)
    inputs, targets = np.linspace(0, 1, 16).reshape(2, 8).astype("e"), np.array([0, 2], "i")

    def steps() -> tuple[bytes, float]:
        for _ in range(3):
            step(link, optimizer, inputs, targets)
            rates.lr *= 0.5
        return link.W.update_rule._fp32_param.array.tobytes(), optimizer._loss_scale

    steps()
    state.commit()
    later = steps()
    state.restore()
    assert steps() == later


@on("threads-1")
def test_restore_brings_back_counts_in_attributes_of_rules(comm):
    link, inputs, targets = made()
    optimizer = chainer.optimizers.MSVAG().setup(link)
    state = elastic.State(comm, model=link, optimizer=optimizer)

    def outcome_of_steps() -> bytes:
        for _ in range(2):
            step(link, optimizer, inputs, targets)
        return b"".join(p.array.tobytes() for _, p in sorted(link.namedparams()))

    fresh = outcome_of_steps()
    state.restore()
    assert outcome_of_steps() == fresh


@on("threads-2")
def test_joined_rank_gets_the_dynamic_loss_scale(comm):
    link, inputs, targets = made()
    optimizer = chainer.optimizers.SGD().setup(link)
    optimizer.loss_scaling(interval=2)
    if comm.rank == 0:
        step(link, optimizer, inputs, targets)
    state = elastic.State(comm, model=link, optimizer=optimizer)
    state.sync(comm)
    assert optimizer._loss_scale == 2.0


@on("threads-3")
def test_optimizer_rebind_continues_over_other_ranks(comm):
    link = chainer.Sequential(L.Linear(2, 2, initialW=1), SyncBatchNormalization(2, comm))
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(link)
    group = comm.group([0, 2] if comm.rank != 1 else [1])
    optimizer.rebind(group)
    x = np.array([[1, 0], [0, 1], [1, 1]], "f") * (comm.rank + 1)
    optimizer.update(lambda: F.sum(link(x) ** 2))
    assert link[1].comm is group
    sums = [float(p.grad.sum()) for _, p in sorted(link.namedparams())]
    first, alone, last = comm.all_gather_object(sums)
    assert first == last != alone


@on("threads-1")
def test_state_with_uninitialised_parameters_raises(comm):
    with pytest.raises(InvalidArgumentError, match=r"/W .*input sizes"):
        elastic.State(comm, model=L.Linear(None, 3))
