"""Budget of the house: how many lines, names and pages a reader has to hold.

The tree grows where nothing bounds it. Whoever raises a number says why in the commit that raises
it. Whoever removes something lowers the number.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import collective
from collective.communicator import Communicator
from collective.start.keys import KEYS
from tests.support.interpreter import ROOT

#: Lines of Python in each room, and in ``benchmarks``.
LINES = {
    "adapters": 11,
    "adapters/chainer": 7651,
    "adapters/cupy": 189,
    "adapters/jax": 2575,
    "adapters/torch": 8696,
    "backends": 768,
    "backends/gloo": 1644,
    "backends/hierarchical": 913,
    "backends/mpi": 2882,
    "backends/nccl": 3276,
    "backends/peers": 3561,
    "backends/shm": 2666,
    "benchmarks": 2835,
    "collective": 1614,
    "collective/algorithms": 1920,
    "collective/communicator": 9537,
    "collective/contract": 2887,
    "collective/cuda": 1028,
    "collective/generations": 1175,
    "collective/launch": 7216,
    "collective/memory": 2800,
    "collective/native": 552,
    "collective/platform": 972,
    "collective/start": 5097,
    "collective/testing": 7027,
    "collective/tools": 11117,
    "collective/trace": 778,
    "collective/training": 6200,
}
#: Numbers of things. Words are those of all Markdown files but the entries for the changelog.
COUNTS = {
    "lines of C": 7936,
    "modules": 476,
    "names of the package": 75,
    "methods of Communicator": 37,
    "properties of Communicator": 15,
    "settings": 31,
    "decisions": 46,
    "words of documentation": 115360,
}


def _of_tree(pattern: str, *folders: str) -> list[Path]:
    """Return the files that match, without those behind links to other folders."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob(pattern)))
    return [path for path in paths if not any(parent.is_symlink() for parent in path.parents)]


def _lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "benchmarks" or len(parts) == 2:
        return parts[0]
    return "/".join(parts[:2])


def _lines_of_rooms() -> dict[str, int]:
    rooms: dict[str, list[Path]] = {}
    for path in _of_tree("*.py", "collective", "backends", "adapters", "benchmarks"):
        rooms.setdefault(_room(path), []).append(path)
    return {room: _lines(paths) for room, paths in rooms.items()}


def _counts() -> dict[str, int]:
    code = "collective", "backends", "adapters"
    members = [m for name, m in inspect.getmembers_static(Communicator) if name[0] != "_"]
    properties = sum(isinstance(member, property) for member in members)
    # Names of other libraries are no methods: they raise an error that names ours.
    foreign = [member for member in members if type(member).__name__ == "_Foreign"]
    methods = sum(map(inspect.isroutine, members)) - sum(map(inspect.isroutine, foreign))
    pages = [*_of_tree("*.md", "docs", "benchmarks"), *ROOT.glob("*.md")]
    return {
        "lines of C": _lines([*_of_tree("*.c", *code), *_of_tree("*.h", *code)]),
        "modules": len(_of_tree("*.py", *code)),
        "names of the package": len(collective.__all__),
        "methods of Communicator": methods,
        "properties of Communicator": properties,
        "settings": len(KEYS),
        "decisions": len(list((ROOT / "docs" / "decisions").glob("0*.md"))),
        "words of documentation": sum(len(page.read_text().split()) for page in pages),
    }


@pytest.mark.parametrize("room", sorted(LINES))
def test_room_keeps_its_lines(room: str) -> None:
    assert _lines_of_rooms()[room] <= LINES[room]


def test_every_room_has_a_budget() -> None:
    assert _lines_of_rooms().keys() == LINES.keys()


@pytest.mark.parametrize("thing", sorted(COUNTS))
def test_number_of_things_keeps_its_budget(thing: str) -> None:
    assert _counts()[thing] <= COUNTS[thing]
