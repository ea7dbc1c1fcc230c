"""Weights of a model in a neutral form: a safetensors file for all frameworks.

Names and layouts are those of PyTorch: ``conv1.weight`` of shape (out, in, kh, kw), ``fc.weight``
of shape (out, in). Chainer's layouts are the same, and its names differ: ``/conv1/W``. The models
in JAX use PyTorch's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collective.errors import InvalidArgumentError, ShapeError

__all__ = [
    "chainer_parameters", "jax_parameters", "library", "load", "put", "save", "taken",
    "torch_parameters",
]  # fmt: skip

Array = np.ndarray[Any, Any]

# Chainer's name of a parameter -> PyTorch's.
_NAMES = {"W": "weight", "b": "bias", "gamma": "weight", "beta": "bias"}


def save(path: str, weights: Mapping[str, Array]) -> None:
    """Write the arrays to a file, by name.

    Raises:
        InvalidArgumentError: safetensors is not installed.
    """
    library().save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, path)


def load(path: str) -> dict[str, Array]:
    """Return the arrays of a file, by name."""
    arrays: dict[str, Array] = library().load_file(path)
    return arrays


def library() -> Any:
    """Return the NumPy module of safetensors, the format of the files.

    Raises:
        InvalidArgumentError: safetensors is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise InvalidArgumentError(
            f"weights: {error}; files of weights need safetensors: pip install safetensors"
        ) from error
    return safetensors.numpy


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


def jax_parameters(network: Any) -> dict[str, Array]:
    """Return the parameters of a network of :mod:`collective.tools.models.jax`, by name."""
    parameters: dict[str, Array] = network.parameters
    return parameters


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
