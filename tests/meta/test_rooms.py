"""The drawing of ``docs/architecture.md``: which room may import which, and no circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT

#: Rooms from the ground up. Whoever is on a floor imports what is below it, and nothing beside it.
FLOORS = (
    {"deadline", "errors", "install", "lazy"},
    {"ops"},
    {"native"},
    {"cuda"},
    {"memory"},
    {"request"},
    {"algorithms"},
    {"contract"},
    {"elastic"},
    {"backends", "communicator"},
    {"trace"},
    {"start"},
    {"launch", "training"},
    {"adapters"},
    {"testing"},
    {"tools"},
)
#: Modules that users import, and no module of the house does. They export what stands on any floor:
#: ``elastic`` lazily, as the package is also the room of the protocol on which communicators stand.
FACADES = {"compression", "elastic", "gradients", "profile"}


def _modules() -> dict[str, Path]:
    """Return the file of each module, by its name without ``collective.``."""
    found = {}
    for folder in ("collective", "backends", "adapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue  # the links to the folders beside
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts[1:] if folder == "collective" else parts
            parts = parts[:-1] if path.name == "__init__.py" else parts
            found[".".join(parts)] = path
    return found


MODULES = _modules()


def _imported(name: str) -> Iterator[str]:
    """Yield what a module imports of the house, types included, wherever the import stands."""
    path = MODULES[name]
    package = ["collective", *name.split(".")]
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            # A name is a module of that package, or something in the module.
            found = [".".join([*base, alias.name]) for alias in node.names]
            found = [
                each if each.removeprefix("collective.") in MODULES else each.rpartition(".")[0]
                for each in found
            ]
        else:
            continue
        for each in found:
            short = each.removeprefix("collective.")
            if each != short and short in MODULES and short != name:
                yield short


@cache
def _arrows() -> dict[str, set[str]]:
    return {name: set(_imported(name)) for name in MODULES}


def _room(name: str) -> str:
    return name.partition(".")[0]


FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def _may_import(room: str, other: str) -> bool:
    """Return whether modules of ``room`` may import the module ``other``."""
    if other in FACADES:
        return False
    return _room(other) == room or FLOOR.get(_room(other), 99) < FLOOR[room]


def test_every_room_is_on_a_floor() -> None:
    rooms = {_room(name) for name in MODULES if name not in FACADES}
    assert rooms - {"", "__main__"} == FLOOR.keys()
    assert MODULES.keys() >= FACADES


@pytest.mark.parametrize("room", [room for rooms in FLOORS for room in sorted(rooms)])
def test_a_room_imports_only_what_is_below_it(room: str) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in _arrows().items()
        for other in sorted(others)
        if name not in FACADES and _room(name) == room and not _may_import(room, other)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_its_own_rooms_facade() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in _arrows().items()
        for other in sorted(others)
        if name.startswith(f"{other}.") and MODULES[other].name == "__init__.py"
    ]
    # The program that is installed as Chainer's start is a process of its own.
    assert wrong == ["adapters.chainer.compatibility.startup imports adapters.chainer"]


def test_there_are_no_circles() -> None:
    """Of modules that import each other, types included; the error names those of one."""
    TopologicalSorter(_arrows()).prepare()
