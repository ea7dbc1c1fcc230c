"""Virtual shards in the multi-node optimizer: equal bits on any number of ranks."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
pytest.importorskip("collective.adapters.chainer.optimizer")

import chainer
import chainer.functions as F
import chainer.links as L

from collective.adapters.chainer import (
    MultiNodeUpdater,
    Pipeline,
    Split,
    SyncBatchNormalization,
    create_multi_node_optimizer,
)
from collective.errors import GradientError, InvalidArgumentError, UnsupportedError
from tests.support.chainer_ranks import run

SHARDS = 4


class Net(chainer.Chain):
    def __init__(self) -> None:
        super().__init__()
        random = np.random.RandomState(0)
        with self.init_scope():
            self.first = L.Linear(6, 16, initialW=random.randn(16, 6).astype("f") / 4)
            self.norm = L.BatchNormalization(16)
            self.last = L.Linear(16, 2, initialW=random.randn(2, 16).astype("f") / 4)

    def forward(self, x: Any) -> Any:
        return self.last(F.tanh(self.norm(self.first(x))))


class Attention(chainer.Chain):
    """Transformer with one layer: attention of one head, and a perceptron, each with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.RandomState(1)
        sizes = {"into": (40, 6), "query": (8, 8), "key": (8, 8), "value": (8, 8), "wide": (16, 8),
                 "narrow": (8, 16), "last": (2, 40)}  # fmt: skip
        with self.init_scope():
            for name, (out, size) in sizes.items():
                weights = random.randn(out, size).astype("f") / 4
                setattr(self, name, L.Linear(size, out, initialW=weights))
            self.first_norm, self.second_norm = L.LayerNormalization(8), L.LayerNormalization(8)

    def forward(self, x: Any) -> Any:
        h = F.reshape(self.into(x), (-1, 5, 8))
        query, key, value = (link(h, n_batch_axes=2) for link in (self.query, self.key, self.value))
        shares = F.softmax(F.matmul(query, key, transb=True), axis=2)
        h = self._normalised(self.first_norm, h + F.matmul(shares, value))
        wide = F.relu(self.wide(h, n_batch_axes=2))
        h = self._normalised(self.second_norm, h + self.narrow(wide, n_batch_axes=2))
        return self.last(F.reshape(h, (-1, 40)))

    def _normalised(self, norm: Any, h: Any) -> Any:
        return F.reshape(norm(F.reshape(h, (-1, 8))), h.shape)


NETS = {"perceptron": Net, "transformer": Attention}


def loss_of(net: Any, step: int, shard: int) -> Any:
    random = np.random.RandomState(100 * step + shard)
    x, y = random.randn(8, 6).astype("f"), random.randn(8, 2).astype("f")
    return F.mean_squared_error(net(x), y)


def state_of(net: Any) -> list[Any]:
    values = [parameter.array.copy() for _, parameter in sorted(net.namedparams())]
    return [*values, *(value.copy() for value in statistics(net))]


def statistics(net: Any) -> list[Any]:
    norm = getattr(net, "norm", None)
    return [] if norm is None else [norm.avg_mean, norm.avg_var]


def alone(steps: int, kind: str) -> list[Any]:
    """Return weights and statistics of a training by one process, without this library."""
    net = NETS[kind]()
    optimizer = chainer.optimizers.MomentumSGD(0.1).setup(net)
    for step in range(steps):
        gradients, states = [], []
        before = [value.copy() for value in statistics(net)]
        for shard in range(SHARDS):
            for value, kept in zip(statistics(net), before):
                value[...] = kept
            loss = loss_of(net, step, shard)
            net.cleargrads()
            loss.backward()
            gradients.append([p.grad.copy() for _, p in sorted(net.namedparams())])
            states.append([value.copy() for value in statistics(net)])
        for (_, parameter), (a, b, c, d) in zip(sorted(net.namedparams()), zip(*gradients)):
            parameter.grad = ((a + b) + (c + d)) / np.float32(SHARDS)
        for value, (a, b, c, d) in zip(statistics(net), zip(*states)):
            value[...] = ((a + b) + (c + d)) / np.float32(SHARDS)
        optimizer.update()
    return state_of(net)


def trained(comm: Any, steps: int, kind: str) -> list[Any]:
    net = NETS[kind]()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm, shards=SHARDS
    ).setup(net)
    for step in range(steps):
        optimizer.update(lambda shard, step=step: loss_of(net, step, shard))
    return state_of(net)


@pytest.mark.parametrize("world", ["threads-1", "threads-2", "threads-3", "threads-4", "shm-2"])
@pytest.mark.parametrize("kind", NETS)
def test_training_has_the_bits_of_one_process(world: str, kind: str) -> None:
    wanted = alone(4, kind)
    names = [*(name for name, _ in sorted(NETS[kind]().namedparams())), "avg_mean", "avg_var"]
    for rank, found in enumerate(run(world, trained, 4, kind)):
        assert len(found) == len(wanted)
        for name, value, expected in zip(names, found, wanted):
            assert value.tobytes() == expected.tobytes(), f"{name} of rank {rank}"


def _refused(comm: Any, case: str) -> str:
    net, options = Net(), {}
    if case == "reduce":
        options["reduce"] = lambda bucket: None
    if case == "SyncBatchNormalization":
        net.norm = SyncBatchNormalization(16, comm)
    if case == "Split":
        with net.init_scope():
            net.split = Split(L.Convolution2D(1, 1, 3), batch=2, comm=comm)
    try:
        optimizer = create_multi_node_optimizer(
            chainer.optimizers.SGD(0.1), comm, shards=SHARDS, **options
        ).setup(net)
        if case == "MultiNodeUpdater":
            MultiNodeUpdater(chainer.iterators.SerialIterator([1, 2], 1), optimizer, comm)
        if case == "backward":
            optimizer.backward(loss_of(net, 0, 0))
        if case == "Pipeline":
            stage = L.Linear(3, 2)
            optimizer.setup(stage)
            pipe = Pipeline([stage], comm.group([comm.rank]), microbatches=2)
            pipe.step(np.ones((4, 3), "f"), np.zeros(4, np.int32), F.softmax_cross_entropy)
        optimizer.update()
    except (UnsupportedError, InvalidArgumentError, GradientError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("reduce", "reduce with shards"),
        (
            "SyncBatchNormalization",
            "/norm is a SyncBatchNormalization, which joins",
        ),
        ("Split", "/split is a Split, whose pieces are on several ranks, with shards"),
        ("MultiNodeUpdater", "optimizer 'main' has shards"),
        ("backward", "a pass outside of update(lossfun), with shards [rank"),
        ("Pipeline", "A Pipeline, which makes its own passes, cannot be combined with shards"),
        ("no loss function", "called without a loss function, with shards"),
    ],
)
def test_what_excludes_shards_is_refused_by_name(case: str, text: str) -> None:
    for told in run("threads-2", _refused, case):
        assert text in told


# -- state beside the parameters ------------------------------------------------------------------


class Stateful(Net):
    """Network whose forward pass changes one kind of state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.count, self.mean, self.hidden = 0, np.zeros(16, "f"), None
        self.random = np.random.RandomState(5)
        self.add_persistent("seen", 0)
        self.add_persistent("largest", np.float32(0))
        self.add_persistent("text", "before")
        self.add_persistent("later", None)
        self.other = (L.BatchNormalization(16),)
        if kind == "lazy":
            with self.init_scope():
                self.late = L.Linear(None, 1)

    def forward(self, x: Any) -> Any:
        h = self.norm(self.first(x), finetune=self.kind == "finetune")
        if self.kind == "numbers":
            self.count += 1
            self.seen += 2
            self.largest = max(self.largest, h.array.max())
            h = h * float(self.count + self.seen + self.largest)
        elif self.kind == "replaced array":
            self.mean = 0.5 * self.mean + 0.5 * h.array.mean(axis=0)
            self.norm.avg_mean = self.norm.avg_mean + self.mean
            h = h + self.norm.avg_mean
        elif self.kind == "array in place":
            self.mean += h.array.mean(axis=0)
            h = h + self.mean
        elif self.kind == "hidden state":
            self.hidden = h if self.hidden is None else h + F.mean(self.hidden)
            h = self.hidden
        elif self.kind == "generator":
            h = h * self.random.rand(16).astype("f")
        elif self.kind == "unseeded dropout":
            h = F.dropout(h)
        elif self.kind == "parameter":
            self.last.W.array[0, 0] *= 0.5
        elif self.kind == "text":
            self.text = "after"
        elif self.kind == "later":
            self.later = np.ones(2)
        elif self.kind == "other dtype":
            self.seen = 0.5
        elif self.kind == "other shape":
            self.norm.avg_mean = np.zeros(3, "f")
        elif self.kind == "new persistent value":
            self.add_persistent(f"new{len(self._persistent)}", 1)
        elif self.kind == "other target":
            h = self.other[0](h)
        elif self.kind == "new parameter":
            self.first.W = chainer.Parameter(self.first.W.array)
        return self.last(F.tanh(h))


def stateful(comm: Any, kind: str, hook: bool = False) -> list[Any]:
    np.random.seed(comm.rank)
    net = Stateful(kind)
    actual = chainer.optimizers.MomentumSGD(0.1)
    optimizer = create_multi_node_optimizer(actual, comm, shards=3).setup(net)
    if hook:
        optimizer.add_hook(chainer.optimizer_hooks.GradientNoise(0.1))
    for step in range(3):
        optimizer.update(lambda shard, step=step: loss_of(net, step, shard))
    numbers = [net.norm.N, net.count, net.seen, float(net.largest)]
    return [*state_of(net), net.mean, np.array(numbers)]


@pytest.mark.parametrize(
    "kind",
    ["finetune", "numbers", "replaced array", "array in place", "hidden state", "generator",
     "unseeded dropout", "gradient noise"],
)  # fmt: skip
def test_state_that_passes_change_has_the_bits_of_one_rank(kind: str) -> None:
    noise = kind == "gradient noise"
    (wanted,) = run("shm-1", stateful, kind, noise)
    for found in (*run("shm-2", stateful, kind, noise), *run("shm-4", stateful, kind, noise)):
        for value, expected in zip(found, wanted, strict=True):
            assert value.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("parameter", "the values of the parameter /last/W changed in the pass of shard 0 on rank"),
        ("text", "/text changed from str to str"),
        ("later", "/later changed from None to float64"),
        ("other dtype", "/seen changed from int to float"),
        ("other shape", r"/norm/avg_mean changed from float32\[16\] to float32\[3\]"),
        ("new persistent value", "/new4 was registered or deleted"),
        ("new parameter", "the set of parameters changed"),
        ("lazy", "/late/W is not initialised, with shards"),
        ("other target", "avg_mean of a BatchNormalization that is not in the optimizer's target"),
    ],
)
def test_state_that_cannot_be_folded_is_refused_by_name_on_all_ranks(kind: str, text: str) -> None:
    for told in run("shm-4", _refused_state, kind):
        assert re.search(text, told), told


def _refused_state(comm: Any, kind: str) -> str:
    try:
        stateful(comm, kind)
    except InvalidArgumentError as error:
        return str(error)
    return "no error"
