"""PyTorch modules to be computed in pieces, for test_splits.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from collective.adapters.torch import Split

__all__ = ["Split", "convolution", "fits", "inputs", "made", "outcome", "seed"]


class UNet(nn.Module):
    """Two levels: a skip by concatenation, a residual sum, odd sizes made to fit by padding."""

    def __init__(self, norm: Callable[[int], nn.Module] = lambda channels: nn.Identity()) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm(4), nn.ReLU(inplace=True))
        self.low = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.join = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = self.low(functional.max_pool2d(a, 2))
        b = self.up(torch.relu(self.bottom(b)) + b)
        missing = a.shape[3] - b.shape[3], a.shape[2] - b.shape[2]
        b = functional.pad(b, (0, missing[0], 0, missing[1]))
        return self.out(functional.relu(self.join(torch.cat([b, a], 1))))


class Resized(nn.Module):
    """Pooling that hangs over the end, resizing to a skip's size, and a mean over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect")
        self.out = nn.Conv2d(4, 1, 2, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = functional.avg_pool2d(a, 3, 2, 1, ceil_mode=True)
        b = functional.interpolate(b, size=a.shape[2:], mode="bilinear")
        return self.out((a * 2 + b)[:, :, 1:])


def vgg() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "resized": Resized,
    "vgg": vgg,
    "batch norm": lambda: UNet(nn.BatchNorm2d),
    "group norm": lambda: UNet(lambda channels: nn.GroupNorm(2, channels)),
    "instance norm": lambda: UNet(lambda channels: nn.InstanceNorm2d(channels, affine=True)),
}


def made(name: str) -> tuple[nn.Module, Any]:
    """Return a model and its input, float64, the same wherever this is called."""
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        return MODELS[name]().double(), torch.randn(2, 1, 21, 18, dtype=torch.float64)


def outcome(
    module: Any, x: Any, run: Callable[[Any], Any], shape: Any = None, rows: slice | None = None
) -> list[np.ndarray[Any, Any]]:
    """Return output, the gradients of a forward and backward pass, and buffers.

    Args:
        shape: of the whole output, of which ``run`` gives ``rows``.
    """
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    shape = shape or y.shape
    weights = torch.linspace(-1, 2, int(np.prod(shape)), dtype=y.dtype).reshape(shape)
    (y * (weights if rows is None else weights[:, :, rows])).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    found = [y.detach(), x.grad, *gradients, *module.buffers()]
    return [each.double().numpy().copy() for each in found]


def convolution(chance: random.Random, kernel: tuple[int, ...], **how: Any) -> Any:
    """Return one of four channels to eight, or a transposed one, of as many axes as ``kernel``."""
    axes = len(kernel)
    if chance.random() < 0.5:
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    else:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
        most = [max(pair) - 1 for pair in zip(how["stride"], how["dilation"])]
        how["output_padding"] = tuple(chance.randint(0, each) for each in most)
    return kind(4, 8, kernel, **how).double()


def fits(layer: Any, x: Any) -> bool:
    """Return whether the layer has a result of that input."""
    try:
        found: bool = layer(x).numel() > 0
    except RuntimeError:  # an output of no rows
        return False
    return found


def inputs(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


def seed(number: int) -> None:
    torch.manual_seed(number)
