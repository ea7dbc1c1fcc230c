"""Fences of the control segment, for processors that do not keep stores and loads in order."""

from __future__ import annotations

from typing import Any

import pytest

from collective.backends.shm import board as board_module
from collective.backends.shm import control as control_module
from collective.backends.shm.control import BROKEN, Control
from collective.backends.shm.layout import LINE, Layout
from collective.backends.shm.segment import Segment
from collective.contract.failure import Failure
from collective.deadline import Deadline

STEP, STATE, PID, FAILURE = (LINE + word for word in (0, 32, 33, 36))


class Words:
    """Words of a segment that record each access, and each fence between the accesses."""

    def __init__(self, words: Any) -> None:
        self.words = words
        self.log: list[tuple[str, int]] = []

    def __getitem__(self, at: int) -> Any:
        self.log.append(("read", at))
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.log.append(("write", at))
        self.words[at] = value

    def fence(self) -> None:
        self.log.append(("fence", 0))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[Control, Words]:
    """Return rank 0 of one rank, whose accesses are recorded as on a processor without order."""
    layout = Layout(1)
    control = Control(Segment.create(layout.nbytes), layout, 0)
    words = Words(control.words)
    control.words = control._failures._words = words  # type: ignore[assignment]
    monkeypatch.setattr(control_module, "ORDERED", False)
    for module in (control_module, board_module):
        monkeypatch.setattr(module, "fence", words.fence)
    return control, words


def fenced(words: Words, earlier: tuple[str, int], later: tuple[str, int]) -> bool:
    """Return whether a fence stands between the first ``earlier`` and the last ``later`` access."""
    first = words.log.index(earlier)
    last = len(words.log) - 1 - words.log[::-1].index(later)
    return ("fence", 0) in words.log[first:last]


def test_join_announces_process_number_before_state(recorded: tuple[Control, Words]) -> None:
    control, words = recorded
    control.join(Deadline(5.0))
    assert fenced(words, ("write", PID), ("write", STATE))


def test_join_reads_process_numbers_after_states(recorded: tuple[Control, Words]) -> None:
    control, words = recorded
    words[STATE], control.rank = 1, 1  # another rank, which waits for rank 0
    control.join(Deadline(5.0))
    assert fenced(words, ("read", STATE), ("read", PID))


def test_leave_keeps_earlier_stores_before_state(recorded: tuple[Control, Words]) -> None:
    control, words = recorded
    control.leave()
    assert words.log[-2:] == [("fence", 0), ("write", STATE)]


def test_sync_looks_at_flag_after_earlier_reads(recorded: tuple[Control, Words]) -> None:
    control, words = recorded
    control.sync(Deadline(5.0))
    assert words.log[:2] == [("fence", 0), ("read", BROKEN)]


def test_refuse_broken_looks_at_flag_after_earlier_reads(recorded: tuple[Control, Words]) -> None:
    control, words = recorded
    control.refuse_broken("recv")
    assert words.log == [("fence", 0), ("read", BROKEN)]


def test_failure_is_read_in_opposite_order_of_its_report(recorded: tuple[Control, Words]) -> None:
    control, words = recorded
    control.fail(Failure("aborted", 0, "a reason"))
    words.log.clear()
    with pytest.raises(Exception, match="a reason"):
        control.refuse_broken("recv")
    assert fenced(words, ("read", BROKEN), ("read", FAILURE))
