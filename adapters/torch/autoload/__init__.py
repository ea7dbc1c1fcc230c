"""Registration of the backend ``collective`` with torch.distributed, at almost no cost.

torch calls :func:`autoload` through the entry point group ``torch.backends`` whenever torch is
imported. Importing ``collective`` in this call would slow down every program. So this package is
also installed separately, as ``collective_autoload``, and imports the rest when a group is made.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

__all__ = ["NAME", "autoload", "create", "register"]

NAME = "collective"


def register() -> None:
    """Register the backend, unless it is registered already.

    Raises:
        ImportError: torch is not installed, or was built without torch.distributed.
    """
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        raise ImportError("torch.distributed: this build of torch does not have it.")
    if not hasattr(distributed.Backend, NAME.upper()):
        devices = ["cpu", "cuda"]
        distributed.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


def autoload() -> None:
    """Register the backend, or ignore any error: ``import torch`` must not fail."""
    with contextlib.suppress(Exception):
        register()


def create(given: Any, more: Any = None) -> Any:
    """Make a process group, by :func:`collective.adapters.torch.plugin.create`."""
    plugin = importlib.import_module("collective.adapters.torch.plugin")
    return plugin.create(given, more)
