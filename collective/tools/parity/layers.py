"""Small networks of convolutions, and an oracle in NumPy for their results and gradients.

Frameworks compute the networks by :func:`forward`, with a function for each kind of layer. The
oracle computes whole arrays by their definition, without splitting them into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

__all__ = ["NETWORKS", "Layer", "draw", "forward", "gradients"]

Array = np.ndarray[Any, Any]


class Layer(NamedTuple):
    """Layer on arrays ``[n, channels, rows, columns]``.

    Attributes:
        kind: ``"convolution"``, ``"transposed"``, ``"max"`` or ``"tanh"``.
        channels: numbers of input channels and of output channels.
        kernel, stride, padding, dilation: as in PyTorch, the same along both axes.
    """

    kind: str
    channels: tuple[int, int] = (0, 0)
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def weight_shape(self) -> tuple[int, ...] | None:
        """The weight's shape, as in PyTorch and Chainer; None if the layer has no weight."""
        first, second = self.channels
        shapes = {"convolution": (second, first), "transposed": (first, second)}
        return (*shapes[self.kind], self.kernel, self.kernel) if self.kind in shapes else None


_TANH = Layer("tanh")

#: The networks to compute in pieces. They have kernels of even and odd lengths, strides with
#: padding, dilation, pooling, and a path that reduces the resolution and restores it.
NETWORKS: dict[str, Sequence[Layer]] = {
    "even": (
        Layer("convolution", (2, 4), kernel=4, stride=2, padding=2),
        *(_TANH, Layer("convolution", (4, 3), kernel=2)),
    ),
    "dilated": (
        Layer("convolution", (2, 4), kernel=3, padding=2, dilation=2),
        *(_TANH, Layer("convolution", (4, 3), kernel=5, padding=1)),
    ),
    "down and up": (
        *(Layer("convolution", (2, 4), kernel=3, padding=1), _TANH),
        *(Layer("max", kernel=2, stride=2), Layer("convolution", (4, 6), kernel=3, padding=1)),
        *(_TANH, Layer("transposed", (6, 4), kernel=3, stride=2, padding=1), _TANH),
        Layer("convolution", (4, 3), kernel=1),
    ),
}


def draw(layers: Sequence[Layer], seed: int) -> dict[str, Array]:
    """Return a random input, weights and biases.

    Returns:
        ``x``, ``[3, 2, 13, 9]``; for layer i ``weight i`` and ``bias i``.
    """
    random = np.random.default_rng(seed)
    arrays = {"x": random.normal(size=(3, 2, 13, 9))}
    for number, layer in enumerate(layers):
        if layer.weight_shape is not None:
            arrays[f"weight {number}"] = random.normal(size=layer.weight_shape) / layer.kernel
            arrays[f"bias {number}"] = random.normal(size=layer.channels[1])
    return arrays


def forward(
    layers: Sequence[Layer],
    x: Any,
    functions: Mapping[str, Callable[..., Any]],
    parameter: Callable[[str], Any],
) -> Any:
    """Return a network's result.

    Args:
        layers: the network.
        x: array of a framework.
        functions: kind of layer -> ``f(layer, x)``, or ``f(layer, x, weight, bias)`` for layers
            with weights.
        parameter: function that returns the parameter of a name that :func:`draw` uses.
    """
    for number, layer in enumerate(layers):
        names = () if layer.weight_shape is None else (f"weight {number}", f"bias {number}")
        x = functions[layer.kind](layer, x, *map(parameter, names))
    return x


def gradients(layers: Sequence[Layer], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return a network's result, and the gradients of half the sum of its squares.

    Args:
        layers: the network.
        arrays: arrays as :func:`draw` returns them.

    Returns:
        ``y``, and the gradient of each of ``arrays`` under its name.
    """
    inputs = [arrays["x"]]
    for number, layer in enumerate(layers):
        inputs.append(_forward(layer, inputs[number], *_weights(arrays, number)))
    y = inputs[len(layers)]
    found, g = {"y": y}, y
    for number, layer in reversed(list(enumerate(layers))):
        x, (weight, _) = inputs[number], _weights(arrays, number)
        if weight is not None:
            found[f"bias {number}"] = g.sum((0, 2, 3))
        if layer.kind == "convolution":
            found[f"weight {number}"] = np.einsum("ncyxij,noyx->ocij", _windows(x, layer), g)
        elif layer.kind == "transposed":
            found[f"weight {number}"] = np.einsum("ncyx,noyxij->coij", x, _windows(g, layer))
        g = _backward(layer, x, inputs[number + 1], weight, g)
    return found | {"x": g}


def _weights(arrays: Mapping[str, Array], number: int) -> tuple[Any, Any]:
    return arrays.get(f"weight {number}"), arrays.get(f"bias {number}")


def _forward(layer: Layer, x: Array, weight: Any, bias: Any) -> Any:
    if layer.kind == "tanh":
        return np.tanh(x)
    if layer.kind == "max":
        return _windows(x, layer).max((4, 5))
    if layer.kind == "convolution":
        y = np.einsum("ncyxij,ocij->noyx", _windows(x, layer), weight)
    else:
        reach = layer.dilation * (layer.kernel - 1) + 1
        shape = [(n - 1) * layer.stride - 2 * layer.padding + reach for n in x.shape[2:]]
        y = _spread(np.einsum("ncyx,coij->noyxij", x, weight), shape, layer)
    return y + bias[:, None, None]


def _backward(layer: Layer, x: Array, y: Array, weight: Any, g: Array) -> Any:
    """Return the gradient of a layer's input, given the gradient ``g`` of its result."""
    if layer.kind == "tanh":
        return g * (1 - y**2)
    if layer.kind == "transposed":
        return np.einsum("noyxij,coij->ncyx", _windows(g, layer), weight)
    if layer.kind == "max":
        largest = _windows(x, layer) == y[..., None, None]
        return _spread(largest * g[..., None, None], x.shape[2:], layer)
    return _spread(np.einsum("noyx,ocij->ncyxij", g, weight), x.shape[2:], layer)


def _windows(x: Array, layer: Layer) -> Any:
    """Return the windows of a layer's input, ``[n, channels, rows, columns, kernel, kernel]``."""
    sides = (layer.padding, layer.padding)
    padded = np.pad(x, ((0, 0), (0, 0), sides, sides))
    reach = layer.dilation * (layer.kernel - 1) + 1
    every = sliding_window_view(padded, (reach, reach), (2, 3))
    step, skip = slice(None, None, layer.stride), slice(None, None, layer.dilation)
    return every[:, :, step, step, skip, skip]


def _spread(windows: Array, shape: Sequence[int], layer: Layer) -> Array:
    """Return the sum of windows at their places in ``[n, channels, *shape]``.

    This is the adjoint of :func:`_windows`.
    """
    n, channels, rows, columns = windows.shape[:4]
    p, s, d = layer.padding, layer.stride, layer.dilation
    padded = np.zeros((n, channels, *(length + 2 * p for length in shape)))
    for i in range(layer.kernel):
        for j in range(layer.kernel):
            down = slice(i * d, i * d + s * (rows - 1) + 1, s)
            along = slice(j * d, j * d + s * (columns - 1) + 1, s)
            padded[:, :, down, along] += windows[..., i, j]
    return padded[:, :, p : p + shape[0], p : p + shape[1]]
