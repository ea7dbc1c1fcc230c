"""U-Net that distinguishes ink from paper; each rank computes a part of every picture's rows.

::

    collective run -n 2 --backend shm examples/segment.py   # one half on each rank
    python examples/segment.py                              # eight stripes in turn

The U-Net's code does not deal with ranks or stripes: ``Split`` computes the network in pieces, with
the exact result. At the end one process trains the whole U-Net, and the program compares the
weights.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from typing import Any

import torch
from collages import (
    CLASSES,
    WEIGHTS,
    Collages,
    Outcome,
    arguments,
    difference,
    load_digits,
    report,
)
from torch import nn
from torch.nn import functional

import collective
from collective.adapters.torch import Split

STRIPES = 8


class UNet(nn.Module):
    """U-Net of Ronneberger et al., "U-Net" (2015), with two levels and few channels.

    Args:
        width: channels of the first level.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.second_up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.second_back = block(4 * width, 2 * width)
        self.first_up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.first_back = block(2 * width, width)
        self.scores = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, ``[n, 3, rows, columns]``, of collages ``[n, 1, rows, columns]``."""
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        bottom = self.bottom(functional.max_pool2d(second, 2))
        second = self.second_back(torch.cat([self.second_up(bottom), second], 1))
        first = self.first_back(torch.cat([self.first_up(second), first], 1))
        return self.scores(first)


def block(channels: int, width: int) -> nn.Module:
    """Return a block of two convolutions."""
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()),
    )


def train(model: nn.Module, digits: Any, options: argparse.Namespace) -> tuple[list[float], float]:
    """Train; return the losses of all steps, and the seconds of all steps except the first."""
    collages = Collages(digits, options.rows, options.seed)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, options.momentum)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    losses, began = [], time.perf_counter()
    for _ in range(options.steps):
        x, classes = (torch.from_numpy(array) for array in collages.draw(options.batch))
        loss = functional.cross_entropy(model(x), classes, weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not losses:
            began = time.perf_counter()
        losses.append(loss.item())
    return losses, time.perf_counter() - began


def main() -> int:
    """Train in pieces and as a whole, and report both; return 1 if the weights differ."""
    options = arguments("A U-Net in pieces, on collages of digits.", "segment.png")
    torch.set_num_threads(1)
    with collective.init() as comm:
        torch.manual_seed(options.seed)
        whole = UNet(options.width).double()
        for weight in whole.state_dict().values():
            # Ranks that are threads share one generator, so their random weights differ.
            comm.broadcast(weight, out=weight)
        model = copy.deepcopy(whole)
        if comm.size > 1:
            split, how = Split(model, data=(comm.size,), comm=comm), "a part on each rank"
        else:
            split, how = Split(model, data=(STRIPES,)), "eight stripes in turn"

        digits = load_digits(comm)
        losses, seconds = train(split, digits, options)
        collage, classes = Collages(digits, options.rows, options.seed + 1).draw(1)
        x = torch.from_numpy(collage)
        learnt = split(x).argmax(1).numpy()
        memory = split.memory_report(x.expand(options.batch, *x.shape[1:]))

        def train_alone() -> tuple[float, float]:
            _, alone = train(whole, digits, options)
            states = (each.state_dict().values() for each in (model, whole))
            return alone, difference(*states)

        outcome = Outcome(how, losses, seconds, collage, classes, learnt, memory)
        return report(comm, outcome, options.output, train_alone)


if __name__ == "__main__":
    sys.exit(main())
