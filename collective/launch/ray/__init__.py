"""Ray's actors as ranks: the backend ``collective`` of ``ray.util.collective``.

The import of this module registers the backend in this process. Ray needs that on the driver and
in every actor::

    import collective.launch.ray
    from ray.util import collective as col

    col.init_collective_group(world_size, rank, backend="collective")

For actors whose code cannot import it, name :func:`register` as the hook of the workers::

    ray.init(runtime_env={"worker_process_setup_hook": "collective.launch.ray.register"})

:func:`run` runs a function on ranks that are actors of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from collective import BackendUnavailableError
from collective.inner import install

try:
    importlib.import_module("ray")
except ImportError as _error:
    raise BackendUnavailableError(
        f"collective.launch.ray: Ray cannot be imported: {_error}. Try `{install.hint('ray')}`."
    ) from _error

from .group import ActorGroup
from .running import run

__all__ = ["NAME", "ActorGroup", "register", "run"]

#: Name of the backend for ``ray.util.collective``.
NAME = "collective"


def register(actors: Sequence[Any] = ()) -> None:
    """Register the backend in this process, and in the processes of ``actors``.

    A repeated call does nothing. The import of :mod:`collective.launch.ray` calls this function.

    Args:
        actors: handles of actors. The function returns when all of them have registered the
            backend.

    Raises:
        BackendUnavailableError: this version of Ray has no registration of backends.
        ray.exceptions.RayError: an actor cannot import this package, or has died.
    """
    try:
        registry = importlib.import_module("ray.util.collective.backend_registry")
    except ImportError as error:
        version = importlib.import_module("ray").__version__
        raise BackendUnavailableError(
            f"collective.launch.ray: Ray {version} cannot register a backend for "
            "ray.util.collective. Install Ray 2.58 or newer."
        ) from error
    if not registry._global_registry.is_registered(NAME):
        registry.register_collective_backend(NAME, ActorGroup)
    if actors:
        importlib.import_module("ray").get([a.__ray_call__.remote(_register) for a in actors])


def _register(actor: Any) -> None:
    """Register the backend in the process of an actor."""
    register()


register()
