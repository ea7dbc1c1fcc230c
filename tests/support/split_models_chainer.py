"""Chainer links for the tests of training/splits, which compute them in pieces.

The fixture ``of`` in split_frameworks.py gives this module to a test. split_models_torch.py has the
same names for PyTorch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import collective
from collective.adapters.chainer.splits import Split

import chainer  # isort: skip  # The adapter makes this import work.
import chainer.functions as F  # isort: skip
import chainer.links as L  # isort: skip

STEPS = 3


class UNet(chainer.Chain):
    """Two levels, with a concatenated skip, a residual sum, and a slice for odd sizes."""

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


class Elsewhere(chainer.Chain):
    """Weights that are also used outside their layers."""

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


class Differing(chainer.Link):
    """Layer whose result differs when it is computed in pieces."""

    def forward(self, x: Any) -> Any:
        return x * (2.0 if type(x) is chainer.Variable else 3.0)


#: Models for inputs of shape (2, 1, 21, 18).
MODELS: dict[str, Callable[[], Any]] = {
    "unet": UNet,
    "resized": Resized,
    "vgg": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 4, 3, pad=1), F.relu, partial(F.max_pooling_2d, ksize=2)),
        *(L.Convolution2D(4, 8, 3, pad=1), F.relu),
        partial(F.max_pooling_2d, ksize=3, stride=2, pad=1),
        *(L.Linear(8 * 6 * 5, 16), F.tanh, L.Linear(16, 3)),
    ),
    "batch norm": lambda: UNet(L.BatchNormalization),
    "group norm": lambda: UNet(lambda channels: L.GroupNormalization(2, channels)),
    "instance norm": lambda: UNet(lambda channels: L.GroupNormalization(channels, channels)),
}
#: Models for inputs of shape (2, 1, 10, 10).
SMALL: dict[str, Callable[[], Any]] = {
    "pairs": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 6, 3), F.tanh, L.Convolution2D(6, 4, 3, 2, nobias=True), F.tanh),
        *(L.Linear(36, 8), F.tanh, L.Linear(8, 3)),
    ),
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
    "apart": lambda: chainer.Sequential(  # Channels stay in four groups up to the last layer.
        *(L.Convolution2D(1, 8, 3, pad=1), F.tanh, L.Convolution2D(8, 8, 3, pad=1, groups=8)),
        *(F.tanh, L.Convolution2D(8, 16, 3, pad=1, groups=4), F.tanh),
        *(L.Deconvolution2D(16, 8, 3, pad=1, groups=4), F.tanh, L.Convolution2D(8, 1, 3)),
    ),
    "pooled": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 8, 3, pad=1), F.relu, L.Convolution2D(8, 8, 3, pad=1), F.relu),
        *(partial(F.max_pooling_2d, ksize=2), L.Convolution2D(8, 8, 3, pad=1), F.relu),
        *(L.Deconvolution2D(8, 8, 2, 2), L.Convolution2D(8, 1, 3, pad=1)),
    ),
    "norms": lambda: chainer.Sequential(
        *(L.Convolution2D(1, 4, 3), L.BatchNormalization(4), F.tanh, L.Convolution2D(4, 6, 3)),
        L.Convolution2D(6, 2, 1),
    ),
    "elsewhere": Elsewhere,
    "sorted": lambda: chainer.Sequential(F.relu, lambda x: F.flip(x, 2), F.relu),
    "differing": lambda: chainer.Sequential(
        L.Convolution2D(1, 2, 3), Differing(), L.Convolution2D(2, 1, 3)
    ),
    "dropout": lambda: chainer.Sequential(
        L.Convolution2D(1, 4, 3), partial(F.dropout, ratio=0.4), L.Convolution2D(4, 1, 3)
    ),
    "mask": lambda: chainer.Sequential(F.dropout),
}
#: The function in "sorted" that has no rule for splits.
WITHOUT_A_RULE = "Flip"


def made(name: str) -> tuple[Any, Any]:
    """Return a link and its input, in float64, with equal values in all calls."""
    random_numbers = np.random.RandomState(7)
    with chainer.using_config("dtype", np.float64):
        link = (MODELS | SMALL)[name]()
    for parameter in link.params():
        parameter.array[...] = random_numbers.randn(*parameter.shape) / 3
    return link, random_numbers.randn(2, 1, *((21, 18) if name in MODELS else (10, 10)))


def single(name: str) -> Any:
    """Return a link in single precision."""
    with chainer.using_config("dtype", np.float32):
        return MODELS[name]()


array = np.asarray


def outcome(
    link: Any, x: Any, run: Callable[[Any], Any], shape: Any = None, rows: slice | None = None
) -> list[np.ndarray[Any, Any]]:
    """Return the output, the gradients of a forward and backward pass, and the statistics.

    Args:
        run: function that computes the output, or its ``rows``.
        shape: shape of the whole output.
        rows: rows of the whole output that ``run`` returns; all by default.
    """
    link.cleargrads()
    x = chainer.Variable(x.copy())
    y = run(x)
    shape = shape or y.shape
    weights = np.linspace(-1, 2, int(np.prod(shape))).reshape(shape)
    F.sum(y * (weights if rows is None else weights[:, :, rows])).backward()
    statistics = [array for path, array in sorted(_persistent(link))]
    return [y.array, x.grad, *(p.grad for p in link.params() if p.grad is not None), *statistics]


def _persistent(link: Any) -> Iterator[tuple[str, Any]]:
    for path, child in link.namedlinks():
        for name in child._persistent:
            value = getattr(child, name)
            if isinstance(value, np.ndarray):
                yield f"{path}/{name}", value.copy()


def convolution(chance: random.Random, kernel: tuple[int, ...], **how: Any) -> Any:
    """Return a convolution of 4 to 8 channels, or a transposed one, with the axes of ``kernel``."""
    kind: Any = L.ConvolutionND if chance.random() < 0.5 else L.DeconvolutionND
    named = {"pad": how["padding"], "dilate": how["dilation"], "groups": how["groups"]}
    with chainer.using_config("dtype", np.float64):
        return kind(len(kernel), 4, 8, kernel, stride=how["stride"], **named)


def tower(chance: random.Random) -> Any:
    """Return random layers, with groups, for inputs of shape (N, 4, H, W)."""
    layers: list[Any] = []
    channels = 4
    with chainer.using_config("dtype", np.float64):
        for _ in range(chance.randint(2, 6)):
            made = chance.choice([4, 8, 12])
            groups = chance.choice([g for g in (1, 1, 2, 4) if not channels % g and not made % g])
            kind = chance.choice([L.Convolution2D, L.Convolution2D, L.Deconvolution2D])
            kernel = chance.randint(1, 3)
            layers.append(kind(channels, made, kernel, pad=kernel // 2, groups=groups))
            pool = partial(F.average_pooling_2d, ksize=2, stride=1)
            layers += chance.choice([[], [F.tanh], [pool], [F.leaky_relu]])
            channels = made
        return chainer.Sequential(*layers)


def fits(layer: Any, x: Any) -> bool:
    """Return whether the layer has a non-empty result for that input."""
    try:
        found: bool = layer(x).size > 0
    except (AssertionError, ValueError):  # The output would have no rows.
        return False
    return found


def inputs(*shape: int) -> Any:
    """Return a random input."""
    return np.random.randn(*shape)


def seed(number: int) -> None:
    """Seed the framework's random numbers."""
    np.random.seed(number)


def unfitting() -> Any:
    """Return two layers, of which the second expects more channels than the first outputs."""
    with chainer.using_config("dtype", np.float64):
        return chainer.Sequential(L.Convolution2D(1, 4, 3), F.relu, L.Convolution2D(5, 2, 3))


def norm(channels: int) -> Any:
    """Return a batch normalisation in float64."""
    with chainer.using_config("dtype", np.float64):
        return L.BatchNormalization(channels)


def padding() -> Any:
    """Return convolutions that pad the data axes by one row at each end."""
    with chainer.using_config("dtype", np.float64):
        return chainer.Sequential(
            *(L.Convolution2D(1, 8, 3, pad=1), F.relu, L.Convolution2D(8, 8, 3, pad=1), F.relu),
            L.Convolution2D(8, 1, 3, pad=1),
        )


# -- models of which each rank has only its filters ------------------------------------------


def state_of(link: Any) -> dict[str, Any]:
    """Return the whole serialised state of a link, under the names of the unsplit link."""
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
        variable = chainer.Variable(x.copy())
        link.cleargrads()
        y = link(variable)
        F.sum(y * np.linspace(-1, 2, y.size).reshape(y.shape)).backward()
        optimizer.update()
    return {"y": y.array, "x": variable.grad, **state_of(link)}


def split_of(comm: collective.Communicator, name: str, **how: Any) -> tuple[Split, Any]:
    """Return a model split with ``filters="own"``, and its input."""
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


def doubled(path: Path) -> dict[str, Any]:
    """Write the state of a model with doubled weights; return its output and state."""
    link, x = made("pairs")
    for parameter in link.params():
        parameter.array *= 2
    state = state_of(link)
    with path.open("wb") as file:
        np.savez(file, **{f"link/{name}": each for name, each in state.items()})
    return {"y": link(x).array, **state}


def loaded(comm: collective.Communicator, path: Path) -> dict[str, Any]:
    """Load the state of :func:`doubled` into a split model; return its output and state."""
    split, x = split_of(comm, "pairs")
    chainer.serializers.load_npz(path, split)
    return {"y": split(x).array, **state_of(split)}


def _two(second: int = 4) -> Any:
    return chainer.Sequential(L.Linear(4, 4), L.Linear(second, 4))


def _tied() -> Any:
    link = _two()
    link[1].W = link[0].W
    return link


def _one_bias() -> Any:
    link = _two(8)
    link[1].b = link[0].b
    return link


def _one_array() -> Any:
    link = _two()
    link[1].W.array = link[0].W.array
    return link


#: Models that cannot be split, and patterns of the errors.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "tied": (_tied, "/0/W and /1/W are one parameter.*filters='all'"),
    "one bias": (_one_bias, "/0/b and /1/b are one parameter.*filters='all'"),
    "one memory": (_one_array, "/0/W and /1/W are one parameter.*filters='all'"),
    "not made yet": (lambda: chainer.Sequential(L.Linear(None, 4)), "/0 .* has no weights yet"),
}


def part(split: Split) -> Any:
    """Return the link that a split holds on this rank."""
    return split.link


def copied(link: Any) -> Any:
    """Return a copy of a link."""
    return link.copy("copy")


# -- on ranks that differ --------------------------------------------------------------------

#: The first parameters of "pairs", in the order in which they are compared.
NAMES = "/0/W", "/0/b", "/3/W"
#: The parameter that every rank holds completely, even with filters="own".
WHOLE = "/1/b"


class Scaled(chainer.Link):
    """Layer with a second argument beside the variable that is split."""

    def forward(self, x: Any, by: Any) -> Any:
        return x * by


def disturb(link: Any, rank: int, name: str | None = None) -> None:
    """Change all parameters and statistics, or the parameter ``name``, by the rank's number."""
    for path, parameter in link.namedparams():
        if name in (None, path):
            parameter.array += rank
    if name is None:
        for child in link.links():
            for each in child._persistent:
                setattr(child, each, getattr(child, each) + rank)


def result(link: Any, x: Any) -> np.ndarray[Any, Any]:
    """Return the output of a model as a NumPy array."""
    found: np.ndarray[Any, Any] = link(x).array
    return found


def lazy(rank: int) -> Any:
    """Return a link whose layers take their number of input channels from the first input."""
    with chainer.using_config("dtype", np.float64):
        return chainer.Sequential(
            L.Convolution2D(None, 4, 3, initialW=rank + 1.0),
            *(F.relu, L.Convolution2D(None, 2, 3, initialW=rank + 1.0)),
        )
