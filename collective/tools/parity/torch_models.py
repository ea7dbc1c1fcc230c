"""LeNet and a perceptron in PyTorch, and the steps that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from collective.adapters.torch import DistributedDataParallel
from collective.communicator import Communicator

from . import weights

__all__ = ["LeNet", "Perceptron", "initial", "train"]

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
    """Two hidden layers."""

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


def initial(model: Any) -> dict[str, Array]:
    """Return a module's weights in double precision."""
    return weights.taken(weights.torch_parameters(model.double()))


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
        comm: the other replicas; None for one process.
        optimizer: ``"sgd"`` with momentum, or ``"adam"``.
        batches: inputs, targets, and what this rank's mean loss is multiplied by.
        reduce: of gradients; None for the adapter's own average.
    """
    model = model.double()
    weights.put(weights.torch_parameters(model), start)
    replica = model if comm is None else DistributedDataParallel(model, comm, reduce=reduce)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.002, betas=(0.9, 0.999), eps=1e-8),
    }
    stepper = kinds[optimizer](model.parameters())
    for x, y, scale in batches:
        stepper.zero_grad()
        scores, targets = replica(torch.from_numpy(x)), torch.from_numpy(y)
        criterion = functional.mse_loss if targets.is_floating_point() else functional.cross_entropy
        loss: Any = criterion(scores, targets) * scale
        loss.backward()
        stepper.step()
    return weights.taken(weights.torch_parameters(model))
