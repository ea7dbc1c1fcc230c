"""The models in JAX, with their training by optax; the same models as in PyTorch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from collective import Communicator
from collective.adapters.jax import average_gradients
from collective.tools.models import networks
from collective.tools.models.networks import Layer

__all__ = ["Network", "train"]

Array = np.ndarray[Any, Any]
_Parameters = dict[str, Any]

# optax has no types that mypy sees without it, hence Any.
optax: Any = importlib.import_module("optax")


def _convolved(layer: Layer, x: Any, weight: Any, bias: Any) -> Any:
    h = jax.lax.conv_general_dilated(
        x, weight, (1, 1), [(layer.padding, layer.padding)] * 2,
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )  # fmt: skip
    return h + bias[:, None, None]


def _pooled(layer: Layer, x: Any) -> Any:
    window, stride = ((1, 1, n, n) for n in (layer.kernel, layer.stride))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, stride, "VALID")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "convolution": _convolved,
    "linear": lambda layer, x, weight, bias: x.reshape(len(x), -1) @ weight.T + bias,
    "max": _pooled,
    "tanh": lambda layer, x: jnp.tanh(x),
    "relu": lambda layer, x: jax.nn.relu(x),
}


class Network(NamedTuple):
    """Chain of layers with ``weights``, by name."""

    layers: tuple[Layer, ...]
    weights: dict[str, Array]


@functools.cache
def _compiled(layers: tuple[Layer, ...], optimizer: str) -> tuple[Any, Any, Any]:
    """Return the optimizer, the compiled gradients, and the compiled update."""
    stepper = {
        "sgd": lambda: optax.sgd(0.05, momentum=0.9),
        "adam": lambda: optax.adam(0.002, b1=0.9, b2=0.999, eps=1e-8),
    }[optimizer]()

    def loss(parameters: _Parameters, x: Any, y: Any, scale: Any) -> Any:
        scores = networks.forward(layers, x, _FUNCTIONS, parameters.__getitem__)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean() * scale

    def update(parameters: _Parameters, state: Any, gradients: _Parameters) -> Any:
        steps, state = stepper.update(gradients, state, parameters)
        return optax.apply_updates(parameters, steps), state

    return stepper, jax.jit(jax.grad(loss)), jax.jit(update)


def train(
    comm: Communicator | None, model: Network, start: dict[str, Array], optimizer: str,
    batches: Sequence[networks.Batch], **how: Any,
) -> dict[str, Array]:  # fmt: skip
    """Train a network from ``start`` and return its weights, as :func:`.torch.train` does.

    Args:
        comm, start, optimizer, batches: as in :func:`.torch.train`.
        model: the network.
        how: ``reduce``, any function, for the average in rank order; or nothing.
    """
    order: Literal["rank"] | None = "rank" if how else None
    with jax.enable_x64(True):
        stepper, gradients_of, update = _compiled(model.layers, optimizer)
        parameters = {name: jnp.asarray(value) for name, value in start.items()}
        state = stepper.init(parameters)
        for ((x, y, scale),) in batches:
            gradients = gradients_of(parameters, x, y, scale)
            if comm is not None:
                gradients = average_gradients(gradients, comm, order=order)
            parameters, state = update(parameters, state, gradients)
    return networks.taken({name: np.asarray(value) for name, value in parameters.items()})
