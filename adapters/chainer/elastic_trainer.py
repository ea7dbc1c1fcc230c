"""How a Trainer is kept for :class:`collective.elastic.State`, and goes on among other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import chainer

from collective.errors import InvalidArgumentError
from collective.training.elastic_state import register
from collective.training.rebinding import Rebindable

from .elastic import copy_optimizer, copy_serialized, load_optimizer, load_serialized

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["copy_trainer", "load_trainer", "rebind_trainer"]

_Updater: Any = chainer.training.updaters.StandardUpdater


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
    _load_each(updater._iterators, kept["iterators"], load_serialized)
    _load_each(_serialized(trainer), kept["serialized"], load_serialized)
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


def _load_each(parts: dict[str, Any], kept: dict[str, Any], load: Callable[..., Any]) -> None:
    for name in parts.keys() & kept.keys():
        load(parts[name], kept[name])


def _serialized(trainer: Any) -> dict[str, Any]:
    """Return what writes itself into a Trainer's snapshot beside the updater, by name."""
    found = {"stop_trigger": trainer.stop_trigger}
    for name, entry in trainer._extensions.items():
        found[f"extensions/{name}"] = entry.extension
        found[f"triggers/{name}"] = entry.trigger
    return {name: each for name, each in found.items() if hasattr(each, "serialize")}


register(chainer.training.Trainer, copy_trainer, load_trainer, rebind_trainer)
