"""``collective.deadline.Deadline``, shared by all steps of an operation."""

from __future__ import annotations

import math
import socket
import threading
import time

import pytest

from collective.deadline import Deadline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a clock that stands still; its only element is the time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_deadline_counts_from_construction(clock: list[float]) -> None:
    deadline = Deadline(5.0)
    clock[0] += 2.0
    assert (deadline.seconds, deadline.left(), deadline.expired) == (5.0, 3.0, False)
    assert repr(deadline) == "<Deadline of 5 s, 3 s left>"


def test_left_after_deadline_is_zero(clock: list[float]) -> None:
    deadline = Deadline(5.0)
    clock[0] += 5.0
    assert (deadline.left(), deadline.expired) == (0.0, True)
    clock[0] += 1.0
    assert (deadline.left(), deadline.expired) == (0.0, True)


def test_deadline_never_does_not_expire(clock: list[float]) -> None:
    deadline = Deadline.never()
    clock[0] += 1e12
    assert not deadline.expired
    assert deadline.seconds == math.inf
    assert deadline.left() > 0.0


def test_deadline_never_left_is_valid_timeout_for_stdlib() -> None:
    left = Deadline.never().left()
    done = threading.Event()
    done.set()
    assert done.wait(left)
    assert threading.Lock().acquire(timeout=left)
    with socket.socket() as sock:
        sock.settimeout(left)


@pytest.mark.parametrize(("nap", "expected"), [(0.5, 0.5), (9.0, 3.0)])
def test_at_most_is_bounded_by_remaining_time(
    clock: list[float], nap: float, expected: float
) -> None:
    deadline = Deadline(5.0)
    clock[0] += 2.0
    assert deadline.at_most(nap) == expected


def test_within_returns_earlier_deadline(clock: list[float]) -> None:
    deadline = Deadline(5.0)
    clock[0] += 2.0
    assert deadline.within(4.0) is deadline
    sooner = deadline.within(1.0)
    assert (sooner.seconds, sooner.left()) == (1.0, 1.0)
