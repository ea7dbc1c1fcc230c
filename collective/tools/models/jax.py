"""The models in JAX, with their training by optax; the same models as in PyTorch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from collective.adapters.jax import average_gradients
from collective.communicator import Communicator
from collective.tools.parity import weights

__all__ = ["LeNet", "Perceptron", "train"]

Array = np.ndarray[Any, Any]
_Parameters = dict[str, Any]

# optax has no types that mypy sees without it, hence Any.
optax: Any = importlib.import_module("optax")


class _Network:
    """Network whose parameters have PyTorch's names and layouts.

    Attributes:
        parameters: NumPy arrays by name.
    """

    layers: ClassVar[dict[str, tuple[int, ...]]]

    def __init__(self) -> None:
        self.parameters: dict[str, Array] = {}
        for name, shape in self.layers.items():
            self.parameters[f"{name}.weight"] = np.zeros(shape)
            self.parameters[f"{name}.bias"] = np.zeros(shape[:1])


class LeNet(_Network):
    """LeCun et al., "Gradient-based learning applied to document recognition" (1998)."""

    layers: ClassVar = {
        "conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5),
        "fc1": (120, 400), "fc2": (84, 120), "fc3": (10, 84),
    }  # fmt: skip

    @staticmethod
    def scores(parameters: _Parameters, images: Any) -> Any:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        h = _pooled(jnp.tanh(_convolved(parameters, "conv1", images, padding=2)))
        h = _pooled(jnp.tanh(_convolved(parameters, "conv2", h, padding=0)))
        h = jnp.tanh(_linear(parameters, "fc1", h.reshape(len(h), -1)))
        return _linear(parameters, "fc3", jnp.tanh(_linear(parameters, "fc2", h)))


class Perceptron(_Network):
    """Perceptron with two hidden layers."""

    layers: ClassVar = {"fc1": (64, 784), "fc2": (32, 64), "fc3": (10, 32)}

    @staticmethod
    def scores(parameters: _Parameters, images: Any) -> Any:
        """Return scores, ``[n, 10]``, of images ``[n, 1, 28, 28]``."""
        h = jax.nn.relu(_linear(parameters, "fc1", images.reshape(len(images), -1)))
        return _linear(parameters, "fc3", jax.nn.relu(_linear(parameters, "fc2", h)))


def _convolved(parameters: _Parameters, name: str, x: Any, padding: int) -> Any:
    h = jax.lax.conv_general_dilated(
        x, parameters[f"{name}.weight"], (1, 1), [(padding, padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip
    return h + parameters[f"{name}.bias"][:, None, None]


def _pooled(x: Any) -> Any:
    window = (1, 1, 2, 2)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def _linear(parameters: _Parameters, name: str, x: Any) -> Any:
    return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]


@functools.cache
def _compiled(scores_of: Callable[..., Any], optimizer: str) -> tuple[Any, Any, Any]:
    """Return the optimizer, the compiled gradients, and the compiled update."""
    stepper = {
        "sgd": lambda: optax.sgd(0.05, momentum=0.9),
        "adam": lambda: optax.adam(0.002, b1=0.9, b2=0.999, eps=1e-8),
    }[optimizer]()

    def loss(parameters: _Parameters, x: Any, y: Any, scale: Any) -> Any:
        scores = scores_of(parameters, x)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean() * scale

    def update(parameters: _Parameters, state: Any, gradients: _Parameters) -> Any:
        steps, state = stepper.update(gradients, state, parameters)
        return optax.apply_updates(parameters, steps), state

    return stepper, jax.jit(jax.grad(loss)), jax.jit(update)


def train(
    comm: Communicator | None,
    model: Any,
    start: dict[str, Array],
    optimizer: str,
    batches: list[tuple[Array, Array, float]],
    reduce: Callable[[Any], Any] | None,
) -> dict[str, Array]:
    """Train a network from ``start`` and return its weights, as :func:`.torch.train` does.

    Args:
        comm, start, optimizer, batches: as in :func:`.torch.train`.
        model: :class:`LeNet` or :class:`Perceptron`.
        reduce: None for the average; any function for the average in rank order.
    """
    weights.put(model.parameters, start)
    order: Literal["rank"] | None = None if reduce is None else "rank"
    with jax.enable_x64(True):
        stepper, gradients_of, update = _compiled(model.scores, optimizer)
        parameters = {name: jnp.asarray(value) for name, value in model.parameters.items()}
        state = stepper.init(parameters)
        for x, y, scale in batches:
            gradients = gradients_of(parameters, x, y, scale)
            if comm is not None:
                gradients = average_gradients(gradients, comm, order=order)
            parameters, state = update(parameters, state, gradients)
    return weights.taken({name: np.asarray(value) for name, value in parameters.items()})
