"""The models in Chainer, with their steps, and networks in pieces; the same as in PyTorch."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collective.adapters.chainer import Split
from collective.adapters.chainer.optimizer import create_multi_node_optimizer
from collective.communicator import Communicator
from collective.tools.bench.libraries import BenchLibrary, Call, Ours
from collective.tools.bench.rivals import ChainerMN
from collective.tools.parity import weights
from collective.tools.parity.layers import Layer, forward

__all__ = ["LeNet", "Perceptron", "Step", "gradients", "model_of", "steps", "train", "train_shards"]

Array = np.ndarray[Any, Any]

# Chainer has no types, hence Any. The import works because the adapter was imported before.
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
    """Perceptron with two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.fc1 = L.Linear(784, 64)
            self.fc2 = L.Linear(64, 32)
            self.fc3 = L.Linear(32, 10)

    def forward(self, images: Any) -> Any:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(images)))))


class _Residual(chainer.Chain):  # type: ignore[misc]
    """Two convolutions and a shortcut; He et al., "Deep residual learning" (2016)."""

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


def model_of(name: str, width: int = 1024) -> tuple[Any, Array]:
    """Return ``"mlp"``, ``"lenet"`` or ``"resnet"``, as in PyTorch, and a batch for it.

    Args:
        width: width of the MLP's six layers.
    """
    rng = np.random.RandomState(0)
    np.random.seed(0)  # Chainer's initialisers use NumPy's global generator

    def batch(*shape: int) -> Array:
        made: Array = rng.standard_normal(shape).astype(np.float32)
        return made

    if name == "mlp":
        layers = [part for _ in range(6) for part in (L.Linear(width, width), F.relu)]
        return chainer.Sequential(*layers), batch(64, width)
    if name == "lenet":
        return LeNet(), batch(32, 1, 28, 28)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [_Residual(a, b) for a, b in itertools.pairwise(widths)]
    head = [L.Convolution2D(3, 64, 3, 1, 1), L.BatchNormalization(64), F.relu]
    return chainer.Sequential(*head, *blocks, _averaged, L.Linear(512, 10)), batch(4, 3, 32, 32)


def _averaged(x: Any) -> Any:
    return F.mean(x, axis=(2, 3))


def steps(library: BenchLibrary, name: str) -> tuple[dict[str, Call], list[Any]]:
    """Return the timed calls and the updated parameters, as :func:`.torch.steps` does."""
    model, x = model_of(name)
    x = x + np.float32(library.rank / 8)
    count = sum(parameter.size for parameter in model.params())
    calls: dict[str, Call] = {"compute": Step(chainer.optimizers.SGD(1e-4), model, x)}
    sgd: Any = chainer.optimizers.SGD(1e-4)
    if isinstance(library, Ours):
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
        calls["step"] = Step(sgd, model, x)
    return calls, [parameter.array for parameter in model.params()]


class Step:
    """Training step on a batch, as a function without arguments.

    Args:
        optimizer: optimizer of the model; is set up here.
        model, x: as :func:`model_of` returns them.
    """

    def __init__(self, optimizer: Any, model: Any, x: Array) -> None:
        optimizer.setup(model)
        self.optimizer, self.model, self._x = optimizer, model, x

    def loss(self) -> Any:
        """Compute the loss."""
        return F.mean(self.model(self._x) ** 2)

    def __call__(self) -> None:
        self.optimizer.update(self.loss)

    def backward(self) -> None:
        """Do the forward and the backward pass, without the optimizer's update."""
        loss = self.loss()
        self.model.cleargrads()
        loss.backward()


def train(
    comm: Communicator | None,
    model: Any,
    start: dict[str, Array],
    optimizer: str,
    batches: list[tuple[Array, Array, float]],
    reduce: Callable[[Any], Any] | None,
) -> dict[str, Array]:
    """Train a link from ``start`` and return its weights, as :func:`.torch.train` does.

    Chainer's Adam adds epsilon to the root of the uncorrected second moment (Kingma and Ba, 2015,
    end of section 2). PyTorch's adds it to the root of the corrected moment (algorithm 1). They
    agree if Chainer's epsilon is ``epsilon √(1 − β₂ᵗ)`` in step t, so this function sets it so.
    """
    actual = _begin(model, start, optimizer)
    stepper = actual if comm is None else create_multi_node_optimizer(actual, comm, reduce=reduce)
    stepper.setup(model)

    def loss(x: Array, y: Array, scale: float) -> Any:
        return _loss(model, x, y) * scale

    for step, batch in enumerate(batches, 1):
        _set_epsilon(actual, optimizer, step)
        stepper.update(loss, *batch)
    return weights.taken(weights.chainer_parameters(model))


def train_shards(
    comm: Communicator, model: Any, start: dict[str, Array], optimizer: str,
    batches: Sequence[Sequence[tuple[Array, Array]]], total: int,
) -> dict[str, Array]:  # fmt: skip
    """Train a link from ``start`` on virtual shards, and return its weights.

    The arguments are those of :func:`.torch.train_shards`.
    """
    actual = _begin(model, start, optimizer)
    stepper = create_multi_node_optimizer(actual, comm, shards=total)
    stepper.setup(model)
    for step, batch in enumerate(batches, 1):
        _set_epsilon(actual, optimizer, step)
        stepper.update(lambda shard, batch=batch: _loss(model, *batch[shard]))
    return weights.taken(weights.chainer_parameters(model))


def _begin(model: Any, start: dict[str, Array], optimizer: str) -> Any:
    """Set the weights of a link, in double precision; return its optimizer."""
    for parameter in model.params():
        if parameter.array is not None:
            parameter.array = parameter.array.astype(np.float64)
    weights.put(weights.chainer_parameters(model), start)
    kinds = {
        "sgd": lambda: chainer.optimizers.MomentumSGD(lr=0.05, momentum=0.9),
        "adam": lambda: chainer.optimizers.Adam(alpha=0.002, beta1=0.9, beta2=_BETA, eps=_EPSILON),
    }
    return kinds[optimizer]()


def _set_epsilon(actual: Any, optimizer: str, step: int) -> None:
    if optimizer == "adam":
        actual.hyperparam.eps = _EPSILON * math.sqrt(1 - _BETA**step)


def _loss(model: Any, x: Array, y: Array) -> Any:
    criterion = F.mean_squared_error if y.dtype.kind == "f" else F.softmax_cross_entropy
    return criterion(model(x), y if y.dtype.kind == "f" else y.astype(np.int32))


# -- the networks of collective.tools.parity.layers, in pieces ------------------------------------


def _convolved(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
        return function(x, weight, bias, layer.stride, layer.padding, dilate=layer.dilation)

    return apply


_FUNCTIONS = {
    "convolution": _convolved(F.convolution_2d),
    "transposed": _convolved(F.deconvolution_2d),
    "max": lambda layer, x: F.max_pooling_2d(x, layer.kernel, layer.stride, cover_all=False),
    "tanh": lambda layer, x: F.tanh(x),
}


class _Network(chainer.Link):  # type: ignore[misc]
    """Chain of layers."""

    def __init__(self, layers: Sequence[Layer], arrays: Mapping[str, Array]) -> None:
        super().__init__()
        self._layers = layers
        with self.init_scope():
            for name, array in arrays.items():
                if name != "x":
                    setattr(self, name, chainer.Parameter(array.copy()))

    def forward(self, x: Any) -> Any:
        """Return the last layer's result."""
        return forward(self._layers, x, _FUNCTIONS, functools.partial(getattr, self))


def gradients(layers: Sequence[Layer], arrays: Mapping[str, Array], **how: Any) -> dict[str, Array]:
    """Return what :func:`collective.tools.parity.layers.gradients` returns, computed in pieces.

    Args:
        layers, arrays: as in that function.
        how: keyword arguments of ``Split``.
    """
    network = _Network(layers, arrays)
    x = chainer.Variable(arrays["x"].copy())
    y = Split(network, **how)(x)
    (F.sum(y * y) / 2).backward()
    found = {"y": y.array, "x": x.grad}
    found |= {parameter.name: parameter.grad for parameter in network.params()}
    return {name: value for name, value in found.items() if value is not None}
