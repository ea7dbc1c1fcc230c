"""The parts of `make soak`, a little of each, so that they do not rot: see docs/failures.md."""

from __future__ import annotations

import random
import sys

import pytest

pytest.importorskip("torch", reason="some arrays are torch's")

from collective.testing import run_ranks
from tests.soak.aliasing import soak as aliasing
from tests.soak.calls import soak
from tests.soak.elastic import lives
from tests.soak.messages import TARGETS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets, /proc")

# The others start processes, or make as many as a hundred times more at least.
QUICK = sorted(TARGETS.keys() - {"rings"})


def test_random_calls() -> None:
    made, again = run_ranks(2, soak, 7, 300, 60.0)
    assert made == again
    assert sum(made.values()) == 300


def test_random_aliases() -> None:
    made, again = run_ranks(2, aliasing, 7, 200)
    assert sum(made.values()) == sum(again.values()) == 2 * 200


def test_random_losses() -> None:
    found = lives(["shm"], 1, 7, 60.0, spares=1)
    assert found.problems == []
    assert (found.kills.total(), found.joined) == (4, 1)


@pytest.mark.parametrize("target", QUICK)
def test_mutated_messages(target: str) -> None:
    found = TARGETS[target](random.Random(7), 50)
    assert found.made >= 50
    assert found.problems == []
