"""How links, optimizers and iterators are kept for :class:`collective.elastic.State`."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer.serializers import npz

from collective.errors import InvalidArgumentError
from collective.training.elastic_state import register

from .optimizer import MultiNodeOptimizer
from .state import distinct_parameters

__all__ = ["copy_optimizer", "copy_serialized", "load_optimizer", "load_serialized"]


def copy_serialized(target: Any) -> dict[str, Any]:
    """Return what a link or an iterator writes of itself, by name.

    Raises:
        InvalidArgumentError: a parameter is not initialized, which none can be made again.
    """
    if isinstance(target, chainer.Link):
        names = [name for name, p in distinct_parameters(target) if not p.is_initialized]
        if names:
            raise InvalidArgumentError(
                f"State: parameters {', '.join(names[:10])} are not initialized, and cannot be "
                "made so again. Give the links their input sizes, or make a forward pass first."
            )
    written = {name: np.asarray(value) for name, value in npz.serialize(target).items()}
    return {
        name: value[()] if value.dtype == object else _plain(value)
        for name, value in written.items()
    }


def load_serialized(target: Any, kept: dict[str, Any]) -> Any:
    """Have a link or an iterator read what it has written."""
    npz.NpzDeserializer({name: np.asarray(value) for name, value in kept.items()}).load(target)
    return target


def copy_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's counts, hyperparameters and the state of each parameter's rule.

    Not by its ``serialize()``, which knows no way back to before the first step.
    """
    actual = _actual(optimizer)
    return {
        "t": actual.t,
        "epoch": actual.epoch,
        "hyperparameters": actual.hyperparam.get_dict(),
        "rules": {name: [rule.t, rule.state] for name, rule in _rules(actual)},
    }


def load_optimizer(optimizer: Any, kept: dict[str, Any]) -> Any:
    """Have an optimizer as :func:`copy_optimizer` found it."""
    actual = _actual(optimizer)
    actual.t, actual.epoch = kept["t"], kept["epoch"]
    for name, value in kept["hyperparameters"].items():
        setattr(actual.hyperparam, name, value)
    for name, rule in _rules(actual):
        rule.t, rule._state = kept["rules"][name]
        # Made anew of the parameter, as when a snapshot is read.
        rule._fp32_param = None
    return optimizer


def _actual(optimizer: Any) -> Any:
    return getattr(optimizer, "actual_optimizer", optimizer)


def _rules(optimizer: Any) -> list[tuple[str, Any]]:
    if optimizer.target is None:
        return []
    found = distinct_parameters(optimizer.target)
    return [(name, p.update_rule) for name, p in found if p.update_rule is not None]


def _plain(value: Any) -> Any:
    return value.tolist() if value.dtype.kind == "U" else value


register(chainer.Link, copy_serialized, load_serialized)
register(chainer.dataset.Iterator, copy_serialized, load_serialized)
register(chainer.Optimizer, copy_optimizer, load_optimizer)
register(MultiNodeOptimizer, copy_optimizer, load_optimizer)
