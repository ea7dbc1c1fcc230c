"""Functions that keep Chainer's links, optimizers, iterators and Trainers in an elastic state.

They are registered for :class:`collective.elastic.State`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import chainer
import numpy as np
from chainer.serializers import npz

from collective import InvalidArgumentError
from collective.inner import shares
from collective.training.elastic_state import register

from .optimizer import MultiNodeOptimizer
from .state import distinct_parameters

if TYPE_CHECKING:
    from collective import Communicator

_Updater: Any = chainer.training.updaters.StandardUpdater


def copy_serialized(target: Any) -> dict[str, Any]:
    """Return the values that a link or an iterator serializes, by name.

    Raises:
        InvalidArgumentError: a parameter is not initialized. Nothing could restore this state.
    """
    if isinstance(target, chainer.Link):
        names = [name for name, p in distinct_parameters(target) if not p.is_initialized]
        if names:
            raise InvalidArgumentError(
                f"State: parameters {', '.join(names[:10])} are not initialized, and a state of "
                "uninitialized parameters cannot be restored. Give the links their input sizes, or "
                "make a forward pass first."
            )
    written = {name: np.asarray(value) for name, value in npz.serialize(target).items()}
    return {
        name: value[()] if value.dtype == object else _plain(value)
        for name, value in written.items()
    }


def load_serialized(target: Any, kept: dict[str, Any]) -> Any:
    """Restore a link or an iterator from the values that it has serialized."""
    npz.NpzDeserializer({name: np.asarray(value) for name, value in kept.items()}).load(target)
    return target


def copy_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's counts, hyperparameters and loss scale, and the state of its rules.

    The optimizer's ``serialize()`` is not used, because it cannot restore the state before the
    first step. It also leaves out hyperparameters, a dynamic loss scale, and the float32 copies of
    float16 parameters.
    """
    actual = _actual(optimizer)
    return {
        "t": actual.t,
        "epoch": actual.epoch,
        "hyperparameters": actual.hyperparam.get_dict(),
        "scaling": {
            name: value for name, value in vars(actual).items() if name.startswith("_loss_scal")
        },
        "rules": {
            name: [
                _numbers(rule),
                rule.state,
                _own(rule.hyperparam),
                getattr(rule._fp32_param, "array", None),
            ]
            for name, rule in _rules(actual)
        },
    }


def load_optimizer(optimizer: Any, kept: dict[str, Any]) -> Any:
    """Restore an optimizer to the state that :func:`copy_optimizer` returned."""
    actual = _actual(optimizer)
    actual.t, actual.epoch = kept["t"], kept["epoch"]
    for name, value in kept["hyperparameters"].items():
        setattr(actual.hyperparam, name, value)
    vars(actual).update(kept["scaling"])
    for name, rule in _rules(actual):
        numbers, rule._state, own, wide = kept["rules"][name]
        vars(rule).update(numbers)
        vars(rule.hyperparam).update(own)
        rule._fp32_param = None if wide is None else chainer.Parameter(wide)
    return optimizer


def _numbers(rule: Any) -> dict[str, Any]:
    """Return a rule's counts and flags, also those that Chainer's snapshots leave out."""
    return {name: value for name, value in vars(rule).items() if type(value) in (bool, int, float)}


def _own(hyperparameters: Any) -> dict[str, Any]:
    """Return the hyperparameters of a rule that differ from its optimizer's."""
    return {name: value for name, value in vars(hyperparameters).items() if name != "_parent"}


def _actual(optimizer: Any) -> Any:
    return getattr(optimizer, "actual_optimizer", optimizer)


def _rules(optimizer: Any) -> list[tuple[str, Any]]:
    if optimizer.target is None:
        return []
    parameters = distinct_parameters(optimizer.target)
    return [(name, p.update_rule) for name, p in parameters if p.update_rule is not None]


def _plain(value: Any) -> Any:
    return value.tolist() if value.dtype.kind == "U" else value


# -- a Trainer ------------------------------------------------------------------------------------


def copy_trainer(trainer: Any) -> dict[str, Any]:
    """Return the state of a Trainer: its updater's parts, its extensions and triggers.

    Raises:
        InvalidArgumentError: the updater is no ``StandardUpdater``, so its parts are unknown; or a
            parameter is not initialized.
    """
    updater = trainer.updater
    if not isinstance(updater, _Updater):
        raise InvalidArgumentError(
            f"State: the Trainer's updater is a {type(updater).__name__} (expected a "
            "StandardUpdater, or a class derived from it). Use MultiNodeUpdater, for example."
        )
    optimizers = updater.get_all_optimizers()
    return {
        "iteration": updater.iteration,
        "seconds": 0.0 if trainer._start_at is None else trainer.elapsed_time,
        "iterators": {name: copy_serialized(part) for name, part in updater._iterators.items()},
        "models": {name: copy_serialized(part.target) for name, part in optimizers.items()},
        "optimizers": {name: copy_optimizer(part) for name, part in optimizers.items()},
        "serialized": {name: copy_serialized(part) for name, part in _serialized(trainer).items()},
    }


def load_trainer(trainer: Any, kept: dict[str, Any]) -> Any:
    """Restore a Trainer to the state that :func:`copy_trainer` returned, so that ``run()`` resumes.

    An extension that only the Trainer or only the state has stays unchanged.
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
    """Make the updater, its iterators and optimizers, and the extensions continue with ``comm``.

    Collective: every rank of ``comm`` calls it.
    """
    updater = trainer.updater
    extensions = (entry.extension for entry in trainer._extensions.values())
    optimizers = updater.get_all_optimizers().values()
    for part in (*updater._iterators.values(), *optimizers, updater, *extensions):
        if isinstance(part, shares.Rebindable):
            part.rebind(comm)


def _load_each(parts: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in parts.keys() & kept.keys():
        load_serialized(parts[name], kept[name])


def _serialized(trainer: Any) -> dict[str, Any]:
    """Return the other objects that a Trainer's snapshot includes beside the updater, by name."""
    parts = {"stop_trigger": trainer.stop_trigger}
    for name, entry in trainer._extensions.items():
        parts[f"extensions/{name}"] = entry.extension
        parts[f"triggers/{name}"] = entry.trigger
    return {name: part for name, part in parts.items() if hasattr(part, "serialize")}


register(chainer.Link, copy_serialized, load_serialized)
register(chainer.dataset.Iterator, copy_serialized, load_serialized)
register(chainer.Optimizer, copy_optimizer, load_optimizer)
register(MultiNodeOptimizer, copy_optimizer, load_optimizer)
register(chainer.training.Trainer, copy_trainer, load_trainer, rebind_trainer)
