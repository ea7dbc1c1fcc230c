"""PyTorch modules for the tests of training/splits, which compute them in pieces.

The fixture ``of`` in split_frameworks.py gives this module to a test. split_models_chainer.py has
the same names for Chainer.
"""

from __future__ import annotations

import copy
import random
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
    """Two levels, with a concatenated skip, a residual sum, and padding for odd sizes."""

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
    """Pooling beyond the edge, resizing to a skip's size, and a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect")
        self.out = nn.Conv2d(4, 1, 2, stride=2, padding=1)

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = functional.avg_pool2d(a, 3, 2, 1, ceil_mode=True)
        b = functional.interpolate(b, size=a.shape[2:], mode="bilinear")
        return self.out((a * 2 + b)[:, :, 1:])


class Elsewhere(nn.Module):
    """Weights that are also used outside their layers."""

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


class Sorted(nn.Module):
    """Layer that calls a function without a rule for splits."""

    def forward(self, x: Any) -> Any:
        return torch.sort(torch.relu(x), dim=2).values * 2


class Differing(nn.Module):
    """Layer whose result differs when it is computed in pieces."""

    def forward(self, x: Any) -> Any:
        return x * functional.relu(x).detach() if type(x) is torch.Tensor else x * 3


def _tower(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*copy.deepcopy(layers))


#: Models for inputs of shape (2, 1, 21, 18).
MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "resized": Resized,
    "vgg": _tower(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)),
    ),
    "batch norm": lambda: UNet(nn.BatchNorm2d),
    "group norm": lambda: UNet(lambda channels: nn.GroupNorm(2, channels)),
    "instance norm": lambda: UNet(lambda channels: nn.InstanceNorm2d(channels, affine=True)),
}
#: Models for inputs of shape (2, 1, 10, 10).
SMALL: dict[str, Callable[[], nn.Module]] = {
    "pairs": _tower(
        *(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3, stride=2, bias=False), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)),
    ),
    "uneven": _tower(nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Conv2d(5, 7, 3), nn.Conv2d(7, 7, 2)),
    "fewer channels than ranks": _tower(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 5, 3), nn.Conv2d(5, 1, 1)),
    "groups": _tower(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 2)),
    "depthwise": _tower(
        *(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1)),
        nn.ConvTranspose2d(6, 6, 3, groups=6),
    ),
    "apart": _tower(  # Channels stay in four groups up to the last layer.
        *(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1, groups=8)),
        *(nn.Tanh(), nn.Conv2d(8, 16, 3, padding=1, groups=4), nn.Tanh()),
        *(nn.ConvTranspose2d(16, 8, 3, padding=1, groups=4), nn.Tanh(), nn.Conv2d(8, 1, 3)),
    ),
    "pooled": _tower(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        *(nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 1, 3, padding=1)),
    ),
    "norms": _tower(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Conv2d(4, 6, 3)),
        *(nn.GroupNorm(2, 6), nn.Conv2d(6, 2, 1)),
    ),
    "elsewhere": Elsewhere,
    "sorted": Sorted,
    "differing": _tower(nn.Conv2d(1, 2, 3), Differing(), nn.Conv2d(2, 1, 3)),
    "dropout": _tower(nn.Conv2d(1, 4, 3), nn.Dropout(0.4), nn.Conv2d(4, 1, 3)),
    "mask": lambda: nn.Dropout(0.5),
}
#: The function in "sorted" that has no rule for splits.
WITHOUT_A_RULE = "sort"


def made(name: str) -> tuple[nn.Module, Any]:
    """Return a model and its input, in float64, with equal values in all calls."""
    random = torch.Generator().manual_seed(7)  # Thread ranks share the global generator.
    rows = (21, 18) if name in MODELS else (10, 10)
    module = (MODELS | SMALL)[name]().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=random)
    return module, torch.randn(2, 1, *rows, dtype=torch.float64, generator=random)


def single(name: str) -> nn.Module:
    """Return a model in single precision."""
    return made(name)[0].float()


array = torch.from_numpy


def outcome(
    module: Any, x: Any, run: Callable[[Any], Any], shape: Any = None, rows: slice | None = None
) -> list[np.ndarray[Any, Any]]:
    """Return the output, the gradients of a forward and backward pass, and the buffers.

    Args:
        run: function that computes the output, or its ``rows``.
        shape: shape of the whole output.
        rows: rows of the whole output that ``run`` returns; all by default.
    """
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    shape = shape or y.shape
    weights = torch.linspace(-1, 2, int(np.prod(shape)), dtype=y.dtype).reshape(shape)
    (y * (weights if rows is None else weights[:, :, rows])).sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    results = [y.detach(), x.grad, *gradients, *module.buffers()]
    return [tensor.double().numpy().copy() for tensor in results]


def convolution(chance: random.Random, kernel: tuple[int, ...], **how: Any) -> Any:
    """Return a convolution of 4 to 8 channels, or a transposed one, with the axes of ``kernel``."""
    axes = len(kernel)
    if chance.random() < 0.5:
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    else:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
        most = [max(pair) - 1 for pair in zip(how["stride"], how["dilation"])]
        how["output_padding"] = tuple(chance.randint(0, each) for each in most)
    return kind(4, 8, kernel, **how).double()


def tower(chance: random.Random) -> nn.Module:
    """Return random layers, with groups, for inputs of shape (N, 4, H, W)."""
    layers: list[nn.Module] = []
    channels = 4
    for _ in range(chance.randint(2, 6)):
        made = chance.choice([4, 8, 12])
        groups = chance.choice([g for g in (1, 1, 2, 4) if not channels % g and not made % g])
        kind: Any = chance.choice([nn.Conv2d, nn.Conv2d, nn.ConvTranspose2d])
        kernel = chance.randint(1, 3)
        layers.append(kind(channels, made, kernel, padding=kernel // 2, groups=groups))
        layers += chance.choice([[], [nn.Tanh()], [nn.AvgPool2d(2, 1)], [nn.PReLU(made)]])
        channels = made
    return nn.Sequential(*layers).double()


def fits(layer: Any, x: Any) -> bool:
    """Return whether the layer has a non-empty result for that input."""
    try:
        found: bool = layer(x).numel() > 0
    except RuntimeError:  # The output would have no rows.
        return False
    return found


def inputs(*shape: int) -> Any:
    """Return a random input."""
    return torch.randn(*shape, dtype=torch.float64)


def seed(number: int) -> None:
    """Seed the framework's random numbers."""
    torch.manual_seed(number)


def unfitting() -> nn.Module:
    """Return two layers, of which the second expects more channels than the first outputs."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(5, 2, 3)).double()


def norm(channels: int) -> nn.Module:
    """Return a batch normalisation in float64."""
    return nn.BatchNorm2d(channels).double()


def padding() -> nn.Module:
    """Return convolutions that pad the data axes by one row at each end."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()),
        nn.Conv2d(8, 1, 3, padding=1),
    ).double()


# -- models of which each rank has only its filters ------------------------------------------


def split_of(comm: collective.Communicator, name: str, **how: Any) -> tuple[Split, Any]:
    """Return a model split with ``filters="own"``, and its input."""
    module, x = made(name)
    return Split(module, comm=comm, filters="own", **{"channels": comm.size, **how}), x


def state_of(module: Any) -> dict[str, Any]:
    """Return the whole state of a module, under the names of the unsplit module."""
    state = module.state_dict()
    return {name.removeprefix("module."): each.numpy() for name, each in state.items()}


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
    return {"y": y.detach().numpy(), "x": x.grad.numpy(), **state_of(module)}


def bytes_of(module: Any, x: Any) -> int:
    """Train a step; return the bytes of weights, gradients and momentum."""
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    module(x).sum().backward()
    optimizer.step()
    momentum = sum(optimizer.state[each]["momentum_buffer"].nbytes for each in module.parameters())
    return sum(each.nbytes + each.grad.nbytes for each in module.parameters()) + momentum


def doubled(path: Path) -> dict[str, Any]:
    """Write the state of a model with doubled weights; return its output and state."""
    module, x = made("pairs")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.save({f"module.{name}": each for name, each in module.state_dict().items()}, path)
    return {"y": module(x).detach().numpy(), **state_of(module)}


def loaded(comm: collective.Communicator, path: Path) -> dict[str, Any]:
    """Load the state of :func:`doubled` into a split model; return its output and state."""
    split, x = split_of(comm, "pairs")
    split.load_state_dict(torch.load(path))
    return {"y": split(x).detach().numpy(), **state_of(split)}


def _two(second: int = 4) -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(second, 4))


def _tied() -> nn.Module:
    module = _two()
    module[1].weight = module[0].weight
    return module


def _one_bias() -> nn.Module:
    module = _two(8)
    module[1].bias = module[0].bias
    return module


def _one_memory() -> nn.Module:
    module = _two()
    module[1].weight.data = module[0].weight.data
    return module


#: Models that cannot be split, and patterns of the errors.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tied": (_tied, r"0.weight and 1.weight are one parameter.*filters='all'"),
    "one bias": (_one_bias, r"0.bias and 1.bias are one parameter.*filters='all'"),
    "one memory": (_one_memory, r"0.weight and 1.weight are one parameter.*filters='all'"),
    "not made yet": (
        lambda: nn.Sequential(nn.LazyConv2d(4, 3)),
        "0 has no weights yet. Call the module once",
    ),
}


def part(split: Split) -> Any:
    """Return the module that a split holds on this rank."""
    return split.module


copied = copy.deepcopy


# -- on ranks that differ --------------------------------------------------------------------

#: The first parameters of "pairs", in the order in which they are compared.
NAMES = "0.weight", "0.bias", "2.weight"
#: The parameter that every rank holds completely, even with filters="own".
WHOLE = "7.bias"


class Scaled(nn.Module):
    """Layer with a second argument beside the tensor that is split."""

    def forward(self, x: Any, by: Any) -> Any:
        return x * by


def disturb(module: nn.Module, rank: int, name: str | None = None) -> None:
    """Change all parameters and buffers, or the parameter ``name``, by the rank's number."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    with torch.no_grad():
        for known, tensor in tensors:
            if name in (None, known):
                tensor.add_(rank)


def result(module: Any, x: Any) -> np.ndarray[Any, Any]:
    """Return the output of a model as a NumPy array."""
    found: np.ndarray[Any, Any] = module(x).detach().numpy()
    return found


def lazy(rank: int) -> nn.Module:
    """Return a model whose layers take their number of input channels from the first input."""
    module = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.LazyConv2d(2, 3)).double()

    def fill(layer: Any, args: Any) -> None:
        with torch.no_grad():
            layer.weight.fill_(rank + 1)

    for layer in (module[0], module[2]):
        layer.register_forward_pre_hook(fill)
    return module
