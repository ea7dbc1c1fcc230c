"""Lazy packages, which import a name's module when the name is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["on_demand"]


def on_demand(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its modules on demand.

    Type checkers must not see them: for a type checker, a module with ``__getattr__`` has every
    name.

    Args:
        package: ``__name__`` of the package.
        modules: path of the module that defines each exported name, by that name. If the module
            itself is exported, its path ends with the name. The path of a module beside the package
            begins with a dot.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f".{modules[name]}", package)
        return module if modules[name].rpartition(".")[2] == name else getattr(module, name)

    def names() -> list[str]:
        return [*modules, "__doc__", "__file__"]

    return get, names
