"""The U-Net of ``segment.py`` in Chainer; each rank computes a part of every picture's rows.

::

    collective run -n 2 --backend shm examples/segment_chainer.py   # one half on each rank
    python examples/segment_chainer.py                              # eight stripes in turn

NumPy's BLAS uses all cores. With several ranks on a machine, set ``OPENBLAS_NUM_THREADS=1`` first.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import numpy as np
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

import collective
from collective.adapters.chainer import Split

import chainer  # isort: skip  # importable because of the adapter
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

STRIPES = 8


class UNet(chainer.Chain):
    """U-Net of Ronneberger et al., "U-Net" (2015), with two levels and few channels.

    Args:
        width: channels of the first level.
        seed: seed of the initial weights.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        # Use a separate generator, because ranks that are threads share NumPy's global one.
        drawn = chainer.initializers.HeNormal(rng=np.random.RandomState(seed))

        def up(channels: int) -> L.Deconvolution2D:
            return L.Deconvolution2D(2 * channels, channels, 2, 2, initialW=drawn)

        with self.init_scope():
            self.first, self.second = Block(1, width, drawn), Block(width, 2 * width, drawn)
            self.bottom = Block(2 * width, 4 * width, drawn)
            self.second_up, self.first_up = up(2 * width), up(width)
            self.second_back = Block(4 * width, 2 * width, drawn)
            self.first_back = Block(2 * width, width, drawn)
            self.scores = L.Convolution2D(width, len(CLASSES), 1, initialW=drawn)

    def forward(self, x: Any) -> Any:
        """Return scores, ``[n, 3, rows, columns]``, of collages ``[n, 1, rows, columns]``."""
        first = self.first(x)
        second = self.second(F.max_pooling_2d(first, 2))
        bottom = self.bottom(F.max_pooling_2d(second, 2))
        second = self.second_back(F.concat([self.second_up(bottom), second]))
        first = self.first_back(F.concat([self.first_up(second), first]))
        return self.scores(first)


class Block(chainer.Chain):
    """Block of two convolutions.

    Args:
        channels: number of input channels.
        width: number of output channels.
        drawn: initialiser of the weights.
    """

    def __init__(self, channels: int, width: int, drawn: Any) -> None:
        super().__init__()
        with self.init_scope():
            self.first = L.Convolution2D(channels, width, 3, pad=1, initialW=drawn)
            self.second = L.Convolution2D(width, width, 3, pad=1, initialW=drawn)

    def forward(self, x: Any) -> Any:
        """Return ``[n, width, rows, columns]`` of ``[n, channels, rows, columns]``."""
        return F.relu(self.second(F.relu(self.first(x))))


def train(
    model: chainer.Link, digits: Any, options: argparse.Namespace
) -> tuple[list[float], float]:
    """Train; return the losses of all steps, and the seconds of all steps except the first."""
    collages = Collages(digits, options.rows, options.seed)
    optimizer = chainer.optimizers.MomentumSGD(options.lr, options.momentum).setup(model)
    losses, began = [], time.perf_counter()
    for _ in range(options.steps):
        x, classes = collages.draw(options.batch)
        loss = F.softmax_cross_entropy(
            model(x), classes.astype(np.int32), class_weight=np.array(WEIGHTS)
        )
        model.cleargrads()
        loss.backward()
        optimizer.update()
        if not losses:
            began = time.perf_counter()
        losses.append(float(loss.array))
    return losses, time.perf_counter() - began


def main() -> int:
    """Train in pieces and as a whole, and report both; return 1 if the weights differ."""
    options = arguments("A U-Net in pieces, in Chainer.", "segment_chainer.png")
    with collective.init() as comm:
        with chainer.using_config("dtype", np.float64):
            model, whole = (UNet(options.width, options.seed) for _ in range(2))
        if comm.size > 1:
            split, how = Split(model, data=(comm.size,), comm=comm), "a part on each rank"
        else:
            split, how = Split(model, data=(STRIPES,)), "eight stripes in turn"

        digits = load_digits(comm)
        losses, seconds = train(split, digits, options)
        collage, classes = Collages(digits, options.rows, options.seed + 1).draw(1)
        learnt = split(collage).array.argmax(1)
        memory = split.memory_report(collage.repeat(options.batch, 0))

        def train_alone() -> tuple[float, float]:
            _, alone = train(whole, digits, options)
            arrays = ([each.array for each in link.params()] for link in (model, whole))
            return alone, difference(*arrays)

        outcome = Outcome(how, losses, seconds, collage, classes, learnt, memory)
        return report(comm, outcome, options.output, train_alone)


if __name__ == "__main__":
    sys.exit(main())
