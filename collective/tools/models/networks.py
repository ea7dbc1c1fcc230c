"""What the models of all frameworks share: names of parameters, and networks as chains of layers.

The networks are chains of layers. Frameworks compute them by :func:`forward`, with a function for
each kind of layer, in a class ``Network`` that is made of the layers and their weights.

A weight has PyTorch's layout, which Chainer shares: (out, in, kh, kw), or (out, in) if the layer is
linear. A user's models also have PyTorch's names: Chainer's ``/conv1/W`` is ``conv1.weight``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from collective import ShapeError

__all__ = [
    "LENET", "RESNET", "TIMED", "Batch", "Layer", "batch", "chainer_parameters", "forward",
    "perceptron", "put", "taken", "torch_parameters", "weights",
]  # fmt: skip

Array = np.ndarray[Any, Any]
#: Parts of a batch: inputs, targets, and the factor of the part's mean loss.
Batch = Sequence[tuple[Array, Array, float]]

# Chainer's name of a parameter -> PyTorch's.
_NAMES = {"W": "weight", "b": "bias", "gamma": "weight", "beta": "bias"}


def torch_parameters(module: Any) -> dict[str, Array]:
    """Return NumPy views of a PyTorch module's parameters, by name."""
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def chainer_parameters(link: Any) -> dict[str, Array]:
    """Return the arrays of a Chainer link's parameters, by the names that PyTorch would use."""
    arrays = {}
    for path, parameter in link.namedparams():
        *places, name = path.strip("/").split("/")
        arrays[".".join([*places, _NAMES.get(name, name)])] = parameter.array
    return arrays


def put(parameters: Mapping[str, Array], weights: Mapping[str, Array]) -> None:
    """Overwrite parameters with weights.

    Raises:
        ShapeError: names or shapes differ; the text says which.
    """
    if set(parameters) != set(weights):
        raise ShapeError(
            f"weights: names {sorted(set(parameters) ^ set(weights))} are in only one of the two "
            "models; give corresponding layers the same names."
        )
    for name, array in parameters.items():
        if array.shape != weights[name].shape:
            raise ShapeError(
                f"weights: {name} has shape {array.shape} in one model and {weights[name].shape} "
                "in the other."
            )
        array[...] = weights[name]


def taken(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Return copies of the parameters, sorted by name."""
    return {name: parameters[name].copy() for name in sorted(parameters)}


# -- networks as chains of layers ------------------------------------------------------------


class Layer(NamedTuple):
    """Layer on arrays ``[n, channels, rows, columns]``, or, if linear, ``[n, …]``.

    Attributes:
        kind: ``"convolution"``, ``"linear"``, ``"max"``, ``"tanh"`` or ``"relu"``.
        channels: numbers of input channels and of output channels.
        kernel, stride, padding: as in PyTorch, the same along both axes; only ``"max"`` has a
            stride.
    """

    kind: str
    channels: tuple[int, int] = (0, 0)
    kernel: int = 1
    stride: int = 1
    padding: int = 0

    @property
    def weight_shape(self) -> tuple[int, ...] | None:
        """The weight's shape, as in PyTorch and Chainer; None if the layer has no weight."""
        first, second = self.channels
        kernel = (self.kernel, self.kernel)
        shapes = {"convolution": (second, first, *kernel), "linear": (second, first)}
        return shapes.get(self.kind)


_TANH = Layer("tanh")
_HALVED = Layer("max", kernel=2, stride=2)

#: LeNet, for images ``[n, 1, 28, 28]``, with ten scores; LeCun et al., "Gradient-based learning
#: applied to document recognition" (1998).
LENET: tuple[Layer, ...] = (
    *(Layer("convolution", (1, 6), kernel=5, padding=2), _TANH, _HALVED),
    *(Layer("convolution", (6, 16), kernel=5), _TANH, _HALVED),
    *(Layer("linear", (400, 120)), _TANH, Layer("linear", (120, 84)), _TANH),
    Layer("linear", (84, 10)),
)


def perceptron(*widths: int) -> tuple[Layer, ...]:
    """Return linear layers between some widths, with a rectifier after each but the last."""
    layers = []
    for pair in itertools.pairwise(widths):
        layers += [Layer("linear", pair), Layer("relu")]
    return tuple(layers[:-1])


def weights(layers: Sequence[Layer], seed: int, dtype: str = "float64") -> dict[str, Array]:
    """Return random weights and biases: for layer i ``weight i`` and ``bias i``."""
    random = np.random.default_rng(seed)
    arrays = {}
    for number, layer in enumerate(layers):
        shape = layer.weight_shape
        if shape is not None:
            scale = 1 / math.sqrt(math.prod(shape[1:]))  # keeps the size of the results
            arrays[f"weight {number}"] = scale * random.normal(size=shape)
            arrays[f"bias {number}"] = scale * random.normal(size=layer.channels[1])
    return {name: array.astype(dtype) for name, array in arrays.items()}


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
        parameter: function that returns the parameter of a name that :func:`weights` uses.
    """
    for number, layer in enumerate(layers):
        names = () if layer.weight_shape is None else (f"weight {number}", f"bias {number}")
        x = functions[layer.kind](layer, x, *map(parameter, names))
    return x


# -- the models that benchmarks time ------------------------------------------------------------

#: The models that are chains. The six layers of the MLP have 25 MB of gradients.
TIMED = {"mlp": perceptron(*[1024] * 7), "lenet": LENET}
#: Channels before each block of the resnet (of ResNet-18's size), and after the last one.
RESNET = (64, 64, 64, 128, 128, 256, 256, 512, 512)
_BATCHES = {"mlp": (64, 1024), "lenet": (32, 1, 28, 28), "resnet": (4, 3, 32, 32)}


def batch(name: str, rank: int) -> Array:
    """Return the batch of a rank for a model, in float32; every rank has different numbers."""
    random = np.random.default_rng(0)
    return random.standard_normal(_BATCHES[name], np.float32) + np.float32(rank / 8)
