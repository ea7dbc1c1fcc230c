"""Short runs of all parts of ``make soak``, so that the parts keep working.

See docs/failures.md.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="some arrays are torch's")

from collective import native
from collective.testing import run_ranks
from tests.soak.aliasing import soak as aliasing
from tests.soak.calls import soak
from tests.soak.elastic import lives
from tests.soak.flips import OPERATIONS, flips
from tests.soak.messages import TARGETS
from tests.soak.midst import PHASES, midst
from tests.soak.staging_flips import STAGED, staging_flips
from tests.soak.strangers import KINDS, LISTENERS, strangers
from tests.support.network_hosts import needs_hosts


def test_random_calls_give_same_counts_on_all_ranks() -> None:
    first, second = run_ranks(2, soak, 7, 300, 60.0)
    assert first == second
    assert sum(first.values()) == 300


def test_random_aliases_are_all_correct() -> None:
    first, second = run_ranks(2, aliasing, 7, 200)
    assert sum(first.values()) == sum(second.values()) == 2 * 200


def test_random_losses_leave_no_problems() -> None:
    result = lives(["shm"], 1, 7, 60.0, spares=1)
    assert result.problems == []
    assert (result.kills.total(), result.joined) == (4, 1)


def test_kills_in_the_middle_of_each_phase_leave_no_problems() -> None:
    result = midst(len(PHASES), 7, 60.0)
    assert result.problems == []
    assert set(result.hits.elements()) == set(PHASES)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_mutated_messages_cause_no_problems(target: str) -> None:
    findings = TARGETS[target](random.Random(7), 50)
    assert findings.made >= 50
    assert findings.problems == []


def test_flipped_bits_are_all_found() -> None:
    result = flips(7, 300)
    assert result.problems == []
    assert result.made == 300
    assert result.found.total() + result.folded + result.unused == result.made
    assert result.folded < 20
    assert {place.split()[0] for place in result.found} == set(OPERATIONS)


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
def test_flipped_bits_of_staging_areas_are_all_found() -> None:
    result = staging_flips(7, 80)
    assert result.problems == []
    assert result.made >= 80
    assert result.found.total() + result.folded + result.unused == result.made
    hit = {place.split()[0] for place in result.found} & set(STAGED)
    assert len(hit) > 3, result.found


@pytest.mark.whole
def test_strangers_neither_stay_nor_get_in_nor_hold_a_job_up(tmp_path: Path) -> None:
    needs_hosts()
    result = strangers(tmp_path, 600)
    assert result.problems == []
    assert set(result.made) == set(KINDS)
    # The hub listens only for a moment, so a short run may miss it.
    assert set(result.listeners) >= set(LISTENERS.values()) - {"hub"}
    assert result.memory < 64 << 20
    for kind, quiet, attacked in result.medians():
        # Single calls may be slow on a busy machine. Ranks that connect may wait for strangers,
        # each time for a quarter of a second at most.
        more = 0.1 if kind.startswith(("short", "long")) else 1.0
        assert attacked < 2 * quiet + more, kind
