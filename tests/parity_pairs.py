"""Pairs of models for ``collective parity --model``: PyTorch's, Chainer's, and a step's batch."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import nn

import collective.adapters.chainer  # noqa: F401  # it makes the next line work

chainer: Any = importlib.import_module("chainer")

__all__ = ["make_alike", "make_unlike"]


class TorchNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fc1 = nn.Linear(5, 8)
        self.fc2 = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class ChainerNet(chainer.Chain):  # type: ignore[misc]
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation
        with self.init_scope():
            self.fc1 = chainer.links.Linear(5, 8)
            self.fc2 = chainer.links.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.fc2(self.activation(self.fc1(x)))


def batch(step: int) -> tuple[Any, Any]:
    random = np.random.default_rng(step)
    x = random.standard_normal((12, 5))
    return x, np.stack([x.sum(1), np.sin(x[:, 0])], 1)


def make_alike() -> tuple[Any, ...]:
    return TorchNet(), ChainerNet(chainer.functions.tanh), batch


def make_unlike() -> tuple[Any, ...]:
    return TorchNet(), ChainerNet(chainer.functions.sigmoid), batch
