"""The multi-node optimizer: gradients of all ranks, reduced during the backward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.optimizer")

import chainer
import chainer.functions as F
from chainer.functions.connection.linear import LinearGradWeight

from collective.adapters.chainer import create_multi_node_optimizer
from collective.errors import GradientError, InvalidArgumentError
from tests.support.chainer_models import (
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
from tests.support.chainer_ranks import on, run
from tests.support.selection import in_quick, in_whole

# -- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_mib", [25.0, 0.0002])
@pytest.mark.parametrize("way", ["lossfun", "backward", "plain"])
@pytest.mark.parametrize(
    "world", ["shm-2", "shm-4", in_whole("gloo-2"), in_quick("threads-2"), "threads-4"]
)
def test_optimizer_equals_one_process_on_joined_batch(
    world: str, bucket_mib: float, way: str
) -> None:
    results = run(world, training, "momentum", bucket_mib, way)
    assert_same(results)
    assert_close(results[0], trained_alone(5))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["adam", "weight decay", "clipping"])
def test_optimizer_hooks_receive_average_gradients(kind: str) -> None:
    results = run("shm-2", training, kind, 0.0002, "lossfun")
    assert_same(results)
    assert_close(results[0], trained_alone(5, kind))


@pytest.mark.quick
@on("shm-2", "threads-2")
def test_hooks_that_draw_random_numbers_draw_the_same_on_all_ranks(comm: Any) -> None:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1))
    optimizer.add_hook(chainer.optimizer_hooks.GradientNoise(0.3))
    noise = []
    optimizer.add_hook(lambda _: noise.append(np.random.rand()), "own", timing="post")
    for x, y in batches(2):
        optimizer.update(loss_of, model, x, y)
    assert_same(comm.all_gather_object(weights(model)))
    assert len(set(noise)) == 2
    assert comm.all_gather_object(noise) == [noise] * comm.size


def set_up(comm: Any, optimizer: Any, model: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return a model and the optimizer that trains it on all ranks."""
    model = model or Model()
    return model, create_multi_node_optimizer(optimizer, comm, **options).setup(model)


def first_batch(comm: Any) -> tuple[Any, ...]:
    """Return this rank's part of the first batch."""
    return tuple(shard(comm, array) for array in batches(1)[0])


def training(comm: Any, kind: str, bucket_mib: float, way: str) -> Any:
    # The seeds differ between ranks: the optimizer must copy rank 0's weights.
    model, optimizer = set_up(
        comm, optimizers()[kind], Model(seed=3 + comm.rank), bucket_mib=bucket_mib
    )
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
def test_equal_gradients_give_exact_results_of_one_process(world: str) -> None:
    # With 2 or 4 ranks, the average of equal numbers is exactly that number.
    results = run(world, training_on_equal_batches)
    expected = trained_alone(4, "adam", Model(dtype=np.float32), dtype=np.float32)
    assert_same([expected, *results])


def training_on_equal_batches(comm: Any) -> Any:
    adam, model = optimizers()["adam"], Model(dtype=np.float32)
    model, optimizer = set_up(comm, adam, model, bucket_mib=0.0002)
    for x, y in batches(4, dtype=np.float32):
        optimizer.update(loss_of, model, x, y)
    return weights(model)


@pytest.mark.quick
@on("shm-2")
def test_gradients_are_reduced_during_backward_pass(comm: Any) -> None:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1), bucket_mib=0.0002)
    launched: list[int] = []
    passes: list[int] = []
    x, y = first_batch(comm)
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
    # At least two buckets are in flight before the pass reaches the model's first function.
    assert passes[-2] >= 2
    # The last view is that of the ranks' notes.
    for (_, parameter), view in zip(optimizer._parameters, gradients.views[:-1], strict=True):
        assert parameter.grad is view


@pytest.mark.quick
@on("shm-2")
def test_dense_layer_gradients_are_computed_in_buckets(comm: Any) -> None:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1))
    shapes = []  # shapes of the gradients that are computed outside the buckets
    original = LinearGradWeight.forward

    def noting(node: Any, inputs: Any) -> Any:
        result = original(node, inputs)
        shapes.append(result[0].shape)
        return result

    LinearGradWeight.forward = noting
    try:
        optimizer.update(loss_of, model, *first_batch(comm))
    finally:
        LinearGradWeight.forward = original
    # The middle layer is used twice, so its gradient is the sum of two.
    assert shapes == [(8, 8)] * 2


# -- unused parameters and several passes ---------------------------------------------------------


class Branches(Model):
    """A model that uses its middle layer only if ``middle_too`` is true."""

    middle_too = True

    def forward(self, x: Any) -> Any:
        h = F.tanh(self.first(x))
        return self.last(F.tanh(self.middle(h)) if self.middle_too else h)


@pytest.mark.quick
def test_unused_parameters_contribute_zeros() -> None:
    results = run("shm-2", branches, None)
    assert_same(results)
    expected = {}
    for rank in range(2):
        model = Branches()
        model.middle_too = rank == 0
        x, y = (np.array_split(array, 2)[rank] for array in batches(1)[0])
        model.cleargrads()
        loss_of(model, x, y).backward()
        for name, p in model.namedparams():
            part = 0.0 if p.grad is None else p.grad / 2
            expected[name] = expected.get(name, 0.0) + part
    for name, p in Branches().namedparams():
        np.testing.assert_allclose(results[0][name], p.array - 0.5 * expected[name], atol=1e-12)


@pytest.mark.quick
@pytest.mark.parametrize("way", ["lossfun", "plain"])
def test_loss_scale_is_divided_out_of_unused_parameters(way: str) -> None:
    assert_close(run("shm-2", branches, 512.0, way)[1], run("shm-2", branches, None)[1], 1e-12)


def branches(comm: Any, scale: float | None, way: str = "lossfun") -> Any:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.5), Branches())
    model.middle_too = comm.rank == 0
    if scale is not None:
        optimizer.set_loss_scale(scale)
    if way == "lossfun":
        optimizer.update(loss_of, model, *first_batch(comm))
    else:
        model.cleargrads()
        loss_of(model, *first_batch(comm)).backward(loss_scale=scale)
        optimizer.update()
    return weights(model)


@pytest.mark.quick
def test_no_sync_accumulates_gradients() -> None:
    results = run("shm-2", accumulating)
    assert_same(results)
    model = Model()
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    for first in (0, 2):
        model.cleargrads()
        for x, y in batches(4)[first : first + 2]:
            loss_of(model, x, y).backward()
        optimizer.update()
    assert_close(results[0], weights(model))


def accumulating(comm: Any) -> Any:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1))
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


@pytest.mark.quick
@on("shm-2")
def test_gradients_added_after_reduction_are_reduced(comm: Any) -> None:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1))
    x, y = first_batch(comm)
    model.cleargrads()
    optimizer.backward(loss_of(model, x, y))
    loss_of(model, x, 2 * y).backward()
    optimizer.update()
    assert_same(comm.all_gather_object(weights(model)))


@pytest.mark.quick
@on("shm-2")
def test_reducing_with_second_backward_pass_raises_gradient_error(comm: Any) -> None:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1))
    x, y = batches(1)[0]
    model.cleargrads()

    def twice() -> None:
        with optimizer.reducing():
            loss_of(model, x, y).backward()
            loss_of(model, x, y).backward()

    with pytest.raises(GradientError, match="a second pass adds to it"):
        twice()
    optimizer.update(loss_of, model, x, y)  # the next step succeeds


@pytest.mark.quick
def test_two_models_train_in_turn() -> None:
    first, second = zip(*run("shm-2", two_models), strict=True)
    assert_same(list(first))
    assert_same(list(second))
    assert_close(first[0], trained_alone(3))


def two_models(comm: Any) -> Any:
    kind = chainer.optimizers.MomentumSGD
    models, wrapped = zip(
        *(set_up(comm, kind(0.1), Model(seed), bucket_mib=0.0002) for seed in (3, 4)), strict=True
    )
    for x, y in batches(3):
        x, y = shard(comm, x), shard(comm, y)
        # The second model's loss passes through the first model. The second optimizer must not
        # reduce the first model's gradients.
        wrapped[1].update(lambda x, y: loss_of(models[1], x, models[0](x)), x, y)
        wrapped[0].update(loss_of, models[0], x, y)
    return weights(models[0]), weights(models[1])
