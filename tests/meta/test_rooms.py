"""The layers of ``docs/architecture.md``: imports go only to lower layers, without cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT

pytestmark = pytest.mark.quick

#: Rooms (folders), by layer from the bottom up. A room imports only from lower layers.
FLOORS = (
    {"deadline", "errors", "install", "lazy", "platform"},
    {"control", "ops"},
    {"native"},
    {"cuda"},
    {"memory"},
    {"request"},
    {"algorithms"},
    {"shards"},
    {"contract"},
    {"generations"},
    {"backends", "communicator"},
    {"trace"},
    {"start"},
    {"launch", "training"},
    {"adapters"},
    {"testing"},
    {"tools"},
    # Facades: only users import them. A facade on a lower layer, or a folder of modules that others
    # import, would let these modules depend on all that it exports, also if it exports lazily.
    {"compression", "elastic", "gradients", "inner", "profile"},
)


def _modules() -> dict[str, Path]:
    """Return the file of each module, by the module's name without ``collective.``."""
    files = {}
    for folder in ("collective", "backends", "adapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue  # a link to a folder of the repository's root
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if folder == "collective" else parts
            parts = parts[:-1] if path.name == "__init__.py" else parts
            files[".".join(parts)] = path
    return files


MODULES = _modules()


def _origins(facade: str) -> dict[str, str]:
    """Return the module or the name behind each name that a lazy facade exports."""
    imports = [node for node in ast.walk(ast.parse(MODULES[facade].read_text()))
               if isinstance(node, ast.ImportFrom)]  # fmt: skip
    return {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


# An import of the inner API is one of what it hands on.
_INNER = _origins("inner")


def _statements(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """Yield all nodes of a tree; without ``types``, not those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            continue
        yield node
        yield from _statements(node, types)


def _imported(name: str, types: bool = True) -> Iterator[str]:
    """Yield the modules of this package that a module imports, anywhere.

    Args:
        name: name of the module.
        types: whether imports under ``if TYPE_CHECKING`` count.
    """
    path = MODULES[name]
    package = ["collective", *name.split(".")]
    package = package if path.name == "__init__.py" else package[:-1]
    for node in _statements(ast.parse(path.read_text()), types):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            # An imported name is a module of the package, or defined in the module.
            targets = [".".join([*base, alias.name]) for alias in node.names]
            if base == ["collective", "inner"]:
                targets = [_INNER[alias.name] for alias in node.names]
            targets = [
                target
                if target.removeprefix("collective.") in MODULES
                else target.rpartition(".")[0]
                for target in targets
            ]
        else:
            continue
        for target in targets:
            short = target.removeprefix("collective.")
            if target != short and short in MODULES and short != name:
                yield short


@cache
def arrows(types: bool = True) -> dict[str, set[str]]:
    return {name: set(_imported(name, types)) for name in MODULES}


def room_of(name: str) -> str:
    return name.partition(".")[0]


FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def may_import(room: str, other: str) -> bool:
    """Return whether modules of ``room`` may import the module ``other``."""
    return room_of(other) == room or FLOOR.get(room_of(other), 99) < FLOOR[room]


def test_rooms_are_all_on_a_layer() -> None:
    assert {room_of(name) for name in MODULES} - {"", "__main__"} == FLOOR.keys()


@pytest.mark.parametrize("room", [room for rooms in FLOORS for room in sorted(rooms)])
def test_room_imports_only_from_lower_layers(room: str) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in sorted(others)
        if room_of(name) == room and not may_import(room, other)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_facade_of_their_room() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in sorted(others)
        if name.startswith(f"{other}.") and MODULES[other].name == "__init__.py"
    ]
    assert wrong == []


def test_imports_have_no_cycles() -> None:
    """Check imports for cycles; the error names a cycle's modules.

    Modules of one room may name each other's classes as types, as a protocol that mirrors one class
    would only repeat it. Between rooms the layers allow no cycles, not even of types.
    """
    TopologicalSorter(arrows(types=False)).prepare()
