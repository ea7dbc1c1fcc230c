"""Deliberately broken transports: the public suite catches each one by the right check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from collective.backends.shm import ShmBackend
from collective.backends.threads import ThreadsBackend
from collective.contract.backend import Backend
from collective.contract.decision import Decision
from collective.testing import RankFactory, all_checks, run_checks
from tests.support import broken_transport as broken
from tests.support.loopback import Loopback

pytestmark = pytest.mark.whole


class Fault(NamedTuple):
    """Broken transport, the check that must catch it, and an unrelated check that must pass."""

    kind: type[Backend]
    caught_by: str
    case: dict[str, Any]
    says: str
    passes: str
    size: int = 3


FAULTS = [
    Fault(broken.WrongRoot, "check_broadcast", {"root": 1}, "root=1", "check_scan"),
    Fault(broken.WrongOrder, "check_all_gather", {}, "all_gather", "check_gather"),
    Fault(broken.LostTail, "check_send_recv", {}, "a large array", "check_objects"),
    Fault(
        broken.LostTail, "check_all_reduce_large", {"op": "sum", "dtype": "float32"},
        "elements are wrong", "check_order_rank_bfloat16",
    ),
    Fault(broken.Aliasing, "check_inputs_untouched", {"count": 12}, "the input", "check_scan"),
    Fault(
        broken.Rewriting, "check_read_only", {"count": 12}, "read-only", "check_inputs_untouched"
    ),
    Fault(broken.Stale, "check_repeated", {"count": 12}, "reduce_scatter in turn", "check_gather"),
    Fault(broken.SwappedTags, "check_tags", {}, "the message with tag 7", "check_message_order"),
    Fault(broken.DroppedRank, "check_all_reduce", {"op": "sum"}, "all_reduce(sum)", "check_reduce"),
    Fault(broken.WrongDtype, "check_reduce", {"root": 0}, "of float", "check_all_gather"),
    Fault(broken.Saturating, "check_all_reduce", {"op": "sum"}, "of int8", "check_extremes"),
    Fault(
        broken.Saturating, "check_all_reduce_large", {"op": "sum", "dtype": "int16"},
        "elements are wrong", "check_scan",
    ),
    Fault(broken.Platform, "check_extremes", {"op": "min"}, "all_reduce(min)", "check_all_reduce"),
    Fault(broken.Platform, "check_extremes", {"op": "max"}, "all_reduce(max)", "check_reduce"),
    Fault(broken.Bytewise, "check_bools_folded", {"op": "max"}, "all_reduce(max)", "check_scatter"),
    Fault(broken.Bytewise, "check_bools_folded", {"op": "bor"}, "all_reduce(bor)", "check_reduce"),
    Fault(broken.RawFirst, "check_bools_folded", {"op": "bxor"}, "scan(bxor)", "check_all_reduce"),
    Fault(broken.Tidying, "check_bools_moved", {}, "all_gather", "check_bools_folded"),
    Fault(broken.Hanging, "check_barrier", {"root": 0}, "RankHungError", "check_all_to_all"),
    Fault(broken.Crashing, "check_all_gather", {}, "killed by signal 9", "check_premul_sum"),
    Fault(broken.Raising, "check_scan", {}, "the cable is loose", "check_reduce_large"),
    Fault(
        broken.Swallowing, "check_failed_operator", {"call": "scan"}, "instead of",
        "check_user_op",
    ),
    Fault(broken.Undivided, "check_all_reduce", {"op": "avg"}, "all_reduce(avg)", "check_dup"),
    Fault(
        broken.Disordered, "check_order_rank", {"dtype": "float32"}, "in rank order",
        "check_all_reduce", 4,
    ),
    Fault(broken.Commuting, "check_user_op_order", {}, "keeps its right", "check_user_op"),
    Fault(broken.Impatient, "check_barrier", {"root": 0}, "left before", "check_broadcast"),
    Fault(broken.Unchecked, "check_mismatch", {"what": "op"}, "although", "check_all_reduce"),
    Fault(
        broken.Unchecked, "check_mismatch_by_itself", {"what": "op"}, "although", "check_scan"
    ),
    Fault(broken.Early, "check_sender_may_overwrite", {}, "in a row", "check_barrier"),
    Fault(
        broken.Deaf, "check_killed_peer", {"call": "barrier"}, "instead of PeerLostError",
        "check_scan",
    ),
    Fault(
        broken.Lingering, "check_closed_by_another_thread", {"call": "recv", "after": 0.2},
        "close() does not end this call", "check_left_peer",
    ),
    Fault(
        broken.Secretive, "check_failed_hook", {"when": "before", "call": "all_reduce"},
        "instead of PeerFailedError", "check_left_peer",
    ),
    Fault(
        broken.Alone, "check_shrink_left", {"victims": (0,), "how": "leaves"}, "says", "check_scan"
    ),
    Fault(broken.Unhospitable, "check_grow", {"count": 1}, "the same number", "check_scan"),
    Fault(broken.Slandering, "check_shrink_of_nobody", {}, "ExcludedError", "check_scan"),
    Fault(
        broken.Laconic, "check_late_peer", {"call": "barrier"}, "does not contain 'timed out'",
        "check_barrier",
    ),
    Fault(
        broken.Forgiving, "check_broken_by_a_late_receiver", {"call": "recv"}, "returned array",
        "check_tags",
    ),
    Fault(
        broken.Lending, "check_given_up_message", {"length": "long"}, "written since",
        "check_barrier",
    ),
    Fault(broken.SortedGroups, "check_split", {}, "falling keys", "check_send_recv"),
    Fault(broken.Overrunning, "check_empty_views", {}, "beside", "check_all_reduce_in_place"),
    Fault(broken.MixedUp, "check_messages_among_collectives", {}, "", "check_send_recv"),
]  # fmt: skip
NAMES = [f"{fault.kind.__name__}-{fault.caught_by}" for fault in FAULTS]
# Long enough for a busy machine, and short enough for the tests whose ranks hang.
TIMEOUT_S = 6.0


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    broken.released.clear()
    yield
    broken.released.set()


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_broken_transport_is_caught(fault: Fault) -> None:
    check = all_checks()[fault.caught_by]
    with RankFactory(fault.kind, timeout=TIMEOUT_S) as factory:
        with pytest.raises(AssertionError) as caught:
            check(factory, fault.size, **fault.case)
        assert fault.says in str(caught.value)


def test_ranks_deciding_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the common decision by one from the rank's own view; the check must notice."""

    def made(self: Decision, note: Any, conclude: Any, **limits: Any) -> Any:
        return conclude({self.me: note}, self.lost())

    monkeypatch.setattr(Decision, "made", made)
    alone = pytest.raises(AssertionError, match="the excluded rank got")
    with RankFactory(ThreadsBackend, timeout=TIMEOUT_S) as factory, alone:
        all_checks()["check_shrink_exclude"](factory, 2, victim=1)


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_broken_transport_passes_unrelated_check(fault: Fault) -> None:
    with RankFactory(fault.kind, timeout=30.0) as factory:
        all_checks()[fault.passes](factory, fault.size)


@pytest.mark.parametrize("kind", [ThreadsBackend, Loopback, ShmBackend])
def test_sound_transport_passes_all_checks_of_faults(kind: type[Backend]) -> None:
    for size in (3, 4):
        with RankFactory(kind, timeout=30.0) as factory:
            for fault in FAULTS:
                check = all_checks()[fault.caught_by]
                if fault.size == size and not check.skip_reason(kind.capabilities, size):
                    check(factory, size, **fault.case)


@pytest.mark.parametrize("kind", [broken.Unwaking, broken.Ignoring])
def test_abort_without_wakeup_is_reported_in_one_line(kind: type[Backend]) -> None:
    with RankFactory(kind, timeout=TIMEOUT_S) as factory, pytest.raises(AssertionError) as caught:
        all_checks()["check_abort"](factory, 2, call="recv")
    assert str(caught.value).startswith("abort() does not wake rank 1 of 2: ")
    assert "\n" not in str(caught.value)


def test_run_checks_continues_after_failed_check() -> None:
    names = ["check_all_reduce", "check_reduce_large", "check_scan"]
    results = run_checks(broken.Raising, (2,), checks=names)
    assert [r.outcome for r in results] == ["passed", "passed", "failed"]


def test_main_with_single_rank_returns_error() -> None:
    """Check that the suite does not accept a transport tested with a single rank only.

    A fault between ranks is invisible with one rank.
    """
    from collective.testing.__main__ import main

    assert (
        main(
            [
                "tests.support.broken_transport:DroppedRank",
                "--sizes",
                "1",
                "--checks",
                "check_all_reduce",
            ]
        )
        == 1
    )
    assert (
        main(
            [
                "tests.support.broken_transport:DroppedRank",
                "--sizes",
                "2",
                "--checks",
                "check_all_reduce",
            ]
        )
        == 1
    )
    assert (
        main(
            [
                "tests.support.broken_transport:DroppedRank",
                "--sizes",
                "1,2",
                "--checks",
                "check_gather",
            ]
        )
        == 0
    )
