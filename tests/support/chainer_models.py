"""A model, its batches, and what training leaves of it; for the tests of Chainer's optimizer.

To be imported where Chainer is known to be there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import collective.adapters.chainer  # noqa: F401  # makes the next ones importable

import chainer  # isort: skip
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip


class Model(chainer.Chain):
    """Three layers in float64, the middle one used twice; drawn from a generator of its own."""

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
    draw = np.random.RandomState(11).standard_normal
    return [(draw((rows, 6)).astype(dtype), draw((rows, 2)).astype(dtype)) for _ in range(steps)]


def samples(count: int) -> Any:
    draw = np.random.RandomState(5).standard_normal
    return chainer.datasets.TupleDataset(draw((count, 6)), draw((count, 2)))


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return F.mean_squared_error(model(x), y)


def weights(model: Any) -> dict[str, Any]:
    return {name: np.array(p.array) for name, p in sorted(model.namedparams())}


def shard(comm: Any, x: Any) -> Any:
    return np.array_split(x, comm.size)[comm.rank]


def optimizers() -> dict[str, Any]:
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
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)


def assert_same(found: list[Any]) -> None:
    for each in found[1:]:
        for name, array in found[0].items():
            assert each[name].tobytes() == array.tobytes(), name
