"""The multi-node optimizer: equal replicas, its state, its options and its errors."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.optimizer")

import chainer
import chainer.functions as F
import chainer.links as L
from chainer import _backprop, _backprop_utils

import collective
from collective.adapters.chainer import broadcast_state, create_multi_node_optimizer
from collective.errors import (
    CollectiveError,
    CommunicatorAbortedError,
    InvalidArgumentError,
    MismatchError,
)
from collective.testing import RanksFailedError, run_ranks
from collective.testing.checks_shrink import gather
from collective.training.compression import Cast
from tests.adapters.chainer.test_optimizer import (
    first_batch,
    set_up,
    training_on_equal_batches,
)
from tests.support.chainer_models import (
    Model,
    assert_close,
    assert_same,
    batches,
    loss_of,
    shard,
    trained_alone,
    weights,
)
from tests.support.chainer_ranks import on

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


@on("shm-2", "shm-4", "gloo-2", "threads-2", "threads-4")
def test_lazy_parameters_get_values_of_rank_0_before_use(comm: Any) -> None:
    if not comm.backend.startswith("threads"):  # threads share one generator
        np.random.seed(comm.rank)
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1), Lazy())
    x, y = (shard(comm, array) for array in batches(1, rows=16, dtype=np.float32)[0])
    loss = loss_of(model, x, y)
    before = weights(model)
    model.cleargrads()
    optimizer.backward(loss)
    optimizer.update()
    assert optimizer.t == 1
    after = weights(model)
    assert_same(comm.all_gather_object(before))
    assert_same(comm.all_gather_object(after))
    for name in ("/first/W", "/last/W"):
        assert (before[name] != after[name]).any(), f"{name}: the first step was none"


@on("shm-2")
def test_weights_loaded_on_rank_0_are_broadcast_or_raise(comm: Any) -> None:
    file = io.BytesIO()
    chainer.serializers.save_npz(file, Model(99))
    for late in (False, True):
        model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1))
        if comm.rank == 0:
            file.seek(0)
            chainer.serializers.load_npz(file, model)
        if late:
            model.cleargrads()
            loss_of(model, *first_batch(comm)).backward()
            with pytest.raises(MismatchError, match="of rank 1 are not those of rank 0"):
                optimizer.update()
        else:
            optimizer.update(loss_of, model, *first_batch(comm))
            assert_same(comm.all_gather_object(weights(model)))


@on("shm-2")
def test_broadcast_state_copies_persistent_values_of_rank_0(comm: Any) -> None:
    link = L.BatchNormalization(4)
    if comm.rank == 0:
        link.avg_mean[...] = 2.5
        link.N = 7
    broadcast_state(link, comm)
    assert (link.avg_mean.tolist(), link.N) == ([2.5] * 4, 7)


@on("shm-2")
def test_setup_of_different_links_raises_on_all_ranks(comm: Any) -> None:
    differ = r"/W is float32\[3, 5\] on rank 1, but float32\[3, 4\] on rank 0"
    with pytest.raises(MismatchError, match=differ):
        set_up(comm, chainer.optimizers.SGD(), L.Linear(4 + comm.rank, 3))


@on("shm-2")
def test_optimizer_state_loads_into_bare_optimizer(comm: Any) -> None:
    model, optimizer = set_up(comm, chainer.optimizers.Adam(0.01))
    for x, y in batches(3):
        optimizer.update(loss_of, model, x, y)
    file = io.BytesIO()
    chainer.serializers.save_npz(file, optimizer)
    bare = chainer.optimizers.Adam(0.01).setup(Model())
    file.seek(0)
    chainer.serializers.load_npz(file, bare)
    assert bare.t == 3
    file.seek(0)
    assert set(chainer.serializers.npz.serialize(bare)) == set(np.load(file))


# -- options --------------------------------------------------------------------------------------


@on("shm-2")
def test_optimizer_with_cast_compression_trains_closely(comm: Any) -> None:
    momentum = chainer.optimizers.MomentumSGD(0.1)
    model, optimizer = set_up(comm, momentum, reduce=Cast(comm.dup(), "float16"))
    for x, y in batches(3):
        optimizer.update(loss_of, model, shard(comm, x), shard(comm, y))
    assert_same(comm.all_gather_object(weights(model)))
    assert_close(weights(model), trained_alone(3), 1e-2)


@on("shm-2")
def test_dynamic_loss_scale_keeps_half_precision_ranks_equal(comm: Any) -> None:
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1), Model(dtype=np.float16))
    optimizer.loss_scaling(interval=2)
    for step, (x, y) in enumerate(batches(5, dtype=np.float16)):
        if step == 3 and comm.rank == 1:  # only rank 1's gradients overflow
            y = np.full_like(y, np.inf)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.update(loss_of, model, x, y)
    assert_same(comm.all_gather_object(weights(model)))
    assert len(set(comm.all_gather_object(optimizer._loss_scale))) == 1


def test_optimizer_with_bad_options_raises() -> None:
    with collective.init() as comm:
        with pytest.raises(
            InvalidArgumentError, match=r"bucket_mib is -1 \(expected a positive number"
        ):
            create_multi_node_optimizer(chainer.optimizers.SGD(), comm, bucket_mib=-1)
        optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
        with pytest.raises(InvalidArgumentError, match="no initialised parameter"):
            optimizer.setup(chainer.Chain()).update()


def test_optimizer_on_one_rank_equals_bare_optimizer() -> None:
    with collective.init() as comm:
        expected = trained_alone(4, "adam", Model(dtype=np.float32), dtype=np.float32)
        assert_same([training_on_equal_batches(comm), expected])


# -- failures -------------------------------------------------------------------------------------


class Broken(chainer.FunctionNode):
    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, gradients: Any) -> Any:
        raise RuntimeError("on purpose")


@on("shm-2")
def test_backward_error_on_rank_raises_on_other_ranks(comm: Any) -> None:
    originals = _backprop._backprop_to_all, _backprop_utils.backprop_step
    group = comm.dup()
    model, optimizer = set_up(group, chainer.optimizers.SGD(0.1), bucket_mib=0.0002)
    x, y = batches(1)[0]
    optimizer.update(loss_of, model, x, y)
    before = weights(model)

    def lossfun(x: Any, y: Any) -> Any:
        h = F.tanh(model.middle(F.tanh(model.first(x))))
        if comm.rank == 0:
            (h,) = Broken().apply((h,))
        return F.mean_squared_error(model.last(h), y)

    error = (CommunicatorAbortedError, "rank 0") if comm.rank else (RuntimeError, "^on purpose$")
    with pytest.raises(error[0], match=error[1]), group:
        optimizer.update(lossfun, x, y)
    assert (_backprop._backprop_to_all, _backprop_utils.backprop_step) == originals
    assert_same([before, weights(model)])


def test_rank_death_in_backward_raises_peer_lost_error(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="rank 1"):
        run_ranks(2, dying, str(tmp_path), backend="shm", timeout=40.0)
    assert (tmp_path / "error").read_text().startswith("PeerLostError: all_reduce")


def dying(comm: Any, folder: str) -> None:
    originals = _backprop._backprop_to_all, _backprop_utils.backprop_step
    model, optimizer = set_up(comm, chainer.optimizers.SGD(0.1), bucket_mib=0.0002)
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
