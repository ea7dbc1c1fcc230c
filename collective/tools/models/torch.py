"""The models in PyTorch, with their steps and their training."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from collective import Communicator
from collective.adapters.torch import DistributedDataParallel
from collective.tools.models import networks
from collective.tools.models.networks import Layer

__all__ = ["Network", "model_of", "step_of", "train"]

Array = np.ndarray[Any, Any]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "convolution": lambda layer, x, w, b: functional.conv2d(x, w, b, padding=layer.padding),
    "max": lambda layer, x: functional.max_pool2d(x, layer.kernel, layer.stride),
    "linear": lambda layer, x, *weights: functional.linear(x.flatten(1), *weights),
    "tanh": lambda layer, x: torch.tanh(x),
    "relu": lambda layer, x: torch.relu(x),
}


class Network(nn.Module):  # type: ignore[misc, unused-ignore]
    """Chain of layers with copies of ``weights``, by name."""

    def __init__(self, layers: Sequence[Layer], weights: Mapping[str, Array]) -> None:
        super().__init__()
        self._layers = layers
        for name, array in weights.items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(array.copy())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result."""
        y: torch.Tensor = networks.forward(
            self._layers, x, _FUNCTIONS, functools.partial(getattr, self)
        )
        return y


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


def model_of(name: str) -> nn.Module:
    """Return ``"mlp"``, ``"lenet"`` or ``"resnet"``, always with the same weights."""
    if name in networks.TIMED:
        layers = networks.TIMED[name]
        return Network(layers, networks.weights(layers, 0, "float32"))
    torch.manual_seed(0)
    blocks = [_Residual(a, b) for a, b in itertools.pairwise(networks.RESNET)]
    head = [nn.Conv2d(3, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*head, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a step of training on a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def train(
    comm: Communicator | None, model: Any, start: dict[str, Array], optimizer: str,
    batches: Sequence[networks.Batch], **how: Any,
) -> dict[str, Array]:  # fmt: skip
    """Train a module from ``start`` and return its weights.

    Args:
        comm: communicator of the replicas; None for one process.
        optimizer: ``"sgd"`` with momentum, or ``"adam"``.
        batches: this rank's parts of each batch: its share, or all virtual shards.
        how: ``reduce`` or ``shards`` of ``DistributedDataParallel``, or nothing.
    """
    stepper = _begin(model, start, optimizer)
    replica = model if comm is None else DistributedDataParallel(model, comm, **how)
    for batch in batches:
        stepper.zero_grad()
        for shard in replica.each_shard() if "shards" in how else [0]:
            x, y, scale = batch[shard]
            (_loss(replica, x, y) * scale).backward()
        stepper.step()
    return networks.taken(networks.torch_parameters(model))


def _begin(model: Any, start: dict[str, Array], optimizer: str) -> torch.optim.Optimizer:
    """Set the weights of a module, in double precision; return its optimizer."""
    networks.put(networks.torch_parameters(model.double()), start)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.002, betas=(0.9, 0.999), eps=1e-8),
    }
    return kinds[optimizer](model.parameters())


def _loss(model: Any, x: Array, y: Array) -> Any:
    scores, targets = model(torch.from_numpy(x)), torch.from_numpy(y)
    criterion = functional.mse_loss if targets.is_floating_point() else functional.cross_entropy
    return criterion(scores, targets)
