"""A user's model in PyTorch and in Chainer: its weights by common names, and its training.

Weights have PyTorch's names: Chainer's ``/conv1/W`` is ``conv1.weight``. The layouts are the same.
Each function imports its framework.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collective import Communicator, ShapeError

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
#: Parts of a batch: inputs, targets, and the factor of the part's mean loss.
Batch = Sequence[tuple[Array, Array, float]]

# Chainer's name of a parameter -> PyTorch's.
_NAMES = {"W": "weight", "b": "bias", "gamma": "weight", "beta": "bias"}
_EPSILON, _BETA = 1e-8, 0.999


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


def _taken(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Return copies of the parameters, sorted by name."""
    return {name: parameters[name].copy() for name in sorted(parameters)}


def _train_torch(
    comm: Communicator | None, model: Any, start: Mapping[str, Array], optimizer: str,
    batches: Sequence[Batch], **how: Any,
) -> dict[str, Array]:  # fmt: skip
    """Train a module in double precision from ``start`` and return its weights.

    Args:
        comm: communicator of the replicas; None for one process.
        optimizer: ``"sgd"`` with momentum, or ``"adam"``.
        batches: this rank's parts of each batch: its share, or all virtual shards.
        how: ``reduce`` or ``shards`` of ``DistributedDataParallel``, or nothing.
    """
    import torch

    from collective.adapters.torch import DistributedDataParallel

    put(torch_parameters(model.double()), start)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.002, betas=(0.9, _BETA), eps=_EPSILON),
    }
    stepper = kinds[optimizer](model.parameters())
    replica = model if comm is None else DistributedDataParallel(model, comm, **how)
    for batch in batches:
        stepper.zero_grad()
        for shard in replica.each_shard() if "shards" in how else [0]:
            x, y, scale = batch[shard]
            (_torch_loss(replica, x, y) * scale).backward()
        stepper.step()
    return _taken(torch_parameters(model))


def _torch_loss(model: Any, x: Array, y: Array) -> Any:
    import torch
    from torch.nn import functional

    scores, targets = model(torch.from_numpy(x)), torch.from_numpy(y)
    criterion = functional.mse_loss if targets.is_floating_point() else functional.cross_entropy
    return criterion(scores, targets)


def _train_chainer(
    comm: Communicator | None, model: Any, start: Mapping[str, Array], optimizer: str,
    batches: Sequence[Batch], **how: Any,
) -> dict[str, Array]:  # fmt: skip
    """Train a link from ``start`` and return its weights, as :func:`_train_torch` does.

    Chainer's Adam adds epsilon to the root of the uncorrected second moment (Kingma and Ba, 2015,
    end of section 2). PyTorch's adds it to the root of the corrected moment (algorithm 1). They
    agree if Chainer's epsilon is ``epsilon √(1 − β₂ᵗ)`` in step t, so this function sets it so.
    """
    from collective.adapters.chainer import create_multi_node_optimizer

    # Chainer has no types, hence Any. The import works because the adapter was imported before.
    chainer: Any = importlib.import_module("chainer")
    functions = chainer.functions
    for parameter in model.params():
        if parameter.array is not None:
            parameter.array = parameter.array.astype(np.float64)
    put(chainer_parameters(model), start)
    kinds = {
        "sgd": lambda: chainer.optimizers.MomentumSGD(lr=0.05, momentum=0.9),
        "adam": lambda: chainer.optimizers.Adam(alpha=0.002, beta1=0.9, beta2=_BETA, eps=_EPSILON),
    }
    actual = kinds[optimizer]()
    stepper = actual if comm is None else create_multi_node_optimizer(actual, comm, **how)
    stepper.setup(model)
    for step, batch in enumerate(batches, 1):
        if optimizer == "adam":
            actual.hyperparam.eps = _EPSILON * math.sqrt(1 - _BETA**step)

        def loss(shard: int = 0, batch: Batch = batch) -> Any:
            x, y, scale = batch[shard]
            if y.dtype.kind == "f":
                return functions.mean_squared_error(model(x), y) * scale
            return functions.softmax_cross_entropy(model(x), y.astype(np.int32)) * scale

        stepper.update(loss)
    return _taken(chainer_parameters(model))


#: For each framework, the function that returns a model's weights, and the one that trains it.
PARAMETERS = {"torch": torch_parameters, "chainer": chainer_parameters}
TRAIN = {"torch": _train_torch, "chainer": _train_chainer}
