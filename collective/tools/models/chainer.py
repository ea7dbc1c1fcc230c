"""The models in Chainer, with their steps; the same as in PyTorch."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from collective import Communicator
from collective.adapters.chainer.optimizer import create_multi_node_optimizer
from collective.tools.models import networks
from collective.tools.models.networks import Layer

__all__ = ["Network", "Step", "train"]

Array = np.ndarray[Any, Any]

# Chainer has no types, hence Any. The import works because the adapter was imported before.
chainer: Any = importlib.import_module("chainer")
F, L = chainer.functions, chainer.links

_EPSILON, _BETA = 1e-8, 0.999


_FUNCTIONS = {
    "convolution": lambda layer, x, *weights: F.convolution_2d(x, *weights, pad=layer.padding),
    "max": lambda layer, x: F.max_pooling_2d(x, layer.kernel, layer.stride, cover_all=False),
    "linear": lambda layer, x, *weights: F.linear(x, *weights),
    "tanh": lambda layer, x: F.tanh(x),
    "relu": lambda layer, x: F.relu(x),
}


class Network(chainer.Link):  # type: ignore[misc]
    """Chain of layers with copies of ``weights``, by name."""

    def __init__(self, layers: Sequence[Layer], weights: Mapping[str, Array]) -> None:
        super().__init__()
        self._layers = layers
        with self.init_scope():
            for name, array in weights.items():
                setattr(self, name, chainer.Parameter(array.copy()))

    def forward(self, x: Any) -> Any:
        """Return the last layer's result."""
        return networks.forward(self._layers, x, _FUNCTIONS, functools.partial(getattr, self))


class Step:
    """Training step on a batch, as a function without arguments.

    Args:
        optimizer: optimizer of the model; is set up here.
        model, x: the model, and its input.
    """

    def __init__(self, optimizer: Any, model: Any, x: Array) -> None:
        optimizer.setup(model)
        self.optimizer, self.model, self._x = optimizer, model, x

    def loss(self) -> Any:
        """Compute the loss."""
        return F.mean(self.model(self._x) ** 2)

    def __call__(self) -> None:
        self.optimizer.update(self.loss)


def train(
    comm: Communicator | None, model: Any, start: dict[str, Array], optimizer: str,
    batches: Sequence[networks.Batch], **how: Any,
) -> dict[str, Array]:  # fmt: skip
    """Train a link from ``start`` and return its weights, as :func:`.torch.train` does.

    Chainer's Adam adds epsilon to the root of the uncorrected second moment (Kingma and Ba, 2015,
    end of section 2). PyTorch's adds it to the root of the corrected moment (algorithm 1). They
    agree if Chainer's epsilon is ``epsilon √(1 − β₂ᵗ)`` in step t, so this function sets it so.
    """
    actual = _begin(model, start, optimizer)
    stepper = actual if comm is None else create_multi_node_optimizer(actual, comm, **how)
    stepper.setup(model)
    for step, batch in enumerate(batches, 1):
        if optimizer == "adam":
            actual.hyperparam.eps = _EPSILON * math.sqrt(1 - _BETA**step)

        def loss(shard: int = 0, batch: networks.Batch = batch) -> Any:
            x, y, scale = batch[shard]
            return _loss(model, x, y) * scale

        stepper.update(loss)
    return networks.taken(networks.chainer_parameters(model))


def _begin(model: Any, start: dict[str, Array], optimizer: str) -> Any:
    """Set the weights of a link, in double precision; return its optimizer."""
    for parameter in model.params():
        if parameter.array is not None:
            parameter.array = parameter.array.astype(np.float64)
    networks.put(networks.chainer_parameters(model), start)
    kinds = {
        "sgd": lambda: chainer.optimizers.MomentumSGD(lr=0.05, momentum=0.9),
        "adam": lambda: chainer.optimizers.Adam(alpha=0.002, beta1=0.9, beta2=_BETA, eps=_EPSILON),
    }
    return kinds[optimizer]()


def _loss(model: Any, x: Array, y: Array) -> Any:
    criterion = F.mean_squared_error if y.dtype.kind == "f" else F.softmax_cross_entropy
    return criterion(model(x), y if y.dtype.kind == "f" else y.astype(np.int32))
