# ruff: noqa: F811  # the fixture
"""The optimizer of several processes: gradients of all ranks, reduced beside the backward pass."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from collective.errors import GradientError, InvalidArgumentError
from tests.chainer_ranks import Run, ranks  # noqa: F401

if importlib.util.find_spec("chainer") is None:
    pytest.skip("chainer is not installed", allow_module_level=True)

from collective.adapters.chainer.optimizer import create_multi_node_optimizer
from tests.chainer_models import (
    HOOKS,
    Model,
    assert_close,
    assert_same,
    batches,
    loss_of,
    optimizers,
    shard,
    trained_alone,
    weights,
)

import chainer  # isort: skip  # by the adapter's leave
import chainer.functions as F  # isort: skip
from chainer.functions.connection.linear import LinearGradWeight  # isort: skip

WORLDS = ["shm-2", "shm-4", "gloo-2", "threads-2", "threads-4"]


# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_mib", [25.0, 0.0002])
@pytest.mark.parametrize("way", ["lossfun", "backward", "plain"])
@pytest.mark.parametrize("world", WORLDS)
def test_equals_one_process_on_the_joined_batch(
    ranks: Run, world: str, bucket_mib: float, way: str
) -> None:
    found = ranks(world, training, "momentum", bucket_mib, way)
    assert_same(found)
    assert_close(found[0], trained_alone(5))


@pytest.mark.parametrize("kind", ["adam", "weight decay", "clipping"])
def test_hooks_see_the_average(ranks: Run, kind: str) -> None:
    found = ranks("shm-2", training, kind, 0.0002, "lossfun")
    assert_same(found)
    assert_close(found[0], trained_alone(5, kind))


def training(comm: Any, kind: str, bucket_mib: float, way: str) -> Any:
    model = Model(seed=3 + comm.rank)  # rank 0's weights count
    optimizer = create_multi_node_optimizer(optimizers()[kind], comm, bucket_mib=bucket_mib)
    optimizer.setup(model)
    if kind in HOOKS:
        optimizer.add_hook(HOOKS[kind])
    for x, y in batches(5):
        mine = shard(comm, x), shard(comm, y)
        if way == "lossfun":
            optimizer.update(loss_of, model, *mine)
            continue
        loss = loss_of(model, *mine)
        model.cleargrads()
        if way == "backward":
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.update()
    assert optimizer.t == 5
    return weights(model)


@pytest.mark.parametrize("world", ["shm-2", "shm-4"])
def test_equal_gradients_leave_the_bits_of_one_process(ranks: Run, world: str) -> None:
    # Powers of two: the average of equal numbers is that number.
    found = ranks(world, training_on_equal_batches)
    expected = trained_alone(4, "adam", Model(dtype=np.float32), dtype=np.float32)
    assert_same([expected, *found])


def training_on_equal_batches(comm: Any) -> Any:
    model = Model(dtype=np.float32)
    optimizer = create_multi_node_optimizer(optimizers()["adam"], comm, bucket_mib=0.0002)
    optimizer.setup(model)
    for x, y in batches(4, dtype=np.float32):
        optimizer.update(loss_of, model, x, y)
    return weights(model)


def test_gradients_are_reduced_during_the_backward_pass(ranks: Run) -> None:
    ranks("shm-2", early)


def early(comm: Any) -> None:
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm, bucket_mib=0.0002)
    optimizer.setup(model)
    launched: list[int] = []
    passes: list[int] = []
    x, y = (shard(comm, each) for each in batches(1)[0])
    optimizer.update(loss_of, model, x, y)
    gradients = optimizer._gradients
    reduce = gradients.average

    def counting(bucket: Any) -> Any:
        launched.append(bucket.index)
        return reduce(bucket)

    class Hook(chainer.FunctionHook):
        def backward_postprocess(self, *_: Any) -> None:
            passes.append(len(launched))

    gradients._reduce = counting
    with Hook():
        optimizer.update(loss_of, model, x, y)
    assert launched == list(range(len(gradients.buckets)))
    assert len(launched) > 3
    # Most are on their way before the first function of the model is reached.
    assert passes[-2] >= 2
    for (_, parameter), view in zip(optimizer._parameters, gradients.views, strict=True):
        assert parameter.grad is view


def test_gradients_of_dense_layers_are_computed_in_their_buckets(ranks: Run) -> None:
    # The middle layer is used twice, so its gradient is the sum of two.
    assert ranks("shm-2", computed_elsewhere) == [[(8, 8), (8, 8)]] * 2


def computed_elsewhere(comm: Any) -> Any:
    """Return the shapes of dense layers' gradients in a step that are in memory of their own."""
    model, shapes = Model(), []
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    x, y = (shard(comm, each) for each in batches(1)[0])
    original = LinearGradWeight.forward

    def noting(node: Any, inputs: Any) -> Any:
        found = original(node, inputs)
        shapes.append(found[0].shape)
        return found

    LinearGradWeight.forward = noting
    try:
        optimizer.update(loss_of, model, x, y)
    finally:
        LinearGradWeight.forward = original
    return shapes


# -- what is used, and how often ------------------------------------------------------------------


class Branches(Model):
    """Uses its middle layer only where it is told to."""

    middle_too = True

    def forward(self, x: Any) -> Any:
        h = F.tanh(self.first(x))
        return self.last(F.tanh(self.middle(h)) if self.middle_too else h)


def test_unused_parameters_count_as_zeros(ranks: Run) -> None:
    found = ranks("shm-2", branches, None)
    assert_same(found)
    expected = {}
    for rank in range(2):
        model = Branches()
        model.middle_too = rank == 0
        x, y = (np.array_split(each, 2)[rank] for each in batches(1)[0])
        model.cleargrads()
        loss_of(model, x, y).backward()
        for name, p in model.namedparams():
            part = 0.0 if p.grad is None else p.grad / 2
            expected[name] = expected.get(name, 0.0) + part
    for name, p in Branches().namedparams():
        np.testing.assert_allclose(found[0][name], p.array - 0.5 * expected[name], atol=1e-12)


@pytest.mark.parametrize("way", ["lossfun", "plain"])
def test_the_loss_scale_is_divided_out_of_unused_parameters_too(ranks: Run, way: str) -> None:
    assert_close(ranks("shm-2", branches, 512.0, way)[1], ranks("shm-2", branches, None)[1], 1e-12)


def branches(comm: Any, scale: float | None, way: str = "lossfun") -> Any:
    model = Branches()
    model.middle_too = comm.rank == 0
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.5), comm).setup(model)
    if scale is not None:
        optimizer.set_loss_scale(scale)
    x, y = (shard(comm, each) for each in batches(1)[0])
    if way == "lossfun":
        optimizer.update(loss_of, model, x, y)
    else:
        model.cleargrads()
        loss_of(model, x, y).backward(loss_scale=scale)
        optimizer.update()
    return weights(model)


def test_gradients_accumulate_without_sync(ranks: Run) -> None:
    found = ranks("shm-2", accumulating)
    assert_same(found)
    model = Model()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    for first in (0, 2):
        model.cleargrads()
        for x, y in batches(4)[first : first + 2]:
            loss_of(model, x, y).backward()
        optimizer.update()
    assert_close(found[0], weights(model))


def accumulating(comm: Any) -> Any:
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    for first in (0, 2):
        model.cleargrads()
        (x, y), (x2, y2) = batches(4)[first : first + 2]
        with optimizer.no_sync():
            optimizer.backward(loss_of(model, shard(comm, x), shard(comm, y)))
            with pytest.raises(InvalidArgumentError, match=r"within no_sync\(\)"):
                optimizer.update()
        optimizer.backward(loss_of(model, shard(comm, x2), shard(comm, y2)))
        optimizer.update()
    return weights(model)


def test_what_is_added_after_the_reduction_is_reduced_too(ranks: Run) -> None:
    assert_same(ranks("shm-2", adding))


def adding(comm: Any) -> Any:
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    x, y = (shard(comm, each) for each in batches(1)[0])
    model.cleargrads()
    optimizer.backward(loss_of(model, x, y))
    loss_of(model, x, 2 * y).backward()
    optimizer.update()
    return weights(model)


def test_a_second_pass_within_reducing_is_refused(ranks: Run) -> None:
    ranks("shm-2", second_pass)


def second_pass(comm: Any) -> None:
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    x, y = batches(1)[0]
    model.cleargrads()

    def twice() -> None:
        with optimizer.reducing():
            loss_of(model, x, y).backward()
            loss_of(model, x, y).backward()

    with pytest.raises(GradientError, match="a second pass adds to it"):
        twice()
    optimizer.update(loss_of, model, x, y)  # the next step is as any other


def test_two_models_take_turns(ranks: Run) -> None:
    first, second = zip(*ranks("shm-2", two_models), strict=True)
    assert_same(list(first))
    assert_same(list(second))
    assert_close(first[0], trained_alone(3))


def two_models(comm: Any) -> Any:
    models = Model(3), Model(4)
    made = [
        create_multi_node_optimizer(chainer.optimizers.MomentumSGD(0.1), comm, bucket_mib=0.0002)
        for _ in models
    ]
    for optimizer, model in zip(made, models, strict=True):
        optimizer.setup(model)
    for x, y in batches(3):
        x, y = shard(comm, x), shard(comm, y)
        # The second one's loss goes through the first, whose gradients are not its business.
        made[1].update(lambda x, y: loss_of(models[1], x, models[0](x)), x, y)
        made[0].update(loss_of, models[0], x, y)
    return weights(models[0]), weights(models[1])
