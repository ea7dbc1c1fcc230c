"""Ranks of `collective run` that have ended before all have met."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from collective.contract.world import World
from collective.control.store import Store
from collective.errors import RendezvousError
from collective.start.connecting import connect, tell_ended
from collective.start.stores import MemoryStore

KILLED = "killed by SIGKILL"
# Longer than any test may wait: the ranks must not need it.
FAR_S = 600.0


def meet(store: Store, job: str, ranks: list[int], start_timeout: float = FAR_S) -> list[Any]:
    """Connect some of three ranks; return the rank and size of each, or its error."""

    def rank(number: int) -> Any:
        world = World(number, 3, number, 3, "host", "collective", job, store)
        try:
            comm = connect(world, "threads", start_timeout=start_timeout)
        except RendezvousError as error:
            return str(error)
        with comm:
            comm.barrier()
            return comm.rank, comm.size, comm.local_rank, comm.local_size

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(rank, ranks))


@pytest.fixture
def job(tmp_path: Path) -> str:
    return str(tmp_path)


def test_others_meet_without_ended_rank_if_enough_are_left(job: str) -> None:
    store = MemoryStore()
    tell_ended(store, {0: KILLED}, [0, 0, 0], least=2)
    assert meet(store, job, [1, 2]) == [(0, 2, 0, 2), (1, 2, 1, 2)]


def test_rank_that_is_left_alone_goes_on(job: str) -> None:
    store = MemoryStore()
    tell_ended(store, {0: KILLED, 2: "exit code 0"}, [0, 0, 0], least=1)
    assert meet(store, job, [1]) == [(0, 1, 0, 1)]


def test_error_names_ended_ranks_and_their_ends(job: str) -> None:
    store = MemoryStore()
    tell_ended(store, {0: KILLED, 2: "exit code 3"}, [0, 0, 0], least=3)
    [error] = meet(store, job, [1])
    assert "ranks 0, 2 of 3 ended before all ranks had met: rank 0: killed by SIGKILL, " in error
    assert "rank 2: exit code 3 [rank 1]. " in error


def test_ranks_meet_a_second_time_without_rank_that_ended_after_first(job: str) -> None:
    store = MemoryStore()
    assert meet(store, job, [0, 1, 2]) == [(n, 3, n, 3) for n in range(3)]
    tell_ended(store, {2: "exit code 0"}, [0, 0, 0], least=1)
    assert meet(store, job, [0, 1]) == [(n, 2, n, 2) for n in range(2)]


def test_end_after_a_rank_has_connected_is_none_before_the_meeting(job: str) -> None:
    store = MemoryStore()
    store.set("met-0.0", json.dumps([0, 1, 2]).encode())
    tell_ended(store, {2: "exit code 0"}, [0, 0, 0], least=1)
    [error] = meet(store, job, [0], start_timeout=0.5)
    assert "threads: after 0.5 s ranks [1, 2] of 3 have not arrived [rank 0]" in error


def test_connected_ranks_follow_decision_to_meet_without_ended_rank(job: str) -> None:
    store = MemoryStore()
    tell_ended(store, {2: KILLED}, [0, 0, 0], least=1)
    store.set("met-0.0", json.dumps([0, 1]).encode())
    *found, error = meet(store, job, [0, 1, 2])
    assert found == [(0, 2, 0, 2), (1, 2, 1, 2)]
    assert "rank 2 of 3 ended before all ranks had met: killed by SIGKILL [rank 2]" in error
