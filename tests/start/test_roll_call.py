"""Members meet under a name that others may have used before."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from collective.deadline import Deadline
from collective.errors import RendezvousError
from collective.start.connecting import refuse_ended, tell_ended
from collective.start.meeting import Peer, call_roll
from collective.start.stores import MemoryStore

CARD = Peer(2, "host", "1.0", "actor")


def call(
    store: MemoryStore, *cards: Peer, seconds: float = 20.0
) -> list[Future[tuple[str, int, int]]]:
    """Have members with the ranks 0, 1, … meet; return when all are through."""
    with ThreadPoolExecutor(len(cards)) as pool:
        return [
            pool.submit(call_roll, store, rank, card, Deadline(seconds))
            for rank, card in enumerate(cards)
        ]


def test_members_agree_on_job_and_hosts() -> None:
    cards = [CARD._replace(size=3, host=host) for host in "aba"]
    places = [future.result() for future in call(MemoryStore(), *cards)]
    assert [place[1:] for place in places] == [(0, 2), (0, 1), (1, 2)]
    assert len({job for job, *_ in places}) == 1


def test_member_alone_needs_nobody() -> None:
    assert call(MemoryStore(), CARD._replace(size=1))[0].result()[1:] == (0, 1)


def test_groups_of_one_name_have_different_jobs() -> None:
    store = MemoryStore()
    assert len({call(store, CARD, CARD)[0].result()[0] for _ in range(3)}) == 3


@pytest.mark.parametrize("stale", [{"size": 7}, {"version": "0.1"}, {"host": "gone"}])
def test_card_of_a_dead_member_is_ignored(stale: dict[str, Any]) -> None:
    store = MemoryStore()
    dead = CARD._replace(token="dead", **stale)
    store.set("card-1", json.dumps(dead).encode())
    store.set("card-0", json.dumps(CARD._replace(token="dead, too")).encode())
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(call_roll, store, 0, CARD, Deadline(20.0))
        store.get("list", Deadline(20.0))  # the leader has read the old card
        member = pool.submit(call_roll, store, 1, CARD, Deadline(20.0))
    assert leader.result()[1:] == (0, 2)
    assert member.result()[0] == leader.result()[0]


def test_list_of_a_dead_leader_is_not_accepted() -> None:
    store = MemoryStore()
    old = [CARD._replace(token="dead")] * 2
    store.set("list", json.dumps({"job": "old", "cards": old}).encode())
    store.set("start-old", b"")
    assert {future.result()[0] for future in call(store, CARD, CARD)} != {"old"}


@pytest.mark.parametrize(
    ("other", "text"),
    [({"size": 3}, "number of ranks: 2 on rank 0"),
     ({"version": "2.0"}, "version of collective: 1.0 on rank 0"),
     ({"python": "2.7"}, "version of Python: 3")],
)  # fmt: skip
def test_members_that_differ_raise_the_same_error(other: dict[str, Any], text: str) -> None:
    errors = [str(f.exception()) for f in call(MemoryStore(), CARD, CARD._replace(**other))]
    assert text in errors[0]
    assert errors[0] == errors[1]


def test_missing_member_is_named() -> None:
    cards = [CARD._replace(size=3)] * 2
    for future in call(MemoryStore(), *cards, seconds=0.2):
        with pytest.raises(RendezvousError, match=r"rank 2 did not come within 0\.2 s"):
            future.result()


def test_second_member_of_a_rank_ends_the_first() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call_roll, store, 1, CARD, Deadline(20.0))
        store.get("card-1", Deadline(20.0))
        second = pool.submit(call_roll, store, 1, CARD._replace(label="twin"), Deadline(0.5))
        with pytest.raises(RendezvousError, match="twin has joined as rank 1"):
            first.result()
    assert isinstance(second.exception(), RendezvousError)


def test_card_is_published_again_after_the_leader_cleaned_up() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        member = pool.submit(call_roll, store, 1, CARD, Deadline(20.0))
        store.get("card-1", Deadline(20.0))
        store.delete("card-1")
        assert call_roll(store, 0, CARD, Deadline(20.0))[0] == member.result()[0]


def test_meeting_leaves_no_cards() -> None:
    store = MemoryStore()
    call(store, CARD, CARD)
    assert store.try_get("card-0") is None
    assert store.try_get("card-1") is None


@pytest.mark.parametrize("rank", [0, 1])
def test_member_learns_that_another_has_ended(rank: int) -> None:
    store = MemoryStore()
    tell_ended(store, {2: "the actor has died"}, [0] * 3, least=3)
    look = partial(refuse_ended, store, rank, 3)
    with pytest.raises(RendezvousError, match=r"rank 2 of 3 ended .* the actor has died \[rank"):
        call_roll(store, rank, CARD._replace(size=3), Deadline(600.0), look)
