"""Chainer links to be computed in pieces, for test_splits.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from collective.adapters.chainer.splits import Split

import chainer  # isort: skip  # by the adapter's leave
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

__all__ = ["Split", "convolution", "fits", "inputs", "made", "outcome", "seed"]


class UNet(chainer.Chain):
    """Two levels: a skip by concatenation, a residual sum, odd sizes made to fit by a slice."""

    def __init__(self, norm: Callable[[int], Any] | None = None) -> None:
        super().__init__()
        with self.init_scope():
            self.down = L.Convolution2D(1, 4, 3, pad=1)
            self.norm = F.identity if norm is None else norm(4)
            self.low = L.Convolution2D(4, 8, 3, pad=1)
            self.bottom = L.Convolution2D(8, 8, 3, pad=1)
            self.up = L.Deconvolution2D(8, 4, 2, 2)
            self.join = L.Convolution2D(8, 4, 3, pad=1)
            self.out = L.Convolution2D(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = F.relu(self.norm(self.down(x)))
        b = F.relu(self.low(F.max_pooling_2d(a, 2)))
        b = self.up(F.relu(self.bottom(b)) + b)[:, :, : a.shape[2], : a.shape[3]]
        return self.out(F.relu(self.join(F.concat([b, a], axis=1))))


class Resized(chainer.Chain):
    """Padding, pooling by means, unpooling to a skip's size, and a slice."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.down = L.Convolution2D(1, 4, 3, pad=1)
            self.out = L.Convolution2D(4, 1, 2, stride=2, pad=1)

    def forward(self, x: Any) -> Any:
        a = self.down(F.pad(x, ((0, 0), (0, 0), (1, 2), (0, 0)), "constant"))
        b = F.average_pooling_2d(a, 3, 2, 1)
        b = F.unpooling_2d(b, 2, outsize=a.shape[2:])
        return self.out((a * 2 + b)[:, :, 1:])


def vgg() -> Any:
    return chainer.Sequential(
        *(L.Convolution2D(1, 4, 3, pad=1), F.relu, partial(F.max_pooling_2d, ksize=2)),
        *(L.Convolution2D(4, 8, 3, pad=1), F.relu),
        partial(F.max_pooling_2d, ksize=3, stride=2, pad=1),
        *(L.Linear(8 * 6 * 5, 16), F.tanh, L.Linear(16, 3)),
    )


MODELS: dict[str, Callable[[], Any]] = {
    "unet": UNet,
    "resized": Resized,
    "vgg": vgg,
    "batch norm": lambda: UNet(L.BatchNormalization),
    "group norm": lambda: UNet(lambda channels: L.GroupNormalization(2, channels)),
    "instance norm": lambda: UNet(lambda channels: L.GroupNormalization(channels, channels)),
}


def made(name: str) -> tuple[Any, Any]:
    """Return a link and its input, float64, the same wherever this is called."""
    random_numbers = np.random.RandomState(7)
    with chainer.using_config("dtype", np.float64):
        link = MODELS[name]()
    for parameter in link.params():
        parameter.array[...] = random_numbers.randn(*parameter.shape) / 3
    return link, random_numbers.randn(2, 1, 21, 18)


def outcome(
    link: Any, x: Any, run: Callable[[Any], Any], shape: Any = None, rows: slice | None = None
) -> list[np.ndarray[Any, Any]]:
    """Return output, the gradients of a forward and backward pass, and statistics.

    Args:
        shape: of the whole output, of which ``run`` gives ``rows``.
    """
    link.cleargrads()
    x = chainer.Variable(x.copy())
    y = run(x)
    shape = shape or y.shape
    weights = np.linspace(-1, 2, int(np.prod(shape))).reshape(shape)
    F.sum(y * (weights if rows is None else weights[:, :, rows])).backward()
    kept = [array for path, array in sorted(_persistent(link))]
    return [y.array, x.grad, *(p.grad for p in link.params() if p.grad is not None), *kept]


def _persistent(link: Any) -> Iterator[tuple[str, Any]]:
    for path, child in link.namedlinks():
        for name in child._persistent:
            value = getattr(child, name)
            if isinstance(value, np.ndarray):
                yield f"{path}/{name}", value.copy()


def convolution(chance: random.Random, kernel: tuple[int, ...], **how: Any) -> Any:
    """Return one of four channels to eight, or a transposed one, of as many axes as ``kernel``."""
    kind: Any = L.ConvolutionND if chance.random() < 0.5 else L.DeconvolutionND
    named = {"pad": how["padding"], "dilate": how["dilation"], "groups": how["groups"]}
    with chainer.using_config("dtype", np.float64):
        return kind(len(kernel), 4, 8, kernel, stride=how["stride"], **named)


def fits(layer: Any, x: Any) -> bool:
    """Return whether the layer has a result of that input."""
    try:
        found: bool = layer(x).size > 0
    except (AssertionError, ValueError):  # an output of no rows
        return False
    return found


def inputs(*shape: int) -> Any:
    return np.random.randn(*shape)


def seed(number: int) -> None:
    np.random.seed(number)
