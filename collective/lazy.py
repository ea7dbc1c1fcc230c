"""Packages whose names are imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["on_demand"]


def on_demand(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports what is asked for.

    A type checker must not see them: a ``__getattr__`` means to it that there is any name.

    Args:
        package: its ``__name__``.
        modules: of each name that it exports, the module in it that has it; its own name for a
            module that is exported itself. A module beside the package begins with a dot.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f".{modules[name]}", package)
        return module if modules[name] == name else getattr(module, name)

    def names() -> list[str]:
        return [*modules, "__doc__", "__file__"]

    return get, names
