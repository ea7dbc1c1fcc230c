"""The models in PyTorch: the parts of a timed step, the training, and networks in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from collective.adapters.torch import DistributedDataParallel, Split
from collective.communicator import Communicator
from collective.tools.bench.libraries import BenchLibrary, Call, Ours
from collective.tools.bench.rivals import Gloo
from collective.tools.parity import weights
from collective.tools.parity.layers import Layer, forward

__all__ = [
    "LeNet",
    "Perceptron",
    "gradients",
    "model_of",
    "step_of",
    "steps",
    "train",
    "train_shards",
]

Array = np.ndarray[Any, Any]


class LeNet(nn.Module):
    """LeCun et al., "Gradient-based learning applied to document recognition" (1998)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        h = functional.max_pool2d(torch.tanh(self.conv1(images)), 2)
        h = functional.max_pool2d(torch.tanh(self.conv2(h)), 2)
        h = torch.tanh(self.fc2(torch.tanh(self.fc1(h.flatten(1)))))
        scores: torch.Tensor = self.fc3(h)
        return scores


class Perceptron(nn.Module):
    """Perceptron with two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 64)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        h = torch.relu(self.fc2(torch.relu(self.fc1(images.flatten(1)))))
        scores: torch.Tensor = self.fc3(h)
        return scores


class _Residual(nn.Module):
    """Two convolutions and a shortcut; He et al., "Deep residual learning" (2016)."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)),
        )
        self.around = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.relu(self.body(x) + self.around(x))
        return out


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return ``"mlp"``, ``"lenet"`` or ``"resnet"`` (of ResNet-18's size), and a batch for it.

    The six layers of the MLP have 25 MB of gradients.
    """
    torch.manual_seed(0)
    if name == "mlp":
        layers = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers), torch.randn(64, 1024)
    if name == "lenet":
        return LeNet(), torch.randn(32, 1, 28, 28)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [_Residual(a, b) for a, b in itertools.pairwise(widths)]
    head = [nn.Conv2d(3, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*head, *blocks, *tail), torch.randn(4, 3, 32, 32)


def steps(library: BenchLibrary, name: str) -> tuple[dict[str, Call], list[Any]]:
    """Return the calls to time, and the parameters that the step updates.

    Returns:
        ``"compute"``, a step without communication. If the library communicates, also ``"step"``,
        with the gradients averaged over the ranks, and ``"sync"``, the all-reduce of as many
        bytes by itself.
    """
    torch.set_num_threads(1)
    plain, x = model_of(name)
    x = x + library.rank / 8  # every rank has different data
    calls = {"compute": step_of(plain, x)}
    wrapped: Any = plain
    if isinstance(library, Ours):
        comm = library.comm
        wrapped = DistributedDataParallel(model_of(name)[0], comm)
        flat = comm.empty(_count(plain), "float32", like=x)
        flat[:] = 0
        calls["sync"] = lambda: comm.all_reduce(flat, op="avg", out=flat)
    elif isinstance(library, Gloo):
        wrapped = nn.parallel.DistributedDataParallel(
            model_of(name)[0], gradient_as_bucket_view=True
        )
        zeros = torch.zeros(_count(plain))
        calls["sync"] = lambda: torch.distributed.all_reduce(zeros)
    if wrapped is not plain:
        calls["step"] = step_of(wrapped, x)
    return calls, [parameter.detach().numpy() for parameter in wrapped.parameters()]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def step_of(model: nn.Module, x: torch.Tensor, after: Call = lambda: None) -> Call:
    """Return a step of training on a batch; ``after`` follows its backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        after()
        optimizer.step()

    return step


def train(
    comm: Communicator | None,
    model: Any,
    start: dict[str, Array],
    optimizer: str,
    batches: list[tuple[Array, Array, float]],
    reduce: Callable[[Any], Any] | None,
) -> dict[str, Array]:
    """Train a module from ``start`` and return its weights.

    Args:
        comm: communicator of the replicas; None for one process.
        optimizer: ``"sgd"`` with momentum, or ``"adam"``.
        batches: inputs, targets, and the factor of this rank's mean loss.
        reduce: reduction of the gradients; None for the adapter's average.
    """
    stepper = _begin(model, start, optimizer)
    replica = model if comm is None else DistributedDataParallel(model, comm, reduce=reduce)
    for x, y, scale in batches:
        stepper.zero_grad()
        (_loss(replica, x, y) * scale).backward()
        stepper.step()
    return weights.taken(weights.torch_parameters(model))


def train_shards(
    comm: Communicator, model: Any, start: dict[str, Array], optimizer: str,
    batches: Sequence[Sequence[tuple[Array, Array]]], total: int,
) -> dict[str, Array]:  # fmt: skip
    """Train a module from ``start`` on virtual shards, and return its weights.

    Args:
        comm, optimizer: as in :func:`train`.
        batches: for each step the inputs and targets of each shard.
        total: number of shards.
    """
    stepper = _begin(model, start, optimizer)
    replica = DistributedDataParallel(model, comm, shards=total)
    for batch in batches:
        for shard in replica.each_shard():
            _loss(replica, *batch[shard]).backward()
        stepper.step()
    return weights.taken(weights.torch_parameters(model))


def _begin(model: Any, start: dict[str, Array], optimizer: str) -> torch.optim.Optimizer:
    """Set the weights of a module, in double precision; return its optimizer."""
    weights.put(weights.torch_parameters(model.double()), start)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.002, betas=(0.9, 0.999), eps=1e-8),
    }
    return kinds[optimizer](model.parameters())


def _loss(model: Any, x: Array, y: Array) -> Any:
    scores, targets = model(torch.from_numpy(x)), torch.from_numpy(y)
    criterion = functional.mse_loss if targets.is_floating_point() else functional.cross_entropy
    return criterion(scores, targets)


# -- the networks of collective.tools.parity.layers, in pieces ------------------------------------


def _convolved(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
        return function(x, weight, bias, layer.stride, layer.padding, dilation=layer.dilation)

    return apply


_FUNCTIONS = {
    "convolution": _convolved(functional.conv2d),
    "transposed": _convolved(functional.conv_transpose2d),
    "max": lambda layer, x: functional.max_pool2d(x, layer.kernel, layer.stride),
    "tanh": lambda layer, x: torch.tanh(x),
}


class _Network(nn.Module):  # type: ignore[misc, unused-ignore]
    """Chain of layers."""

    def __init__(self, layers: Sequence[Layer], arrays: Mapping[str, Array]) -> None:
        super().__init__()
        self._layers = layers
        self.weights = nn.ParameterDict(
            {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if name != "x"}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result."""
        y: torch.Tensor = forward(self._layers, x, _FUNCTIONS, self.weights.__getitem__)
        return y


def gradients(layers: Sequence[Layer], arrays: Mapping[str, Array], **how: Any) -> dict[str, Array]:
    """Return what :func:`collective.tools.parity.layers.gradients` returns, computed in pieces.

    Args:
        layers, arrays: as in that function.
        how: keyword arguments of ``Split``.
    """
    network = _Network(layers, arrays)
    x = torch.from_numpy(arrays["x"].copy()).requires_grad_()
    y = Split(network, **how)(x)
    (y.square().sum() / 2).backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: weight.grad for name, weight in network.weights.items()}
    return {name: value.numpy() for name, value in found.items() if value is not None}
