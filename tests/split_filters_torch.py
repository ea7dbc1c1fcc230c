"""PyTorch modules of which each rank has its own filters alone, for test_split_filters.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import collective
from collective.adapters.torch import Split

STEPS = 3


class UNet(nn.Module):
    """A skip by concatenation and a residual sum, so that channels are joined between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1)
        self.low = nn.Conv2d(4, 6, 3, padding=1)
        self.bottom = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.join = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = torch.tanh(self.down(x))
        b = torch.tanh(self.low(functional.max_pool2d(a, 2)))
        b = self.up(torch.tanh(self.bottom(b)) + b)
        return self.out(torch.tanh(self.join(torch.cat([b, a], 1))))


class Elsewhere(nn.Module):
    """Weights that other functions than their layers' use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)
        self.last = nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        scaled = self.first.weight / self.first.weight.norm()
        x = torch.tanh(functional.conv2d(x, scaled, self.first.bias))
        x = self.second(x) * self.second.bias.reshape(-1, 1, 1)
        assert self.last.weight.shape == (5, 6)
        x = functional.linear(self.last(x), self.last.weight.T)
        return x + self.first.weight.sum()


def _tower(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(layers))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pairs": _tower(
        *(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2, bias=False), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)),
    ),
    "unet": UNet,
    "uneven": _tower(nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Conv2d(5, 7, 3), nn.Conv2d(7, 7, 2)),
    "fewer channels than ranks": _tower(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 5, 3), nn.Conv2d(5, 1, 1)),
    "groups": _tower(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 2)),
    "depthwise": _tower(
        *(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1)),
        nn.ConvTranspose2d(6, 6, 3, groups=6),
    ),
    "norms": _tower(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Conv2d(4, 6, 3)),
        *(nn.GroupNorm(2, 6), nn.Conv2d(6, 2, 1)),
    ),
    "elsewhere": Elsewhere,
}


def made(name: str) -> tuple[nn.Module, Any]:
    """Return a model and its input, float64, the same wherever this is called."""
    random = torch.Generator().manual_seed(7)  # ranks that are threads share the global one
    module = MODELS[name]().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return module, torch.randn(2, 1, 10, 10, dtype=torch.float64, generator=random)


def trained(module: Any, x: Any) -> dict[str, Any]:
    """Train for some steps; return the last output, the input's gradient, and the state."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    x = x.clone().requires_grad_()
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = module(x)
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
        (y * weights).sum().backward()
        optimizer.step()
    state = {name.removeprefix("module."): each for name, each in module.state_dict().items()}
    return {"y": y.detach(), "x": x.grad, **state}


def split_of(comm: collective.Communicator, name: str, **how: Any) -> tuple[Split, Any]:
    module, x = made(name)
    return Split(
        module, channels=how.pop("channels", comm.size), comm=comm, filters="own", **how
    ), x


def bytes_of(module: Any, x: Any) -> int:
    """Train a step; return the bytes of weights, gradients and momentum."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    module(x).sum().backward()
    optimizer.step()
    momentum = sum(optimizer.state[each]["momentum_buffer"].nbytes for each in module.parameters())
    return sum(each.nbytes + each.grad.nbytes for each in module.parameters()) + momentum


def doubled(path: Path) -> tuple[Any, dict[str, Any]]:
    """Write the state of a model with other weights; return what it gives, and the state."""
    module, x = made("pairs")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    state = module.state_dict()
    torch.save({f"module.{name}": each for name, each in state.items()}, path)
    return module(x).detach(), state


def loaded(comm: collective.Communicator, path: Path) -> tuple[Any, dict[str, Any]]:
    split, x = split_of(comm, "pairs")
    split.load_state_dict(torch.load(path))
    return split(x).detach(), split.module.state_dict()


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    return module


def _one_bias() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 4))
    module[1].bias = module[0].bias
    return module


def _one_memory() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight.data = module[0].weight.data
    return module


#: What cannot be cut, and what is said of it.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tied": (_tied, r"0.weight and 1.weight are one parameter.*filters='all'"),
    "one bias": (_one_bias, r"0.bias and 1.bias are one parameter.*filters='all'"),
    "one memory": (_one_memory, r"0.weight and 1.weight are one parameter.*filters='all'"),
    "not made yet": (
        lambda: nn.Sequential(nn.LazyConv2d(4, 3)),
        "0 has no weights yet. Call the module once",
    ),
}
#: What is said of computing a rank's part by itself.
ALONE = "0 has this rank's filters alone"


def part(split: Split) -> Any:
    return split.module


def copied(module: Any) -> Any:
    return copy.deepcopy(module)


def numpy_of(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x.detach().numpy())
