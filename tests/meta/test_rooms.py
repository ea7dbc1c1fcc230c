"""The layers of ``docs/architecture.md``: imports go only to lower layers, without cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT

#: Rooms (folders), by layer from the bottom up. A room imports only from lower layers.
FLOORS = (
    {"deadline", "errors", "install", "lazy", "platform"},
    {"ops"},
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
    {"compression", "elastic", "gradients", "profile"},
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


def _imported(name: str) -> Iterator[str]:
    """Yield the modules of this package that a module imports, anywhere and also for types."""
    path = MODULES[name]
    package = ["collective", *name.split(".")]
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            # An imported name is a module of the package, or defined in the module.
            targets = [".".join([*base, alias.name]) for alias in node.names]
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
def _arrows() -> dict[str, set[str]]:
    return {name: set(_imported(name)) for name in MODULES}


def _room(name: str) -> str:
    return name.partition(".")[0]


FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def _may_import(room: str, other: str) -> bool:
    """Return whether modules of ``room`` may import the module ``other``."""
    return _room(other) == room or FLOOR.get(_room(other), 99) < FLOOR[room]


def test_rooms_are_all_on_a_layer() -> None:
    assert {_room(name) for name in MODULES} - {"", "__main__"} == FLOOR.keys()


@pytest.mark.parametrize("room", [room for rooms in FLOORS for room in sorted(rooms)])
def test_room_imports_only_from_lower_layers(room: str) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in _arrows().items()
        for other in sorted(others)
        if _room(name) == room and not _may_import(room, other)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_facade_of_their_room() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in _arrows().items()
        for other in sorted(others)
        if name.startswith(f"{other}.") and MODULES[other].name == "__init__.py"
    ]
    # The program that is installed as Chainer's startup runs as a separate process.
    assert wrong == ["adapters.chainer.compatibility.startup imports adapters.chainer"]


def test_imports_have_no_cycles() -> None:
    """Check imports for cycles, including imports for types; the error names a cycle's modules."""
    TopologicalSorter(_arrows()).prepare()
