"""Model, batches and results of training for the tests of Chainer's optimizer.

Import this module only if Chainer is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import collective.adapters.chainer  # noqa: F401  # The adapter makes the next imports work.

import chainer  # isort: skip
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip


class Model(chainer.Chain):
    """Three layers in float64, the middle one used twice; the weights depend only on ``seed``."""

    def __init__(self, seed: int = 3, dtype: Any = np.float64) -> None:
        super().__init__()
        draw = np.random.RandomState(seed).standard_normal
        with self.init_scope(), chainer.using_config("dtype", np.dtype(dtype)):
            self.first = L.Linear(6, 8, initialW=draw((8, 6)) / 4)
            self.middle = L.Linear(8, 8, initialW=draw((8, 8)) / 4)
            self.last = L.Linear(8, 2, initialW=draw((2, 8)) / 4)

    def forward(self, x: Any) -> Any:
        return self.last(F.tanh(self.middle(F.tanh(self.middle(F.tanh(self.first(x)))))))


def batches(steps: int, rows: int = 8, dtype: Any = np.float64) -> list[Any]:
    """Return a joined batch of inputs and targets for each step, equal in all calls."""
    draw = np.random.RandomState(11).standard_normal
    return [(draw((rows, 6)).astype(dtype), draw((rows, 2)).astype(dtype)) for _ in range(steps)]


def samples(count: int) -> Any:
    """Return a dataset of inputs and targets, equal in all calls."""
    draw = np.random.RandomState(5).standard_normal
    return chainer.datasets.TupleDataset(draw((count, 6)), draw((count, 2)))


def loss_of(model: Any, x: Any, y: Any) -> Any:
    """Return the mean squared error of a model."""
    return F.mean_squared_error(model(x), y)


def weights(model: Any) -> dict[str, Any]:
    """Return copies of the parameters by name."""
    return {name: np.array(p.array) for name, p in sorted(model.namedparams())}


def shard(comm: Any, x: Any) -> Any:
    """Return this rank's rows of a joined batch."""
    return np.array_split(x, comm.size)[comm.rank]


def optimizers() -> dict[str, Any]:
    """Return new optimizers by kind; :data:`HOOKS` has the hooks of some kinds."""
    return {
        "momentum": chainer.optimizers.MomentumSGD(0.1),
        "adam": chainer.optimizers.Adam(0.01),
        "weight decay": chainer.optimizers.SGD(0.1),
        "clipping": chainer.optimizers.SGD(0.1),
    }


HOOKS = {
    "weight decay": chainer.optimizer_hooks.WeightDecay(0.1),
    "clipping": chainer.optimizer_hooks.GradientClipping(0.2),
}


def trained_alone(steps: int, kind: str = "momentum", model: Any = None, **given: Any) -> Any:
    """Return the weights after training on the joined batches."""
    model = model or Model()
    optimizer = optimizers()[kind].setup(model)
    if kind in HOOKS:
        optimizer.add_hook(HOOKS[kind])
    for x, y in batches(steps, **given):
        optimizer.update(loss_of, model, x, y)
    return weights(model)


def assert_close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Check that weights are equal up to a tolerance."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)


def assert_same(found: list[Any]) -> None:
    """Check that all ranks have the same bits in their weights."""
    for other in found[1:]:
        for name, array in found[0].items():
            assert other[name].tobytes() == array.tobytes(), name
