# ruff: noqa: F811  # the fixture
"""The optimizer of several processes: equal replicas, its state, options, and what goes wrong."""

from __future__ import annotations

import importlib.util
import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective.errors import (
    CollectiveError,
    CommunicatorAbortedError,
    InvalidArgumentError,
    MismatchError,
)
from collective.testing import RanksFailedError, run_ranks
from collective.testing.checks_shrink import gather
from collective.training.compression import Cast
from tests.chainer_ranks import Run, ranks  # noqa: F401

if importlib.util.find_spec("chainer") is None:
    pytest.skip("chainer is not installed", allow_module_level=True)

from collective.adapters.chainer.optimizer import create_multi_node_optimizer
from collective.adapters.chainer.state import broadcast_state
from tests.chainer_models import (
    Model,
    assert_close,
    assert_same,
    batches,
    loss_of,
    shard,
    trained_alone,
    weights,
)
from tests.test_chainer_optimizer import WORLDS, training_on_equal_batches

import chainer  # isort: skip  # by the adapter's leave
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip
from chainer import _backprop, _backprop_utils  # isort: skip

# -- lazy parameters and the state ----------------------------------------------------------------


class Lazy(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(None, 5)
            self.norm = L.BatchNormalization(axis=0)
            self.last = L.Linear(None, 2)

    def forward(self, x: Any) -> Any:
        return self.last(F.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("world", WORLDS)
def test_lazy_parameters_get_rank_0_values_before_they_are_used(ranks: Run, world: str) -> None:
    found = ranks(world, lazy)
    assert_same([after for _, after in found])
    for name, array in found[0][0].items():
        assert (array == found[1][0][name]).all(), name
        if name.endswith("W"):
            assert (array != found[0][1][name]).any(), f"{name}: the first step was none"


def lazy(comm: Any) -> Any:
    if not comm.backend.startswith("threads"):  # threads share one generator
        np.random.seed(comm.rank)
    model = Lazy()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    x, y = (shard(comm, each) for each in batches(1, rows=16, dtype=np.float32)[0])
    loss = loss_of(model, x, y)
    before = weights(model)
    model.cleargrads()
    optimizer.backward(loss)
    optimizer.update()
    assert optimizer.t == 1
    return before, weights(model)


def test_what_rank_0_loads_goes_to_all_with_the_first_step(ranks: Run) -> None:
    found = ranks("shm-2", loaded, "lossfun")
    assert_same(found)


def test_what_some_ranks_load_is_an_error_where_it_comes_too_late(ranks: Run) -> None:
    for text in ranks("shm-2", loaded, "plain"):
        assert "rank(s) [1] are not rank 0's" in text


def loaded(comm: Any, way: str) -> Any:
    file = io.BytesIO()
    chainer.serializers.save_npz(file, Model(99))
    file.seek(0)
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    if comm.rank == 0:
        chainer.serializers.load_npz(file, model)
    x, y = (shard(comm, each) for each in batches(1)[0])
    if way == "lossfun":
        optimizer.update(loss_of, model, x, y)
        return weights(model)
    model.cleargrads()
    loss_of(model, x, y).backward()
    with pytest.raises(MismatchError) as caught:
        optimizer.update()
    return str(caught.value)


def test_persistent_values_come_from_rank_0(ranks: Run) -> None:
    assert ranks("shm-2", persistent) == [([2.5] * 4, 7)] * 2


def persistent(comm: Any) -> Any:
    link = L.BatchNormalization(4)
    if comm.rank == 0:
        link.avg_mean[...] = 2.5
        link.N = 7
    broadcast_state(link, comm)
    return link.avg_mean.tolist(), link.N


def test_links_that_differ_are_refused_on_all_ranks(ranks: Run) -> None:
    for text in ranks("shm-2", differing):
        assert "rank 1 has /W float32[3, 5], rank 0 /W float32[3, 4]" in text


def differing(comm: Any) -> str:
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
    with pytest.raises(MismatchError) as caught:
        optimizer.setup(L.Linear(4 + comm.rank, 3))
    return str(caught.value)


def test_the_state_is_the_bare_optimizers(ranks: Run) -> None:
    for written in ranks("shm-2", state_written):
        model = Model()
        bare = chainer.optimizers.Adam(0.01).setup(model)
        chainer.serializers.load_npz(io.BytesIO(written), bare)
        assert bare.t == 3
        assert set(chainer.serializers.npz.serialize(bare)) == set(np.load(io.BytesIO(written)))


def state_written(comm: Any) -> bytes:
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(0.01), comm).setup(model)
    for x, y in batches(3):
        optimizer.update(loss_of, model, x, y)
    file = io.BytesIO()
    chainer.serializers.save_npz(file, optimizer)
    return file.getvalue()


# -- options --------------------------------------------------------------------------------------


def test_compressed(ranks: Run) -> None:
    found = ranks("shm-2", compressed)
    assert_same(found)
    assert_close(found[0], trained_alone(3), 1e-2)


def compressed(comm: Any) -> Any:
    model = Model()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, reduce=Cast(comm.dup(), "float16")
    )
    optimizer.setup(model)
    for x, y in batches(3):
        optimizer.update(loss_of, model, shard(comm, x), shard(comm, y))
    return weights(model)


def test_half_precision_with_a_dynamic_loss_scale(ranks: Run) -> None:
    found = ranks("shm-2", half)
    assert_same([each for each, _ in found])
    assert found[0][1] == found[1][1]


def half(comm: Any) -> Any:
    model = Model(dtype=np.float16)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm).setup(model)
    optimizer.loss_scaling(interval=2)
    for step, (x, y) in enumerate(batches(5, dtype=np.float16)):
        if step == 3 and comm.rank == 1:  # too large for one rank alone
            y = np.full_like(y, np.inf)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.update(loss_of, model, x, y)
    return weights(model), optimizer._loss_scale


def test_bad_options() -> None:
    with collective.init() as comm:
        with pytest.raises(InvalidArgumentError, match="bucket_mib -1; a positive number"):
            create_multi_node_optimizer(chainer.optimizers.SGD(), comm, bucket_mib=-1)
        optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
        with pytest.raises(InvalidArgumentError, match="no initialised parameter"):
            optimizer.setup(chainer.Chain()).update()


def test_one_rank_trains_as_the_bare_optimizer() -> None:
    with collective.init() as comm:
        expected = trained_alone(4, "adam", Model(dtype=np.float32), dtype=np.float32)
        assert_same([training_on_equal_batches(comm), expected])


# -- failures -------------------------------------------------------------------------------------


def test_a_rank_that_fails_in_its_backward_pass(ranks: Run) -> None:
    text, error = ranks("shm-2", failing)
    assert text == "on purpose"
    assert "rank 0" in error


class Broken(chainer.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, gradients: Any) -> Any:
        raise RuntimeError("on purpose")


def failing(comm: Any) -> str:
    originals = _backprop._backprop_to_all, _backprop_utils.backprop_step
    model = Model()
    group = comm.dup()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), group, bucket_mib=0.0002)
    optimizer.setup(model)
    x, y = batches(1)[0]
    optimizer.update(loss_of, model, x, y)
    before = weights(model)

    def lossfun(x: Any, y: Any) -> Any:
        h = F.tanh(model.middle(F.tanh(model.first(x))))
        if comm.rank == 0:
            (h,) = Broken().apply((h,))
        return F.mean_squared_error(model.last(h), y)

    with pytest.raises((RuntimeError, CommunicatorAbortedError)) as caught, group:
        optimizer.update(lossfun, x, y)
    assert (_backprop._backprop_to_all, _backprop_utils.backprop_step) == originals
    assert_same([before, weights(model)])
    assert comm.rank == 0 or isinstance(caught.value, CollectiveError)
    return str(caught.value)


def test_a_rank_that_dies_in_its_backward_pass(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="rank 1"):
        run_ranks(2, dying, str(tmp_path), backend="shm", timeout=40.0)
    assert (tmp_path / "error").read_text().startswith("PeerLostError: all_reduce")


def dying(comm: Any, folder: str) -> None:
    originals = _backprop._backprop_to_all, _backprop_utils.backprop_step
    model = Model()
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0.1), comm, bucket_mib=0.0002)
    optimizer.setup(model)
    x, y = batches(1)[0]
    optimizer.update(loss_of, model, x, y)
    gather(comm, folder)
    before = weights(model)

    class Leaving(Broken):
        def backward(self, indexes: Any, gradients: Any) -> Any:
            if comm.rank == 1:
                os._exit(3)
            return gradients

    def lossfun(x: Any, y: Any) -> Any:
        (h,) = Leaving().apply((F.tanh(model.middle(F.tanh(model.first(x)))),))
        return F.mean_squared_error(model.last(h), y)

    with pytest.raises(CollectiveError) as caught:
        optimizer.update(lossfun, x, y)
    assert (_backprop._backprop_to_all, _backprop_utils.backprop_step) == originals
    assert_same([before, weights(model)])
    Path(folder, "error").write_text(f"{type(caught.value).__name__}: {caught.value}")
