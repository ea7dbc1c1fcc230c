"""How links, optimizers, iterators and a Trainer are kept for :class:`collective.elastic.State`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.serializers import npz

from collective.errors import InvalidArgumentError
from collective.training.elastic_state import register
from collective.training.rebinding import Rebindable

from .optimizer import MultiNodeOptimizer
from .state import distinct_parameters

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = [
    "copy_optimizer", "copy_serialized", "copy_trainer", "load_optimizer", "load_serialized",
    "load_trainer", "rebind_trainer",
]  # fmt: skip

_Updater: Any = chainer.training.updaters.StandardUpdater


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


# -- a Trainer ------------------------------------------------------------------------------------


def copy_trainer(trainer: Any) -> dict[str, Any]:
    """Return what a Trainer goes on from: its updater's parts, its extensions and triggers.

    Raises:
        InvalidArgumentError: its updater is no ``StandardUpdater``, of which nothing is known; or a
            parameter is not initialized.
    """
    updater = trainer.updater
    if not isinstance(updater, _Updater):
        raise InvalidArgumentError(
            f"State: a Trainer whose updater is a {type(updater).__name__}; needed is a "
            "StandardUpdater, or one derived from it, such as MultiNodeUpdater."
        )
    optimizers = updater.get_all_optimizers()
    return {
        "iteration": updater.iteration,
        "seconds": 0.0 if trainer._start_at is None else trainer.elapsed_time,
        "iterators": {name: copy_serialized(each) for name, each in updater._iterators.items()},
        "models": {name: copy_serialized(each.target) for name, each in optimizers.items()},
        "optimizers": {name: copy_optimizer(each) for name, each in optimizers.items()},
        "serialized": {name: copy_serialized(each) for name, each in _serialized(trainer).items()},
    }


def load_trainer(trainer: Any, kept: dict[str, Any]) -> Any:
    """Have a Trainer as :func:`copy_trainer` found it, such that ``run()`` goes on from there.

    Extensions that one of the two has and the other has not stay as they are.
    """
    updater = trainer.updater
    updater.iteration = kept["iteration"]
    trainer._snapshot_elapsed_time = kept["seconds"]
    trainer._done = False
    for name, optimizer in updater.get_all_optimizers().items():
        load_serialized(optimizer.target, kept["models"][name])
        load_optimizer(optimizer, kept["optimizers"][name])
    _load_each(updater._iterators, kept["iterators"])
    _load_each(_serialized(trainer), kept["serialized"])
    return trainer


def rebind_trainer(trainer: Any, comm: Communicator) -> None:
    """Have the updater, its iterators and optimizers, and the extensions go on with ``comm``.

    Collective: every rank of it calls it.
    """
    updater = trainer.updater
    extensions = (entry.extension for entry in trainer._extensions.values())
    optimizers = updater.get_all_optimizers().values()
    for part in (*updater._iterators.values(), *optimizers, updater, *extensions):
        if isinstance(part, Rebindable):
            part.rebind(comm)


def _load_each(parts: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in parts.keys() & kept.keys():
        load_serialized(parts[name], kept[name])


def _serialized(trainer: Any) -> dict[str, Any]:
    """Return what writes itself into a Trainer's snapshot beside the updater, by name."""
    found = {"stop_trigger": trainer.stop_trigger}
    for name, entry in trainer._extensions.items():
        found[f"extensions/{name}"] = entry.extension
        found[f"triggers/{name}"] = entry.trigger
    return {name: each for name, each in found.items() if hasattr(each, "serialize")}


register(chainer.Link, copy_serialized, load_serialized)
register(chainer.dataset.Iterator, copy_serialized, load_serialized)
register(chainer.Optimizer, copy_optimizer, load_optimizer)
register(MultiNodeOptimizer, copy_optimizer, load_optimizer)
register(chainer.training.Trainer, copy_trainer, load_trainer, rebind_trainer)
