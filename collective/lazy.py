"""Lazy packages, which import a name's module when the name is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def on_demand(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for a package that imports its modules on demand.

    Type checkers must not see them: for a type checker, a module with ``__getattr__`` has every
    name.

    Args:
        package: ``__name__`` of the package.
        names: exported names, with spaces between them, by the path of the module that defines
            them. A path that is empty or ends with a dot is that of a package whose modules are
            exported themselves.
    """
    homes = {name: path for path, listed in names.items() for name in listed.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = homes[name]
        if not path or path.endswith("."):
            return importlib.import_module(f"{package}.{path}{name}")
        return getattr(importlib.import_module(f"{package}.{path}"), name)

    return get, lambda: [*homes, "__doc__", "__file__"]
