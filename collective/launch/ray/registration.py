"""Registration of the backend with Ray."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from collective.errors import BackendUnavailableError

from .arrays import register_transports
from .group import ActorGroup

__all__ = ["NAME", "register"]

#: Name of the backend for ``ray.util.collective``.
NAME = "collective"


def register(actors: Sequence[Any] = ()) -> None:
    """Register backend and transports in this process, and in the processes of ``actors``.

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
    register_transports()
    if actors:
        importlib.import_module("ray").get([a.__ray_call__.remote(_register) for a in actors])


def _register(actor: Any) -> None:
    """Register the backend in the process of an actor."""
    register()
