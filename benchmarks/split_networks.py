"""Networks for ``splitting.py`` whose channels can be split, in PyTorch and in Chainer.

- ``six layers``: two convolutions, pooling, one convolution, up-sampling, one convolution.
- ``dense``: convolutions over all channels, each with a ReLU, as in VGG.
- ``dense, normalised``: the same with batch normalisation in training mode.
- ``inverted bottlenecks``: 1x1 to six times the channels, depth-wise 3x3, 1x1 back, as in
  MobileNetV2.
- ``grouped``: convolutions of eight and of four groups between two dense ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["chain", "chainer_networks", "torch_networks"]

_CHANNELS = 32
_NARROW = 16
_WIDER = 6


def chain(channels: int = _CHANNELS) -> nn.Module:
    """Return six layers: two convolutions, pooling, one, up-sampling, one."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()),
            *(nn.ConvTranspose2d(channels, channels, 2, 2), nn.Conv2d(channels, 1, 3, padding=1)),
        )


def torch_networks() -> dict[str, Callable[[], nn.Module]]:
    """Return the networks in PyTorch by name; their input has one channel."""
    return {
        "six layers": chain,
        "dense": partial(_torch_dense, nn.Identity),
        "dense, normalised": partial(_torch_dense, nn.BatchNorm2d),
        "inverted bottlenecks": _torch_bottlenecks,
        "grouped": _torch_grouped,
    }


def _torch_dense(norm: Callable[[int], nn.Module]) -> nn.Module:
    def layer(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, _CHANNELS, 3, padding=1), norm(_CHANNELS), nn.ReLU()]

    layers = [module for inputs in (1, *[_CHANNELS] * 5) for module in layer(inputs)]
    return nn.Sequential(*layers, nn.Conv2d(_CHANNELS, 1, 3, padding=1))


def _torch_bottlenecks() -> nn.Module:
    wide = _NARROW * _WIDER

    def block() -> list[nn.Module]:
        depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        first, last = nn.Conv2d(_NARROW, wide, 1), nn.Conv2d(wide, _NARROW, 1)
        return [first, nn.ReLU6(), depthwise, nn.ReLU6(), last]

    layers = [module for _ in range(3) for module in block()]
    return nn.Sequential(nn.Conv2d(1, _NARROW, 3, padding=1), *layers, nn.Conv2d(_NARROW, 1, 1))


def _torch_grouped() -> nn.Module:
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    return nn.Sequential(
        *(conv(1, _CHANNELS), nn.ReLU(), conv(_CHANNELS, _CHANNELS, groups=8), nn.ReLU()),
        *(conv(_CHANNELS, _CHANNELS, groups=4), nn.ReLU(), conv(_CHANNELS, 1)),
    )


def chainer_networks() -> dict[str, Callable[[], Any]]:
    """Return the same networks in Chainer, by name."""
    import collective.adapters.chainer.functional  # noqa: F401  # makes Chainer's import work

    import chainer  # isort: skip
    import chainer.functions as F  # isort: skip
    import chainer.links as L  # isort: skip

    conv = partial(L.Convolution2D, ksize=3, pad=1)

    def six_layers() -> Any:
        return chainer.Sequential(
            *(conv(1, _CHANNELS), F.relu, conv(_CHANNELS, _CHANNELS), F.relu),
            *(partial(F.max_pooling_2d, ksize=2), conv(_CHANNELS, _CHANNELS), F.relu),
            *(L.Deconvolution2D(_CHANNELS, _CHANNELS, 2, 2), conv(_CHANNELS, 1)),
        )

    def dense(norm: Callable[[], list[Any]]) -> Any:
        def layer(inputs: int) -> list[Any]:
            return [conv(inputs, _CHANNELS), *norm(), F.relu]

        layers = [each for inputs in (1, *[_CHANNELS] * 5) for each in layer(inputs)]
        return chainer.Sequential(*layers, conv(_CHANNELS, 1))

    def bottlenecks() -> Any:
        wide = _NARROW * _WIDER

        def block() -> list[Any]:
            first, last = L.Convolution2D(_NARROW, wide, 1), L.Convolution2D(wide, _NARROW, 1)
            return [first, F.relu, conv(wide, wide, groups=wide), F.relu, last]

        layers = [each for _ in range(3) for each in block()]
        return chainer.Sequential(conv(1, _NARROW), *layers, L.Convolution2D(_NARROW, 1, 1))

    def grouped() -> Any:
        return chainer.Sequential(
            *(conv(1, _CHANNELS), F.relu, conv(_CHANNELS, _CHANNELS, groups=8), F.relu),
            *(conv(_CHANNELS, _CHANNELS, groups=4), F.relu, conv(_CHANNELS, 1)),
        )

    return {
        "six layers": six_layers,
        "dense": partial(dense, list),
        "dense, normalised": partial(dense, lambda: [L.BatchNormalization(_CHANNELS)]),
        "inverted bottlenecks": bottlenecks,
        "grouped": grouped,
    }
