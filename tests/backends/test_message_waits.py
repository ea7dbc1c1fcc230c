"""Errors of calls that wait for a peer which waits itself, or which has left, over each transport.

Each case runs on a communicator of its own, since it breaks it. A rank may come to its call after
another rank's deadline, if the machine is busy; then the case runs again, with more time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="gloo and hierarchical stand on PyTorch")

import torch

from collective.communicator import Communicator
from collective.errors import CollectiveError, CollectiveTimeoutError
from collective.testing import RankPool
from tests.support.mpi_launches import INSTALLED, VENDORS, pool_of
from tests.support.simulated_hosts import Pairs

SIZE = 3
# Seconds that a call waits, in one attempt after the other, and that its peers wait meanwhile.
_SECONDS, _LONG = (0.3, 2.0, 8.0, 30.0), 120.0
_BIG = 1 << 20  # elements of a message that waits for its receiver, over every transport
_KINDS: dict[str, Any] = {"threads": "threads", "shm": "shm", "tcp": "tcp", "gloo": "gloo",
                          "pairs": Pairs}  # fmt: skip

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(
    scope="module",
    params=[*_KINDS, *INSTALLED],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    name = request.param
    if name in VENDORS:
        with pool_of((name, SIZE), torch) as pool:
            yield pool
        return
    with RankPool(SIZE, _KINDS[name], timeout=_LONG) as pool:
        yield pool


# Part of a rank, with the communicator, a long array, and the timeout of the rank that gives up.
_Case = Callable[[Communicator, Any, float], None]


def _x() -> Any:
    return np.ones(4)


def _big() -> Any:
    return np.ones(_BIG)


def _two_recv(comm: Communicator, x: Any, seconds: float) -> None:
    if comm.rank < 2:
        comm.recv(_x(), 1 - comm.rank, timeout=_LONG if comm.rank else seconds)


def _two_send(comm: Communicator, x: Any, seconds: float) -> None:
    if comm.rank < 2:
        comm.send(x, 1 - comm.rank, timeout=seconds)


def _three_recv(comm: Communicator, x: Any, seconds: float) -> None:
    comm.recv(_x(), (comm.rank + 1) % 3, timeout=seconds)


def _recv_and_send(comm: Communicator, x: Any, seconds: float) -> None:
    if comm.rank == 1:
        comm.send(x, 2, timeout=seconds)
    else:
        comm.recv(_x(), (comm.rank + 1) % 3, timeout=seconds)


def _chain(comm: Communicator, x: Any, seconds: float) -> None:
    if comm.rank == 0:
        comm.recv(_x(), 1, timeout=seconds)
    elif comm.rank == 1:
        comm.recv(_x(), 2, tag=5, timeout=_LONG)


def _collective_and_chain(comm: Communicator, x: Any, seconds: float) -> None:
    if comm.rank == 0:
        comm.all_reduce(_x(), timeout=seconds)
    elif comm.rank == 1:
        comm.recv(_x(), 2, timeout=_LONG)


def _collective_and_recv(comm: Communicator, x: Any, seconds: float) -> None:
    if comm.rank == 0:
        comm.recv(_x(), 1, timeout=seconds)
    elif comm.rank == 1:
        comm.all_reduce(_x(), timeout=_LONG)


_WITH_SENDRECV = "\nUse sendrecv, or let one rank "
_CASES: dict[str, tuple[_Case, list[str]]] = {
    "two in recv": (
        _two_recv,
        ["timed out: waited", "ranks 0 and 1 wait for each other:\n  rank 0: recv from rank 1 at ",
         "\n  rank 1: recv from rank 0 at ", " in _two_recv", f"{_WITH_SENDRECV}send first"],
    ),
    "two in send": (
        _two_send,
        ["ranks 0 and 1 wait for each other:\n  rank 0: send to rank 1 at ",
         "\n  rank 1: send to rank 0 at ", " in _two_send", f"{_WITH_SENDRECV}receive first"],
    ),
    "three in recv": (
        _three_recv,
        ["ranks 0, 1 and 2 wait for each other:\n  rank 0: recv from rank 1 at ",
         "\n  rank 1: recv from rank 2 at ", "\n  rank 2: recv from rank 0 at ",
         f"{_WITH_SENDRECV}send first"],
    ),
    "recv and send": (
        _recv_and_send,
        ["ranks 0, 1 and 2 wait for each other:\n  rank 0: recv from rank 1 at ",
         "\n  rank 1: send to rank 2 at ", "\n  rank 2: recv from rank 0 at "],
    ),
    "a chain": (
        _chain, ["rank 1: rank 1 is in recv(tag=5) from rank 2 at ", " in _chain; rank 2 "],
    ),
    "a collective and a chain": (
        _collective_and_chain, ["rank 1 is in recv from rank 2 at ", " in _collective_and_chain; "],
    ),
    "a collective and recv": (
        _collective_and_recv,
        ["ranks 0 and 1 wait for each other:\n  rank 0: recv from rank 1 at ",
         "\n  rank 1: all_reduce(float64[4], op=sum) at ", "Every rank must make the collective"],
    ),
}  # fmt: skip


def _run(comm: Communicator, case: str) -> tuple[str, str]:
    """Run a case until a rank's text is as expected; return this rank's error and its text."""
    run, wanted = _CASES[case]
    x = _big()
    name = text = ""
    for seconds in _SECONDS:
        child = comm.dup()
        comm.barrier()
        name = text = ""
        try:
            run(child, x, seconds)
        except CollectiveError as error:
            name, text = type(error).__name__, str(error)
        told = name == CollectiveTimeoutError.__name__ and all(part in text for part in wanted)
        # This waits until all ranks are through: a rank that closed earlier would have left.
        over = comm.all_reduce(np.array([told]), op="lor")[0]
        child.close()
        if over:
            break
    return name, text


@pytest.fixture(scope="module")
def outcomes(ranks: RankPool) -> Callable[[str], list[tuple[str, str]]]:
    """Return a function that runs a case once, for all tests that read its errors."""
    return functools.cache(functools.partial(ranks.run, _run))


@pytest.mark.parametrize("case", list(_CASES))
def test_timeout_tells_what_the_awaited_rank_waits_for(outcomes: Any, case: str) -> None:
    heard = outcomes(case)
    texts = [text for name, text in heard if name == CollectiveTimeoutError.__name__]
    assert any(all(part in text for part in _CASES[case][1]) for text in texts), heard


@pytest.mark.parametrize("case", [case for case in _CASES if "chain" not in case])
def test_circle_of_waits_is_not_said_to_need_more_time(outcomes: Any, case: str) -> None:
    heard = [text for _, text in outcomes(case) if "wait for each other" in text]
    assert heard
    assert not any("longer timeout" in text for text in heard)


def test_awaited_rank_hears_who_timed_out_and_the_circle(outcomes: Any) -> None:
    late = [text for name, text in outcomes("two in recv") if name.endswith("AbortedError")]
    assert len(late) == 1
    assert " timed out waiting for this rank: waited " in late[0]
    assert "ranks 0 and 1 wait for each other:\n" in late[0]


def _in_group(comm: Communicator) -> str:
    """Wait in a circle of a group, which numbers ranks 2 and 0 as its ranks 0 and 1."""
    for seconds in _SECONDS:
        group = comm.group([2, 0]) if comm.rank != 1 else None
        text = ""
        if group is not None:
            try:
                group.recv(_x(), 1 - group.rank, timeout=seconds)
            except CollectiveError as error:
                text = str(error)
        told = "  rank 0: recv from rank 1 at " in text
        over = comm.all_reduce(np.array([told]), op="lor")[0]
        if group is not None:
            group.close()
        if over:
            break
    return text


def test_ranks_of_a_group_are_numbered_as_in_the_group(ranks: RankPool) -> None:
    texts = ranks.run(_in_group)
    assert texts[1] == ""
    for text in (texts[0], texts[2]):
        assert "ranks 0 and 1 wait for each other:\n  rank 0: recv from rank 1 at " in text
        assert "\n  rank 1: recv from rank 0 at " in text


def _without(comm: Communicator, call: str) -> str:
    """Make a call of which the last rank has no part, since it closes its communicator."""
    child = comm.dup()
    last, x = comm.size - 1, _big()
    child.all_reduce(np.ones(2, np.int16))
    text = ""
    if comm.rank == last:
        child.close()
    elif comm.rank == 0 or call == "all_reduce":
        try:
            if call == "all_reduce":
                child.all_reduce(_x())
            elif call == "recv":
                child.recv(_x(), last)
            else:
                child.send(x, last)
        except CollectiveError as error:
            text = f"{type(error).__name__}: {error}"
    comm.barrier()
    return text


_DEEDS = {
    "all_reduce": "making this call; every rank must make this call. Is it inside `if rank == 0`?",
    "recv": "sending this message",
    "send": "receiving this message",
}


@pytest.mark.parametrize("call", list(_DEEDS))
def test_call_without_a_rank_tells_that_the_rank_left(ranks: RankPool, call: str) -> None:
    text = ranks.run(_without, call)[0]
    assert text.startswith("PeerLostError: ")
    assert (
        "rank 2 has closed its communicator (its last call: all_reduce(int16[2], op=sum))" in text
    )
    assert f": it finished, or left its `with` block, without {_DEEDS[call]} [rank 0]" in text
