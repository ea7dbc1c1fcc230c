"""Parameters that change after the multi-node optimizer was set up."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.optimizer")

import chainer
import chainer.functions as F
import chainer.links as L

from collective.adapters.chainer import create_multi_node_optimizer
from collective.errors import MismatchError
from tests.support.chainer_models import assert_same
from tests.support.chainer_ranks import on, run

X = np.linspace(-1, 1, 24, dtype="f").reshape(6, 4)


class Net(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Linear(4, 5)
            self.last = L.Linear(5, 2)
            self.late = L.Linear(None, 2)

    def forward(self, x: Any) -> Any:
        y = self.last(F.tanh(self.first(x)))
        extra = getattr(self, "extra", None)
        y = y if extra is None else y * F.broadcast_to(extra, y.shape)
        return y + self.late(x) if self.late.W.is_initialized else y


def freeze(net: Net) -> None:
    net.first.disable_update()


def load(net: Net) -> None:
    file = io.BytesIO()
    chainer.serializers.save_npz(file, Net())
    file.seek(0)
    chainer.serializers.load_npz(file, net)


def copy_parameters(net: Net) -> None:
    net.last.copyparams(L.Linear(5, 2))


def add(net: Net) -> None:
    with net.init_scope():
        net.extra = chainer.Parameter(np.ones(2, "f"))


def delete(net: Net) -> None:
    del net.first.b
    net.first.b = None


def replace(net: Net) -> None:
    net.last = L.Linear(5, 2, initialW=0.5)


def halve(net: Net) -> None:
    for parameter in net.params():
        if parameter.is_initialized:
            parameter.array = parameter.array.astype(np.float16)


def initialise(net: Net) -> None:
    net.late(X)


def set_up(comm: Any, **options: Any) -> tuple[Net, Any]:
    net = Net()
    sgd = chainer.optimizers.SGD(0.1)
    return net, create_multi_node_optimizer(sgd, comm, **options).setup(net)


def weights(net: Net) -> dict[str, Any]:
    return {name: p.array.copy() for name, p in net.namedparams() if p.is_initialized}


def step(comm: Any, net: Net, optimizer: Any, way: str = "lossfun") -> None:
    x = X.astype(net.first.W.dtype) + net.first.W.dtype.type(comm.rank)
    with chainer.using_config("dtype", x.dtype):
        if way == "lossfun":
            optimizer.update(lambda *_: F.sum(net(x) ** 2) / 100)
        else:
            loss = F.sum(net(x) ** 2) / 100
            net.cleargrads()
            loss.backward()
            optimizer.update()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (freeze, "/first/W is not trained"),
        (load, "the values of /first/W differ on rank 1"),
        (copy_parameters, "the values of /last/W differ on rank 1"),
        (add, "only rank 1 has /extra"),
        (delete, "only rank 0 has /first/b"),
        (replace, "/last/W is not trained"),
        (halve, r"/first/W is float16\[5, 4\]"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"reduce": True}, {"shards": 4}], ids=lambda o: str(*o))
def test_change_on_one_rank_raises_on_all_ranks_by_name(
    change: Callable[[Net], None], text: str, options: dict[str, Any]
) -> None:
    run("shm-2", _refused, change, text, options)


def _refused(comm: Any, change: Any, text: str, options: dict[str, Any]) -> None:
    group = comm.dup()

    def reduce(bucket: Any) -> None:
        group.all_reduce(bucket.array, op="avg", out=bucket.array)

    if "reduce" in options:
        options = {"reduce": reduce}
    net, optimizer = set_up(comm, **options)
    if "shards" in options:
        net.late(X)
    step(comm, net, optimizer)
    if comm.rank == 1:
        change(net)
    with pytest.raises(MismatchError, match=text):
        step(comm, net, optimizer)


@pytest.mark.parametrize("way", ["lossfun", "plain"])
@pytest.mark.parametrize("change", [freeze, add, delete, replace, halve, initialise])
def test_change_on_all_ranks_is_followed(change: Callable[[Net], None], way: str) -> None:
    assert_same(run("shm-2", _followed, change, way))


def _followed(comm: Any, change: Any, way: str) -> Any:
    net, optimizer = set_up(comm)
    step(comm, net, optimizer, way)
    change(net)
    for parameter in net.params():
        parameter.update_rule = parameter.update_rule or optimizer.create_update_rule()
    before = weights(net)
    for _ in range(2):
        step(comm, net, optimizer, way)
    after = weights(net)
    for name in before:
        if name.startswith("/late") and change is not initialise:
            continue  # unused
        frozen = change is freeze and name.startswith("/first")
        assert (before[name] == after[name]).all() == frozen, name
    return after


@on("shm-2")
def test_broadcast_after_change_on_one_rank_is_followed(comm: Any) -> None:
    net, optimizer = set_up(comm)
    step(comm, net, optimizer)
    if comm.rank == 1:
        load(net)
    optimizer.broadcast()
    step(comm, net, optimizer)
    assert_same(comm.all_gather_object(weights(net)))


@on("shm-2")
def test_parameter_initialised_on_one_rank_raises_on_all_ranks(comm: Any) -> None:
    net, optimizer = set_up(comm.dup())
    step(comm, net, optimizer)
    with pytest.raises(MismatchError) as caught:
        net.late(X) if comm.rank == 1 else step(comm, net, optimizer)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert ("/late/W" in notes) == (comm.rank == 1)


def one_element(optimizer: Any) -> None:
    optimizer.target.first.W.array[3, 3] += 1


def momentum(optimizer: Any) -> None:
    optimizer.target.last.b.update_rule.state["v"][1] += 1


def rate(optimizer: Any) -> None:
    optimizer.lr = 0.5


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (one_element, "/first/W"),
        (momentum, "v of /last/b in the optimizer"),
        (rate, "lr of /first/W in the optimizer"),
    ],
)
def test_check_names_first_difference_after_the_step(change: Any, name: str) -> None:
    for told in run("shm-2", _checked, change):
        assert told.startswith(f"update(check=True): the values of {name} on rank 1 differ")


def _checked(comm: Any, change: Any) -> str:
    net = Net()
    momentum_sgd = chainer.optimizers.MomentumSGD(0.1)
    optimizer = create_multi_node_optimizer(momentum_sgd, comm, check=True).setup(net)
    step(comm, net, optimizer)
    if comm.rank == 1:
        change(optimizer)
    with pytest.raises(MismatchError) as caught:
        step(comm, net, optimizer)
    return str(caught.value)
