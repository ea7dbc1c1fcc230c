"""Replicas on several devices of one process: the updater, and a loop without a Trainer."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.parallel_updater")

import chainer
import chainer.functions as F
import chainer.links as L

from collective.adapters.chainer import ParallelUpdater, Replicas
from collective.errors import InvalidArgumentError
from tests.support.chainer_models import Model, assert_close, samples, weights


class Net(Model):
    def __init__(self, lazy: bool = False) -> None:
        super().__init__()
        if lazy:
            del self.first, self.last
            with self.init_scope(), chainer.using_config("dtype", np.dtype("f8")):
                self.first, self.last = L.Linear(None, 8), L.Linear(None, 2)
        self.threads: set[int] = set()

    def forward(self, x: Any, y: Any) -> Any:
        self.threads.add(threading.get_ident())
        assert chainer.config.train == "as here"
        loss = F.mean_squared_error(super().forward(x), y)
        chainer.report({"loss": loss}, self)
        return loss


@pytest.fixture(autouse=True)
def train_mode() -> Any:
    # This is not the default value, so the replicas' threads must take it from the caller.
    with chainer.using_config("train", "as here"):
        yield


def converted(replicas: Replicas, count: int = 8) -> list[Any]:
    """Return the first samples as the replicas' batches."""
    parts = replicas.split(samples(32)[:count])
    return [chainer.dataset.concat_examples(part) for part in parts]


def assert_same_gradients(model: Any, other: Any) -> None:
    for (_, a), (_, b) in zip(model.namedparams(), other.namedparams(), strict=True):
        np.testing.assert_allclose(a.grad, b.grad, rtol=1e-12, atol=1e-15)


def trained(make: Any, steps: int = 5, batch: int = 7, **hooks: Any) -> tuple[Any, Any]:
    """Train with an updater; return its weights, and the Trainer."""
    model = Net()
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
    iterator = chainer.iterators.SerialIterator(samples(32), batch, shuffle=False)
    updater = make(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (steps, "iteration"), out=hooks["out"])
    trainer.run()
    return weights(model), trainer


# With 7 samples a batch and 3 devices the parts differ in length; with 32 ÷ 7 some batches wrap.
@pytest.mark.parametrize("devices", [["@numpy"], ["@numpy"] * 2, ["@numpy"] * 3])
def test_parallel_updater_equals_one_device_on_whole_batch(
    devices: list[str], tmp_path: Any
) -> None:
    expected, _ = trained(chainer.training.updaters.StandardUpdater, out=tmp_path)
    result, trainer = trained(lambda i, o: ParallelUpdater(i, o, devices), out=tmp_path)
    assert_close(result, expected)
    links = trainer.updater.replicas.links
    assert len({id(link) for link in links}) == len(devices)
    assert len(set().union(*(link.threads for link in links))) >= min(2, len(devices))
    names = ["main", "1", "2"][: len(devices)]
    assert {f"{name}/loss" for name in names} == set(trainer.observation)


def test_parallel_updater_with_sum_equals_chainer(tmp_path: Any) -> None:
    devices = {"main": "@numpy", "second": "@numpy"}

    def chainer_updater(iterator: Any, optimizer: Any) -> Any:
        resolved = {name: chainer.get_device(device) for name, device in devices.items()}
        return chainer.training.updaters.ParallelUpdater(iterator, optimizer, devices=resolved)

    expected, _ = trained(chainer_updater, batch=8, out=tmp_path)
    result, trainer = trained(
        lambda i, o: ParallelUpdater(i, o, devices, op="sum"), batch=8, out=tmp_path
    )
    assert_close(result, expected)
    assert set(trainer.observation) == {"main/loss", "second/loss"}


def test_replicas_in_manual_loop_equal_one_model() -> None:
    model, alone = Net(), Net()
    optimizer = chainer.optimizers.Adam(0.01).setup(model)
    reference = chainer.optimizers.Adam(0.01).setup(alone)
    replicas = Replicas(model, ["@numpy", "@numpy", "@numpy"])
    data = samples(32)
    for start in range(0, 32, 8):
        batch = data[start : start + 8]
        parts = [chainer.dataset.concat_examples(part) for part in replicas.split(batch)]
        losses = replicas.backward(parts)
        optimizer.update()
        replicas.copy_params()
        expected = alone(*chainer.dataset.concat_examples(batch)).array
        counts = [3, 3, 2]
        mean = sum(n * loss.array for n, loss in zip(counts, losses, strict=True)) / 8
        np.testing.assert_allclose(mean, expected, rtol=1e-12)
        reference.update(alone, *chainer.dataset.concat_examples(batch))
    replicas.close()
    for link in replicas.links:
        assert_close(weights(link), weights(alone))


def test_replicas_of_lazy_link_copy_its_initial_values() -> None:
    model = Net(lazy=True)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    replicas = Replicas(model, ["@numpy", "@numpy"])
    with chainer.using_config("dtype", np.dtype("f8")):
        replicas.backward(converted(replicas))
    before = weights(model)
    assert_close(weights(replicas.links[1]), before)
    alone = Net(lazy=True)
    batch = chainer.dataset.concat_examples(samples(32)[:8])
    for name, p in alone.namedparams():
        p.initialize(before[name].shape)
        p.array = before[name]
    alone.cleargrads()
    alone(*batch).backward()
    assert_same_gradients(model, alone)
    optimizer.update()
    replicas.close()


def test_replicas_divide_gradients_by_loss_scale() -> None:
    results = []
    for scale in (None, 64.0):
        model = Net()
        optimizer = chainer.optimizers.SGD(0.1).setup(model)
        replicas = Replicas(model, ["@numpy"] * 2)
        replicas.backward(converted(replicas), loss_scale=scale)
        optimizer.update()
        replicas.close()
        results.append(weights(model))
    assert_close(*results)


def test_replica_error_is_raised_after_all_have_ended() -> None:
    replicas = Replicas(Net(), ["@numpy"] * 3)
    ended = []

    def loss_func(x: Any, y: Any) -> Any:
        if len(x) == 2:
            raise ValueError("on purpose")
        ended.append(len(x))
        return replicas.links[0](x, y)

    with pytest.raises(ValueError, match="on purpose"):
        replicas.backward(converted(replicas), loss_func=loss_func)
    assert ended == [3, 3]
    replicas.close()


def test_replicas_without_samples_contribute_no_gradient() -> None:
    model, alone = Net(), Net()
    replicas = Replicas(model, ["@numpy"] * 3)
    part = chainer.dataset.concat_examples(samples(32)[:1])
    losses = replicas.backward([part, None, None])
    assert losses[1:] == [None, None]
    alone.cleargrads()
    alone(*part).backward()
    assert_same_gradients(model, alone)
    replicas.close()


def test_replicas_with_bad_arguments_raise(tmp_path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"op is 'max' \(expected 'avg' or 'sum'"):
        Replicas(Net(), ["@numpy"], op="max")
    with pytest.raises(InvalidArgumentError, match="no devices"):
        Replicas(Net(), [])
    with pytest.raises(InvalidArgumentError, match="one must be 'main'"):
        trained(lambda i, o: ParallelUpdater(i, o, {"first": "@numpy"}), out=tmp_path)
    replicas = Replicas(Net(), ["@numpy"])
    with pytest.raises(InvalidArgumentError, match="2 batches for 1 replicas"):
        replicas.backward([None, None])
    with pytest.raises(InvalidArgumentError, match="no samples for the first"):
        replicas.backward([None])
    replicas.close()


@pytest.mark.parametrize("change", ["dtype", "shape", "added", "deleted"])
def test_link_that_changed_after_its_copies_were_made_is_refused_by_name(change: str) -> None:
    model = Net()
    replicas = Replicas(model, ["@numpy"] * 2)
    if change == "dtype":
        model.last.W.array = model.last.W.array.astype("f")
    elif change == "shape":
        model.last.W = chainer.Parameter(np.zeros((3, 8)))
    elif change == "deleted":
        del model.last.W
    else:
        with model.last.init_scope():
            model.last.W2 = chainer.Parameter(np.zeros(2))
    with pytest.raises(InvalidArgumentError, match="backward: /last/W"):
        replicas.backward(converted(replicas))
    replicas.close()
