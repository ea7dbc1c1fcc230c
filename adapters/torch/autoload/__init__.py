"""Tells torch.distributed of the backend ``collective``, at next to no cost.

torch calls :func:`autoload` through the entry point group ``torch.backends`` whenever it is
imported. To import ``collective`` for that would hold up every program, so this package is also
installed beside it, as ``collective_autoload``, and imports the rest when a group is made.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

__all__ = ["NAME", "autoload", "create", "register"]

NAME = "collective"


def register() -> None:
    """Register the backend; a second time does nothing.

    Raises:
        ImportError: there is no torch, or one without torch.distributed.
    """
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        raise ImportError("torch.distributed: this build of torch has none.")
    if not hasattr(distributed.Backend, NAME.upper()):
        devices = ["cpu", "cuda"]
        distributed.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


def autoload() -> None:
    """Register the backend or leave it: ``import torch`` must work."""
    with contextlib.suppress(Exception):
        register()


def create(given: Any, more: Any = None) -> Any:
    """Make a process group; as :func:`collective.adapters.torch.plugin.create`."""
    plugin = importlib.import_module("collective.adapters.torch.plugin")
    return plugin.create(given, more)
