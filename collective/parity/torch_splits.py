"""The networks of :mod:`collective.parity.layers` in PyTorch, in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from collective.adapters.torch import Split
from collective.parity.layers import Layer

__all__ = ["gradients"]

Array = np.ndarray[Any, Any]


class Network(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Layers, one after another."""

    def __init__(self, layers: Sequence[Layer], arrays: Mapping[str, Array]) -> None:
        super().__init__()
        self._layers = layers
        self.weights = torch.nn.ParameterDict(
            {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if name != "x"}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's result."""
        for number, layer in enumerate(self._layers):
            if layer.kind == "tanh":
                x = torch.tanh(x)
            elif layer.kind == "max":
                x = functional.max_pool2d(x, layer.kernel, layer.stride)
            else:
                weight, bias = (self.weights[f"{name} {number}"] for name in ("weight", "bias"))
                is_plain = layer.kind == "convolution"
                function = functional.conv2d if is_plain else functional.conv_transpose2d
                x = function(x, weight, bias, layer.stride, layer.padding, dilation=layer.dilation)
        return x


def gradients(layers: Sequence[Layer], arrays: Mapping[str, Array], **how: Any) -> dict[str, Array]:
    """Do what :func:`collective.parity.layers.gradients` does, in pieces.

    Args:
        layers, arrays: as there.
        how: arguments of ``Split``.
    """
    network = Network(layers, arrays)
    x = torch.from_numpy(arrays["x"].copy()).requires_grad_()
    y = Split(network, **how)(x)
    (y.square().sum() / 2).backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: weight.grad for name, weight in network.weights.items()}
    return {name: value.numpy() for name, value in found.items() if value is not None}
