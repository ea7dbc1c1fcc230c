"""The networks of :mod:`collective.tools.parity.layers` in Chainer, in pieces."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from collective.adapters.chainer import Split

from .layers import Layer, forward

__all__ = ["gradients"]

Array = np.ndarray[Any, Any]

# Chainer has no types, hence Any. The import works because the adapter was imported before.
chainer: Any = importlib.import_module("chainer")
F = chainer.functions


def _convolved(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
        return function(x, weight, bias, layer.stride, layer.padding, dilate=layer.dilation)

    return apply


_FUNCTIONS = {
    "convolution": _convolved(F.convolution_2d),
    "transposed": _convolved(F.deconvolution_2d),
    "max": lambda layer, x: F.max_pooling_2d(x, layer.kernel, layer.stride, cover_all=False),
    "tanh": lambda layer, x: F.tanh(x),
}


class Network(chainer.Link):  # type: ignore[misc]
    """Chain of layers."""

    def __init__(self, layers: Sequence[Layer], arrays: Mapping[str, Array]) -> None:
        super().__init__()
        self._layers = layers
        with self.init_scope():
            for name, array in arrays.items():
                if name != "x":
                    setattr(self, name, chainer.Parameter(array.copy()))

    def forward(self, x: Any) -> Any:
        """Return the last layer's result."""
        return forward(self._layers, x, _FUNCTIONS, functools.partial(getattr, self))


def gradients(layers: Sequence[Layer], arrays: Mapping[str, Array], **how: Any) -> dict[str, Array]:
    """Return what :func:`collective.tools.parity.layers.gradients` returns, computed in pieces.

    Args:
        layers, arrays: as in that function.
        how: keyword arguments of ``Split``.
    """
    network = Network(layers, arrays)
    x = chainer.Variable(arrays["x"].copy())
    y = Split(network, **how)(x)
    (F.sum(y * y) / 2).backward()
    found = {"y": y.array, "x": x.grad}
    found |= {parameter.name: parameter.grad for parameter in network.params()}
    return {name: value for name, value in found.items() if value is not None}
