"""The same models in Chainer, and the steps that train them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.adapters.chainer.optimizer import create_multi_node_optimizer
from collective.communicator import Communicator

from . import weights

__all__ = ["LeNet", "Perceptron", "train"]

Array = np.ndarray[Any, Any]

# Not typed. Its import works because that of its adapter has come before.
chainer: Any = importlib.import_module("chainer")
F, L = chainer.functions, chainer.links

_EPSILON, _BETA = 1e-8, 0.999


class LeNet(chainer.Chain):  # type: ignore[misc]
    """LeCun et al., "Gradient-based learning applied to document recognition" (1998)."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, 6, 5, pad=2)
            self.conv2 = L.Convolution2D(6, 16, 5)
            self.fc1 = L.Linear(400, 120)
            self.fc2 = L.Linear(120, 84)
            self.fc3 = L.Linear(84, 10)

    def forward(self, images: Any) -> Any:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        h = F.max_pooling_2d(F.tanh(self.conv1(images)), 2, cover_all=False)
        h = F.max_pooling_2d(F.tanh(self.conv2(h)), 2, cover_all=False)
        return self.fc3(F.tanh(self.fc2(F.tanh(self.fc1(h)))))


class Perceptron(chainer.Chain):  # type: ignore[misc]
    """Two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.fc1 = L.Linear(784, 64)
            self.fc2 = L.Linear(64, 32)
            self.fc3 = L.Linear(32, 10)

    def forward(self, images: Any) -> Any:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(images)))))


def train(
    comm: Communicator | None,
    model: Any,
    start: dict[str, Array],
    optimizer: str,
    batches: list[tuple[Array, Array, float]],
    reduce: Callable[[Any], Any] | None,
) -> dict[str, Array]:
    """Train a link from ``start`` and return its weights; as its namesake for PyTorch does.

    Chainer's Adam adds epsilon to the root of the uncorrected second moment, PyTorch's to that of
    the corrected one (Kingma and Ba, 2015, end of section 2, and algorithm 1). They agree if
    Chainer's is ``epsilon √(1 − β₂ᵗ)`` in step t, to which it is set here.
    """
    for parameter in model.params():
        if parameter.array is not None:
            parameter.array = parameter.array.astype(np.float64)
    weights.put(weights.chainer_parameters(model), start)
    kinds = {
        "sgd": lambda: chainer.optimizers.MomentumSGD(lr=0.05, momentum=0.9),
        "adam": lambda: chainer.optimizers.Adam(alpha=0.002, beta1=0.9, beta2=_BETA, eps=_EPSILON),
    }
    actual = kinds[optimizer]()
    stepper = actual if comm is None else create_multi_node_optimizer(actual, comm, reduce=reduce)
    stepper.setup(model)

    def loss(x: Array, y: Array, scale: float) -> Any:
        criterion = F.mean_squared_error if y.dtype.kind == "f" else F.softmax_cross_entropy
        return criterion(model(x), y if y.dtype.kind == "f" else y.astype(np.int32)) * scale

    for step, batch in enumerate(batches, 1):
        if optimizer == "adam":
            actual.hyperparam.eps = _EPSILON * math.sqrt(1 - _BETA**step)
        stepper.update(loss, *batch)
    return weights.taken(weights.chainer_parameters(model))
