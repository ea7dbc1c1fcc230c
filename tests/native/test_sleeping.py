"""Naps of ranks that have waited for long: the awaited event wakes them."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import collective
from collective.backends.shm import control
from collective.communicator import Communicator
from tests.support.on_ranks import on_ranks, ranks_of

core = pytest.importorskip("collective.native._core", reason="the native core is not built")

# Indices of the word that counts napping ranks, and of the word in which a rank says that it naps.
SLEEPERS, ASLEEP = 8, 16
# Five naps of this length take longer than a test waits for its ranks.
NAP_S = 30.0
# If each nap lasts its full time, the ranks time out before they finish.
pair = ranks_of(("shm", 2), timeout=2 * NAP_S)


def _nap(memory: Any, ready: Callable[[], bool]) -> bool:
    return bool(core.nap(memory, 8 * ASLEEP, NAP_S, ready))


def test_wake_ends_nap() -> None:
    memory, woken = mmap.mmap(-1, 4096), []
    words = memoryview(memory).cast("q")
    thread = threading.Thread(target=lambda: woken.append(_nap(memory, lambda: False)))
    thread.start()
    while not words[SLEEPERS]:
        time.sleep(1e-3)
    core.wake(memory, [8 * ASLEEP])
    thread.join()
    assert woken == [True]
    assert (words[SLEEPERS], words[ASLEEP]) == (0, 0)


def test_nap_of_ready_rank_returns_at_once() -> None:
    memory = mmap.mmap(-1, 4096)
    words, seen = memoryview(memory).cast("q"), []

    def ready() -> bool:
        seen.append((words[SLEEPERS], words[ASLEEP]))
        return True

    assert _nap(memory, ready) is False
    assert seen == [(1, 1)]  # otherwise an event announced meanwhile would wake no rank
    assert (words[SLEEPERS], words[ASLEEP]) == (0, 0)


def test_nap_passes_on_error_of_ready() -> None:
    memory = mmap.mmap(-1, 4096)
    with pytest.raises(ZeroDivisionError):
        _nap(memory, lambda: bool(1 // 0))
    with pytest.raises(ValueError, match="ambiguous"):
        _nap(memory, lambda: np.ones(2))
    assert not any(memory[:])


@pytest.mark.parametrize("at", [0, 64, 132, 4096])
def test_words_outside_segment_are_refused(at: int) -> None:
    memory = mmap.mmap(-1, 4096)
    with pytest.raises(ValueError, match="no rank's word"):
        core.nap(memory, at, 1.0, lambda: False)
    with pytest.raises(ValueError, match="no rank's word"):
        core.wake(memory, [at])


def _user_op(a: Any, b: Any) -> Any:
    return a + b


#: Calls in which rank 0 waits for rank 1. Rank 1 makes its call once rank 0 naps.
CALLS: dict[str, Callable[[Communicator, Any], object]] = {
    "short": lambda comm, x: comm.all_reduce(x[:16], out=x[:16]),
    "staged": lambda comm, x: comm.all_reduce(x[: 1 << 16], out=x[: 1 << 16]),
    "in Python": lambda comm, x: comm.all_reduce(
        x[:16], op=collective.user_op(_user_op, commutative=True)
    ),
    "message": lambda comm, x: comm.recv(x[:16], 1) if comm.rank == 0 else comm.send(x[:16], 0),
    "room": lambda comm, x: comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks("pair")
def test_napping_rank_is_woken_by_awaited_event(comm: Communicator, name: str) -> None:
    words = comm.inner.transport._control.words  # type: ignore[attr-defined]
    x = np.zeros(4 << 20, np.float32)
    with mock.patch.multiple(control, _NAP_SHARE=1e6, _NAP_LAST_S=NAP_S):
        for _ in range(5):
            comm.barrier()
            while comm.rank == 1 and not words[SLEEPERS]:
                time.sleep(1e-3)
            CALLS[name](comm, x)
