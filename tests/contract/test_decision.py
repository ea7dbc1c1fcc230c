"""Decisions that ranks take by one key of a store.

The public suite has further checks, of ``shrink()``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from collective.contract.decision import Decision, Note
from collective.deadline import Deadline
from collective.errors import CollectiveTimeoutError, RendezvousError, UnsupportedError
from collective.start.stores import MemoryStore

FAR_S = 30.0


def members(notes: Mapping[int, Note], lost: Set[int]) -> list[int]:
    return sorted(set(notes) - lost)


def decision(
    store: MemoryStore, me: int, size: int, lost: Callable[[], Set[int]] = frozenset
) -> Decision:
    return Decision(store, "key", me, range(size), lost, "shrink", lambda rank: rank)


def decide(
    member: Decision, note: Note | None = None, *, grace: float | None = FAR_S,
    timeout: float = FAR_S,
) -> Any:  # fmt: skip
    return member.made(note or {}, members, grace=grace, deadline=Deadline(timeout))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make all calls at the same time, in threads; return their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(FAR_S) for future in [pool.submit(call) for call in calls]]


def test_decision_includes_all_ranks_that_call() -> None:
    store = MemoryStore()
    every = [decision(store, rank, 4) for rank in range(4)]
    assert (
        together(*(lambda member=member: decide(member) for member in every)) == [[0, 1, 2, 3]] * 4
    )


def test_decision_does_not_wait_for_lost_ranks() -> None:
    store = MemoryStore()
    every = [decision(store, rank, 4, lambda: {0, 2}) for rank in (1, 3)]
    assert together(*(lambda member=member: decide(member) for member in every)) == [[1, 3]] * 2


def test_decision_is_same_for_ranks_that_see_different_losses() -> None:
    # Each rank believes that the other is lost: the first to write decides for both.
    store = MemoryStore()
    first, second = (decision(store, rank, 2, lambda rank=rank: {1 - rank}) for rank in (0, 1))
    verdicts = together(lambda: decide(first), lambda: decide(second))
    assert verdicts[0] == verdicts[1]


def test_decision_is_read_by_late_rank() -> None:
    store = MemoryStore()
    assert decide(decision(store, 0, 2, lambda: {1})) == [0]
    assert decide(decision(store, 1, 2)) == [0]


def test_decision_leaves_silent_rank_out_after_grace() -> None:
    assert decide(decision(MemoryStore(), 1, 3), grace=0.01) == [1]


def test_decision_with_deadline_below_grace_leaves_silent_ranks_out() -> None:
    assert decide(decision(MemoryStore(), 0, 2), grace=FAR_S, timeout=0.2) == [0]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_decision_with_deadline_below_grace_skips_stopped_leaders(
    ahead: int,
) -> None:
    store = MemoryStore()
    for rank in range(ahead):
        store.set(f"key.{rank}", b"{}")
    every = list(range(ahead + 1))
    assert decide(decision(store, ahead, ahead + 2), grace=FAR_S, timeout=0.2) == every


def test_decision_does_not_wait_for_stopped_leader_after_grace() -> None:
    store = MemoryStore()
    store.set("key.0", b"{}")
    assert decide(decision(store, 1, 2), grace=0.01) == [0, 1]


def test_decision_does_not_wait_for_excluded_rank() -> None:
    assert decide(decision(MemoryStore(), 0, 2), {"exclude": [1]}) == [0]


def test_decision_without_grace_times_out_and_names_rank() -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 1, which did not call it") as caught:
        decide(decision(MemoryStore(), 0, 2), grace=None, timeout=0.05)
    assert caught.value.ranks == (1,)


def test_decision_passes_from_dead_leader_to_next_rank() -> None:
    store, lost = MemoryStore(), set[int]()
    store.set("key.0", b"{}")
    looks = []

    def dies() -> Set[int]:
        looks.append(None)
        return {0} if len(looks) > 3 else lost

    assert decide(decision(store, 1, 2, dies)) == [1]


def test_decision_of_patient_ranks_leaves_silent_rank_out_after_a_loss() -> None:
    member, looks = decision(MemoryStore(), 1, 3), []

    def broken() -> bool:
        looks.append(None)
        return len(looks) > 3

    verdict = member.made(
        {"patient": True}, members, grace=0.01, deadline=Deadline(FAR_S), broken=broken
    )
    assert verdict == [1]


def test_decision_gives_grace_from_moment_at_which_a_rank_hurries() -> None:
    store, waited = MemoryStore(), 0.5

    def later(rank: int, seconds: float) -> Any:
        time.sleep(seconds)
        return decide(decision(store, rank, 3), grace=waited)

    verdicts = together(
        lambda: decide(decision(store, 0, 3), {"patient": True}, grace=waited),
        lambda: later(1, 1.2 * waited),
        lambda: later(2, 1.4 * waited),
    )
    assert verdicts == [[0, 1, 2]] * 3


def test_decision_ignores_entries_written_after_verdict() -> None:
    class Overtaken(MemoryStore):
        """Store in which rank 1 decides, and goes on, while rank 0 publishes its note."""

        def set(self, key: str, value: bytes) -> None:
            for name, text in ((key, value), ("key", b"[1]"), ("key.1", b'{"connected": true}')):
                super().set(name, text)

    def conclude(notes: Mapping[int, Note], lost: Set[int]) -> Any:
        pytest.fail(f"rank 0 drew a conclusion from {notes}")

    assert decision(Overtaken(), 0, 2).made(
        {}, conclude, grace=FAR_S, deadline=Deadline(FAR_S)
    ) == [1]


def test_decision_raises_unsupported_error_of_store() -> None:
    class Simple(MemoryStore):
        def put_if_absent(self, key: str, value: bytes) -> bytes:
            raise UnsupportedError("put_if_absent: no")

    with pytest.raises(UnsupportedError):
        decide(decision(Simple(), 0, 1))


def test_decision_with_foreign_value_in_store_raises_rendezvous_error() -> None:
    store = MemoryStore()
    store.set("key", b"not JSON")
    with pytest.raises(RendezvousError, match="'key' in the store was not written by a rank"):
        decide(decision(store, 0, 2))


def test_decision_returns_verdict_of_store() -> None:
    """Check that a rank follows the decision of a rank that decided first."""

    class Overtaken(MemoryStore):
        def put_if_absent(self, key: str, value: bytes) -> bytes:
            super().put_if_absent(key, json.dumps([7]).encode())
            return super().put_if_absent(key, value)

    assert decide(decision(Overtaken(), 0, 1)) == [7]
