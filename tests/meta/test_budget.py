"""Budget of the house: how many lines, names and pages a reader has to hold.

The tree grows where nothing bounds it. Whoever raises a number says why in the commit that raises
it. Whoever removes something lowers the number.
"""

from __future__ import annotations

import re

import pytest

from collective import inner
from tests.meta.house import counts, lines_of_rooms
from tests.support.interpreter import ROOT

#: Lines of Python in each room, and in ``benchmarks``.
LINES = {
    "adapters": 11,
    "adapters/chainer": 6783,
    "adapters/cupy": 182,
    "adapters/jax": 2544,
    "adapters/mpi4py": 6374,
    "adapters/torch": 8341,
    "backends": 2217,
    "backends/gloo": 737,
    "backends/hierarchical": 719,
    "backends/mpi": 3030,
    "backends/nccl": 3085,
    "backends/peers": 2748,
    "backends/shm": 2516,
    "backends/tcp": 1196,
    "benchmarks": 3000,
    "collective": 1770,
    "collective/algorithms": 2923,
    "collective/communicator": 9085,
    "collective/contract": 2813,
    "collective/control": 1608,
    "collective/cuda": 1033,
    "collective/generations": 1219,
    "collective/launch": 6707,
    "collective/memory": 2631,
    "collective/native": 658,
    "collective/platform": 732,
    "collective/start": 5117,
    "collective/testing": 8053,
    "collective/tools": 8088,
    "collective/trace": 651,
    "collective/training": 6232,
}
#: Numbers of things. Words are those of all Markdown files but the entries for the changelog.
COUNTS = {
    "lines of C": 10928,
    "modules": 443,
    "names of the package": 70,
    "methods of Communicator": 29,
    "properties of Communicator": 3,
    "settings": 22,
    "decisions": 39,
    "words of documentation": 104990,
    "lines of the longest file of C": 479,
    "names of the inner API": 60,
    "imports of inner modules": 100,
    "programs in benchmarks": 15,
    "lines of the Makefile": 148,
    "targets of the Makefile": 15,
}


@pytest.mark.parametrize("room", sorted(LINES))
def test_room_keeps_its_lines(room: str) -> None:
    assert lines_of_rooms()[room] <= LINES[room]


def test_every_room_has_a_budget() -> None:
    assert lines_of_rooms().keys() == LINES.keys()


@pytest.mark.parametrize("thing", sorted(COUNTS))
def test_number_of_things_keeps_its_budget(thing: str) -> None:
    assert counts()[thing] <= COUNTS[thing]


def test_page_lists_the_inner_api() -> None:
    page = (ROOT / "docs/reference/inner.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.M)) == sorted(inner.__all__)
