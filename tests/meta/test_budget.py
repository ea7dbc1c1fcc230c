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
    "adapters/chainer": 6843,
    "adapters/cupy": 184,
    "adapters/jax": 2574,
    "adapters/mpi4py": 6482,
    "adapters/torch": 8358,
    "backends": 2227,
    "backends/gloo": 745,
    "backends/hierarchical": 725,
    "backends/mpi": 3075,
    "backends/nccl": 3120,
    "backends/peers": 2760,
    "backends/shm": 2562,
    "backends/tcp": 1208,
    "benchmarks": 3000,
    "collective": 1804,
    "collective/algorithms": 2981,
    "collective/communicator": 9133,
    "collective/contract": 2843,
    "collective/control": 1621,
    "collective/cuda": 1039,
    "collective/generations": 1229,
    "collective/launch": 6785,
    "collective/memory": 2652,
    "collective/native": 639,
    "collective/platform": 734,
    "collective/start": 5181,
    "collective/testing": 8075,
    "collective/tools": 8204,
    "collective/trace": 663,
    "collective/training": 6273,
}
#: Numbers of things. Words are those of all Markdown files but the entries for the changelog.
COUNTS = {
    "lines of C": 10871,
    "modules": 443,
    "names of the package": 70,
    "methods of Communicator": 29,
    "properties of Communicator": 3,
    "settings": 22,
    "decisions": 39,
    "words of documentation": 104999,
    "lines of the longest file of C": 492,
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
