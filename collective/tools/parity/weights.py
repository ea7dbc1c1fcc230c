"""Weights of a model in a neutral form: a safetensors file that both frameworks read and write.

Names and layouts are PyTorch's: ``conv1.weight`` of shape (out, in, kh, kw), ``fc.weight`` of (out,
in). Chainer's differ in their names alone: ``/conv1/W``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collective.errors import InvalidArgumentError, ShapeError

__all__ = ["chainer_parameters", "library", "load", "put", "save", "taken", "torch_parameters"]

Array = np.ndarray[Any, Any]

# Chainer's names of parameters that PyTorch calls otherwise.
_NAMES = {"W": "weight", "b": "bias", "gamma": "weight", "beta": "bias"}


def save(path: str, weights: Mapping[str, Array]) -> None:
    """Write arrays by name.

    Raises:
        InvalidArgumentError: safetensors is not installed.
    """
    library().save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, path)


def load(path: str) -> dict[str, Array]:
    """Return the arrays of a file by name."""
    found: dict[str, Array] = library().load_file(path)
    return found


def library() -> Any:
    """Return the package in whose format weights are exchanged.

    Raises:
        InvalidArgumentError: it is not installed.
    """
    try:
        import safetensors.numpy
    except ImportError as error:
        raise InvalidArgumentError(
            f"weights: {error}; pip install safetensors, in which they are exchanged"
        ) from error
    return safetensors.numpy


def torch_parameters(module: Any) -> dict[str, Array]:
    """Return NumPy views of a PyTorch module's parameters, by name."""
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def chainer_parameters(link: Any) -> dict[str, Array]:
    """Return the arrays of a Chainer link's parameters, by the names that PyTorch would use."""
    found = {}
    for path, parameter in link.namedparams():
        *places, name = path.strip("/").split("/")
        found[".".join([*places, _NAMES.get(name, name)])] = parameter.array
    return found


def put(parameters: Mapping[str, Array], weights: Mapping[str, Array]) -> None:
    """Overwrite parameters with weights.

    Raises:
        ShapeError: names or shapes differ; tells which.
    """
    if set(parameters) != set(weights):
        raise ShapeError(
            f"weights: names {sorted(set(parameters) ^ set(weights))} are in one of the two "
            "models only; name the layers alike."
        )
    for name, array in parameters.items():
        if array.shape != weights[name].shape:
            raise ShapeError(
                f"weights: {name} has shape {array.shape} here and {weights[name].shape} there."
            )
        array[...] = weights[name]


def taken(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Return copies, by name in order."""
    return {name: parameters[name].copy() for name in sorted(parameters)}
