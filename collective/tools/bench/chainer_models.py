"""The models of training steps, in Chainer, and what a step of them is made of."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

# Without it `import chainer` fails beside a current NumPy.
import collective.adapters.chainer  # noqa: F401  # isort: skip

import chainer  # isort: skip
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

from .libraries import Array, Call, Library, Ours
from .rivals import ChainerMN

__all__ = ["model_of", "steps"]


class _Residual(chainer.Chain):  # type: ignore[misc]
    """Two convolutions and a way around; He et al., "Deep residual learning" (2016)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        with self.init_scope():
            self.first = L.Convolution2D(before, after, 3, stride, 1, nobias=True)
            self.first_norm = L.BatchNormalization(after)
            self.second = L.Convolution2D(after, after, 3, 1, 1, nobias=True)
            self.second_norm = L.BatchNormalization(after)
            if before != after:
                self.around = L.Convolution2D(before, after, 1, stride)
        self._same = before == after

    def forward(self, x: Any) -> Any:
        inside = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inside)) + (x if self._same else self.around(x)))


def model_of(name: str) -> tuple[Any, Array]:
    """Return ``"mlp"``, ``"lenet"`` or ``"resnet"``, as in PyTorch, and a batch for it."""
    rng = np.random.RandomState(0)
    np.random.seed(0)  # Chainer's initialisers take it

    def batch(*shape: int) -> Array:
        made: Array = rng.standard_normal(shape).astype(np.float32)
        return made

    if name == "mlp":
        layers = [part for _ in range(6) for part in (L.Linear(1024, 1024), F.relu)]
        return chainer.Sequential(*layers), batch(64, 1024)
    if name == "lenet":
        made = chainer.Sequential(
            *(L.Convolution2D(1, 6, 5, pad=2), F.tanh, _halved),
            *(L.Convolution2D(6, 16, 5), F.tanh, _halved),
            *(L.Linear(400, 120), F.tanh, L.Linear(120, 84), F.tanh, L.Linear(84, 10)),
        )
        return made, batch(32, 1, 28, 28)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [_Residual(a, b) for a, b in itertools.pairwise(widths)]
    head = [L.Convolution2D(3, 64, 3, 1, 1), L.BatchNormalization(64), F.relu]
    return chainer.Sequential(*head, *blocks, _averaged, L.Linear(512, 10)), batch(4, 3, 32, 32)


def _halved(x: Any) -> Any:
    return F.max_pooling_2d(x, 2, 2)


def _averaged(x: Any) -> Any:
    return F.mean(x, axis=(2, 3))


def steps(library: Library, name: str) -> tuple[dict[str, Call], list[Any]]:
    """Return what is timed and what is updated, as :func:`.torch_models.steps`."""
    model, x = model_of(name)
    x = x + np.float32(library.rank / 8)
    count = sum(parameter.size for parameter in model.params())
    calls = {"compute": _step(chainer.optimizers.SGD(1e-4), model, x)}
    sgd: Any = chainer.optimizers.SGD(1e-4)
    if isinstance(library, Ours):
        from collective.adapters.chainer.optimizer import create_multi_node_optimizer

        comm = library.comm
        sgd = create_multi_node_optimizer(sgd, comm)
        flat = comm.empty(count, "float32")
        flat[:] = 0
        calls["sync"] = lambda: comm.all_reduce(flat, op="avg", out=flat)
    elif isinstance(library, ChainerMN):
        import chainermn

        sgd = chainermn.create_multi_node_optimizer(sgd, library.comm)
        zeros = np.zeros(count, np.float32)
        calls["sync"] = lambda: library.comm.allreduce(zeros)
    if "sync" in calls:
        model = model_of(name)[0]
        calls["step"] = _step(sgd, model, x)
    return calls, [parameter.array for parameter in model.params()]


def _step(optimizer: Any, model: Any, x: Array) -> Call:
    optimizer.setup(model)

    def loss() -> Any:
        return F.mean(model(x) ** 2)

    return lambda: optimizer.update(loss)
