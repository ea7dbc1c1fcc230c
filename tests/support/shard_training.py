"""Training on virtual shards: a function of a communicator, and a program for ``collective run``.

It trains LeNet and a small transformer, in PyTorch and in Chainer.
``tests/elastic/test_shard_training.py`` runs it on several numbers of ranks, and through kills and
joins.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import collective
from collective import Shards, elastic

__all__ = ["train"]

SHARDS, SAMPLES = 8, 2


def train(
    comm: Any, framework: str, model: str, steps: int, kill: Callable[[int], None] | None = None,
    wait_at: int | None = None,
) -> tuple[str, list[int]]:  # fmt: skip
    """Train; return the digest of the weights, and the numbers of ranks that made steps.

    Args:
        comm: communicator of the first ranks.
        framework, model: ``"torch"`` or ``"chainer"``; ``"lenet"`` or ``"transformer"``.
        steps: number of steps.
        kill: function that is called in each pass with the number of the step.
        wait_at: step before which the ranks wait until there are as many of them as at first.
    """
    step_of, state, weights = {"torch": _torch, "chainer": _chainer}[framework](comm, model)
    wanted, sizes = collective.config().size or comm.size, set()
    for generation in elastic.generations(comm, state):
        with generation as comm:
            while state.step < steps:
                if state.step == wait_at and comm.size < wanted:
                    time.sleep(0.02)
                    state.commit()
                    continue
                sizes.add(comm.size)
                step_of(state.step, kill)
                state.step += 1
                state.commit()
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights()))
    return digest.hexdigest()[:16], sorted(sizes)


def _samples(shards: Shards, model: str, shard: int, step: int) -> tuple[Any, Any]:
    random = np.random.default_rng(shards.seed(shard, step))
    shape = (SAMPLES, 1, 28, 28) if model == "lenet" else (SAMPLES, 5, 16)
    return random.standard_normal(shape, np.float32), random.integers(0, 10, SAMPLES)


def _torch(comm: Any, model: str) -> Any:
    import torch
    from torch import nn

    from collective.adapters.torch import DistributedDataParallel

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.last = nn.Linear(16, 10)

        def forward(self, x: Any) -> Any:
            return self.last(self.layer(x).mean(dim=1))

    def lenet() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
        )

    torch.set_num_threads(1)
    torch.manual_seed(3)
    net: Any = lenet() if model == "lenet" else Transformer()
    wrapped = DistributedDataParallel(net, comm, shards=SHARDS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    state: Any = elastic.State(comm, model=wrapped, optimizer=optimizer, step=0)

    def step_of(step: int, kill: Callable[[int], None] | None) -> None:
        for shard in wrapped.each_shard():
            torch.manual_seed(wrapped.shards.seed(shard, step))
            x, y = map(torch.from_numpy, _samples(wrapped.shards, model, shard, step))
            loss = nn.functional.cross_entropy(wrapped(x), y)
            if kill is not None:
                kill(step)
            loss.backward()
        optimizer.step()

    return step_of, state, lambda: [value.numpy() for value in net.state_dict().values()]


def _chainer(comm: Any, model: str) -> Any:
    from collective.adapters.chainer import create_multi_node_optimizer

    import chainer  # isort: skip  # importable because of the adapter
    import chainer.functions as F  # isort: skip
    import chainer.links as L  # isort: skip

    class Transformer(chainer.Chain):
        def __init__(self) -> None:
            super().__init__()
            with self.init_scope():
                self.query, self.key, self.value = L.Linear(16), L.Linear(16), L.Linear(16)
                self.norm, self.last = L.LayerNormalization(16), L.Linear(16, 10)
            for link in (self.query, self.key, self.value):
                link._initialize_params(16)

        def forward(self, x: Any) -> Any:
            q, k, v = (link(x, n_batch_axes=2) for link in (self.query, self.key, self.value))
            attention = F.softmax(F.matmul(q, k, transb=True) / 4, axis=2)
            h = F.dropout(F.matmul(attention, v), 0.1) + x
            h = self.norm(F.reshape(h, (-1, 16)))
            return self.last(F.mean(F.reshape(h, x.shape), axis=1))

    def lenet() -> Any:
        halved = partial(F.max_pooling_2d, ksize=2)
        return chainer.Sequential(
            *(L.Convolution2D(1, 6, 5, pad=2), F.tanh, halved),
            *(L.Convolution2D(6, 16, 5), F.tanh, halved),
            *(L.Linear(400, 120), F.tanh, L.Linear(120, 84), F.tanh, L.Linear(84, 10)),
        )

    np.random.seed(3)
    net: Any = lenet() if model == "lenet" else Transformer()
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.05), comm, shards=SHARDS
    ).setup(net)
    state: Any = elastic.State(comm, model=net, optimizer=optimizer, step=0)

    def step_of(step: int, kill: Callable[[int], None] | None) -> None:
        def loss_of(shard: int) -> Any:
            np.random.seed(optimizer.shards.seed(shard, step))
            x, y = _samples(optimizer.shards, model, shard, step)
            loss = F.softmax_cross_entropy(net(x), y.astype(np.int32))
            if kill is not None:
                kill(step)
            return loss

        optimizer.update(loss_of)

    return step_of, state, lambda: [value.array for _, value in sorted(net.namedparams())]


def _main(framework: str, model: str, steps: str, *kills: str) -> None:
    """Run the program: each kill is ``RANK@STEP``, with the rank's first number."""
    comm = collective.init()
    first = None if comm.membership.joins else comm.rank
    pairs = [tuple(map(int, kill.split("@"))) for kill in kills]

    def kill(step: int) -> None:
        if (first, step) in pairs:
            os.kill(os.getpid(), signal.SIGKILL)

    digest, sizes = train(comm, framework, model, int(steps), kill, int(steps) - 2)
    print(digest, *sizes)


if __name__ == "__main__":
    _main(*sys.argv[1:])
