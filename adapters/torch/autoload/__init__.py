"""Registration of the backend ``collective`` with torch.distributed, at almost no cost.

torch calls :func:`autoload` through the entry point group ``torch.backends`` whenever torch is
imported. Importing ``collective`` in this call would slow down every program. So this package is
also installed separately, as ``collective_autoload``, and imports the rest when a group is made.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["NAME", "autoload", "create", "register", "rendezvous"]

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
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    if getattr(handlers.get("env"), "__name__", "") != rendezvous.__name__:
        by_torch = handlers["env"]
        handlers["env"] = functools.update_wrapper(
            functools.partial(rendezvous, by_torch), rendezvous
        )


def autoload() -> None:
    """Register the backend, or ignore any error: ``import torch`` must not fail."""
    with contextlib.suppress(Exception):
        register()


def rendezvous(by_torch: Callable[..., Any], url: str, **options: Any) -> Iterator[Any]:
    """Meet as the variables of torchrun say, or if there are none, as another launcher's do.

    torch calls this function for ``init_method="env://"``, its default. ``mpiexec`` and ``srun``
    set no variables that torch knows.

    Args:
        by_torch: torch's function for this purpose.
        url, options: its arguments.
    """
    if not os.environ.get("RANK") and "rank=" not in url:
        plugin = importlib.import_module("collective.adapters.torch.plugin")
        identity = plugin.launched_rank()
        if identity is not None and os.environ.get("MASTER_ADDR"):
            url = f"{url}{'&' if '?' in url else '?'}rank={identity[0]}&world_size={identity[1]}"
        elif identity is not None:
            return iter([plugin.rendezvous(**options)])
    return iter(by_torch(url, **options))


def create(given: Any, more: Any = None) -> Any:
    """Make a process group, by :func:`collective.adapters.torch.plugin.create`."""
    plugin = importlib.import_module("collective.adapters.torch.plugin")
    return plugin.create(given, more)
