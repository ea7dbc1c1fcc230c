"""The networks of :mod:`collective.tools.parity.layers` in PyTorch, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from collective.adapters.torch import Split

from .layers import Layer, forward

__all__ = ["gradients"]

Array = np.ndarray[Any, Any]


def _convolved(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
        return function(x, weight, bias, layer.stride, layer.padding, dilation=layer.dilation)

    return apply


_FUNCTIONS = {
    "convolution": _convolved(functional.conv2d),
    "transposed": _convolved(functional.conv_transpose2d),
    "max": lambda layer, x: functional.max_pool2d(x, layer.kernel, layer.stride),
    "tanh": lambda layer, x: torch.tanh(x),
}


class Network(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Chain of layers."""

    def __init__(self, layers: Sequence[Layer], arrays: Mapping[str, Array]) -> None:
        super().__init__()
        self._layers = layers
        self.weights = torch.nn.ParameterDict(
            {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if name != "x"}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result."""
        y: torch.Tensor = forward(self._layers, x, _FUNCTIONS, self.weights.__getitem__)
        return y


def gradients(layers: Sequence[Layer], arrays: Mapping[str, Array], **how: Any) -> dict[str, Array]:
    """Return what :func:`collective.tools.parity.layers.gradients` returns, computed in pieces.

    Args:
        layers, arrays: as in that function.
        how: keyword arguments of ``Split``.
    """
    network = Network(layers, arrays)
    x = torch.from_numpy(arrays["x"].copy()).requires_grad_()
    y = Split(network, **how)(x)
    (y.square().sum() / 2).backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: weight.grad for name, weight in network.weights.items()}
    return {name: value.numpy() for name, value in found.items() if value is not None}
