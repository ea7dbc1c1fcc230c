"""The models of training steps, in PyTorch, and what a step of them is made of."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from .libraries import Call, Library, Ours
from .rivals import Gloo

__all__ = ["model_of", "steps"]


class _Residual(nn.Module):
    """Two convolutions and a way around; He et al., "Deep residual learning" (2016)."""

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
    """Return ``"mlp"``, ``"lenet"`` or ``"resnet"`` (of ResNet-18's size), and a batch for it."""
    torch.manual_seed(0)
    if name == "mlp":  # 25 MB of gradients
        layers = [part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.ReLU())]
        return nn.Sequential(*layers), torch.randn(64, 1024)
    if name == "lenet":
        made = nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
        )
        return made, torch.randn(32, 1, 28, 28)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [_Residual(a, b) for a, b in itertools.pairwise(widths)]
    head = [nn.Conv2d(3, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU()]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*head, *blocks, *tail), torch.randn(4, 3, 32, 32)


def steps(library: Library, name: str) -> tuple[dict[str, Call], list[Any]]:
    """Return what is timed, and the parameters that the step updates.

    Returns:
        ``"step"``, with the gradients averaged over the ranks, and ``"sync"``, the all-reduce of
        as many bytes by itself, where the library communicates; ``"compute"``, a step without.
    """
    torch.set_num_threads(1)
    plain, x = model_of(name)
    x = x + library.rank / 8  # every rank has data of its own
    calls = {"compute": _step(plain, x)}
    wrapped: Any = plain
    if isinstance(library, Ours):
        from collective.adapters.torch import DistributedDataParallel

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
        calls["step"] = _step(wrapped, x)
    return calls, [parameter.detach().numpy() for parameter in wrapped.parameters()]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _step(model: nn.Module, x: torch.Tensor) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step
