"""Chainer links of which each rank has its own filters alone, for test_split_filters.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import collective
from collective.adapters.chainer.splits import Split

import chainer  # isort: skip  # by the adapter's leave
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

STEPS = 3


class UNet(chainer.Chain):
    """A skip by concatenation and a residual sum, so that channels are joined between layers."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.down = L.Convolution2D(1, 4, 3, pad=1)
            self.low = L.Convolution2D(4, 6, 3, pad=1)
            self.bottom = L.Convolution2D(6, 6, 3, pad=1)
            self.up = L.Deconvolution2D(6, 4, 2, 2)
            self.join = L.Convolution2D(8, 4, 3, pad=1)
            self.out = L.Convolution2D(4, 1, 1)

    def forward(self, x: Any) -> Any:
        a = F.tanh(self.down(x))
        b = F.tanh(self.low(F.max_pooling_2d(a, 2)))
        b = self.up(F.tanh(self.bottom(b)) + b)
        return self.out(F.tanh(self.join(F.concat([b, a], axis=1))))


class Elsewhere(chainer.Chain):
    """Weights that other functions than their layers' use."""

    def __init__(self) -> None:
        super().__init__()
        with self.init_scope():
            self.first, self.second = L.Convolution2D(1, 4, 3), L.Convolution2D(4, 4, 3)
            self.last = L.Linear(144, 5)

    def forward(self, x: Any) -> Any:
        x = F.tanh(F.convolution_2d(x, self.first.W * 2.0, self.first.b))
        x = self.second(x)
        x = x * F.broadcast_to(F.reshape(self.second.b, (1, -1, 1, 1)), x.shape)
        x = F.linear(self.last(x), F.transpose(self.last.W))
        return x + F.broadcast_to(F.sum(self.first.W), x.shape)


MODELS: dict[str, Callable[[], Any]] = {
    "pairs": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 6, 3), F.tanh, L.Convolution2D(6, 4, 3, 2, nobias=True), F.tanh),
        *(L.Linear(36, 8), F.tanh, L.Linear(8, 3)),
    ),
    "unet": UNet,
    "uneven": lambda: chainer.Sequential(
        *(L.ConvolutionND(2, 1, 5, 3), F.tanh, L.ConvolutionND(2, 5, 7, 3)),
        L.ConvolutionND(2, 7, 7, 2),
    ),
    "fewer channels than ranks": lambda: chainer.Sequential(
        L.Convolution2D(1, 2, 3), L.Convolution2D(2, 5, 3), L.Convolution2D(5, 1, 1)
    ),
    "groups": lambda: chainer.Sequential(
        L.Convolution2D(1, 4, 3), L.Convolution2D(4, 4, 3, groups=2), L.Convolution2D(4, 4, 2)
    ),
    "depthwise": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 4, 3), F.tanh, L.Convolution2D(4, 4, 3, groups=4)),
        *(L.Convolution2D(4, 6, 1), L.Deconvolution2D(6, 6, 3, groups=6)),
    ),
    "norms": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 4, 3), L.BatchNormalization(4), F.tanh, L.Convolution2D(4, 6, 3)),
        L.Convolution2D(6, 2, 1),
    ),
    "elsewhere": Elsewhere,
}


def made(name: str) -> tuple[Any, Any]:
    """Return a link and its input, float64, the same wherever this is called."""
    random = np.random.RandomState(7)
    with chainer.using_config("dtype", np.float64):
        link = MODELS[name]()
    for parameter in link.params():
        parameter.array[...] = random.randn(*parameter.shape) / 3
    return link, random.randn(2, 1, 10, 10)


def state_of(link: Any) -> dict[str, Any]:
    """Return what is serialized of a link, whole, under its own names."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(link)
    return {
        name.removeprefix("link/"): np.array(each)
        for name, each in serializer.target.items()
        if each is not None
    }


def trained(link: Any, x: Any) -> dict[str, Any]:
    """Train for some steps; return the last output, the input's gradient, and the state."""
    optimizer = chainer.optimizers.MomentumSGD(0.01, 0.9).setup(link)
    for _ in range(STEPS):
        given = chainer.Variable(x.copy())
        link.cleargrads()
        y = link(given)
        F.sum(y * np.linspace(-1, 2, y.size).reshape(y.shape)).backward()
        optimizer.update()
    return {"y": y.array, "x": given.grad, **state_of(link)}


def split_of(comm: collective.Communicator, name: str, **how: Any) -> tuple[Split, Any]:
    link, x = made(name)
    return Split(link, comm=comm, filters="own", **{"channels": comm.size, **how}), x


def bytes_of(link: Any, x: Any) -> int:
    """Train a step; return the bytes of weights, gradients and momentum."""
    optimizer = chainer.optimizers.MomentumSGD(0.01, 0.9).setup(link)
    link.cleargrads()
    F.sum(link(x)).backward()
    optimizer.update()
    return sum(
        each.array.nbytes + each.grad.nbytes + each.update_rule.state["v"].nbytes
        for each in link.params()
    )


def doubled(path: Path) -> tuple[Any, dict[str, Any]]:
    """Write the state of a model with other weights; return what it gives, and the state."""
    link, x = made("pairs")
    for parameter in link.params():
        parameter.array *= 2
    state = state_of(link)
    with path.open("wb") as file:
        np.savez(file, **{f"link/{name}": each for name, each in state.items()})
    return link(x).array, state


def loaded(comm: collective.Communicator, path: Path) -> tuple[Any, dict[str, Any]]:
    split, x = split_of(comm, "pairs")
    chainer.serializers.load_npz(path, split)
    return split(x).array, state_of(split)


def _tied() -> Any:
    link = chainer.Sequential(L.Linear(4, 4), L.Linear(4, 4))
    link[1].W = link[0].W
    return link


def _one_bias() -> Any:
    link = chainer.Sequential(L.Linear(4, 4), L.Linear(8, 4))
    link[1].b = link[0].b
    return link


def _one_array() -> Any:
    link = chainer.Sequential(L.Linear(4, 4), L.Linear(4, 4))
    link[1].W.array = link[0].W.array
    return link


#: What cannot be cut, and what is said of it.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tied": (_tied, "/0/W and /1/W are one parameter.*filters='all'"),
    "one bias": (_one_bias, "/0/b and /1/b are one parameter.*filters='all'"),
    "one array": (_one_array, "/0/W and /1/W are one parameter.*filters='all'"),
    "not made yet": (lambda: chainer.Sequential(L.Linear(None, 4)), "/0 .* has no weights yet"),
}


#: What is said of computing a rank's part by itself.
ALONE = "has this rank's filters alone"


def part(split: Split) -> Any:
    return split.link


def copied(link: Any) -> Any:
    return link.copy("copy")


def numpy_of(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x)
