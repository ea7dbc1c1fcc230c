"""A rank that fails between the rounds of a call: its peers hear of it, and nothing is mixed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.communicator.calls.broadcasting import Broadcast
from collective.communicator.calls.gathering import AllGather
from collective.communicator.calls.scattering import Scatter
from collective.errors import CollectiveError, MismatchError, PeerFailedError
from collective.testing import RankPool
from tests.support.on_ranks import on_ranks, ranks_of

pair = ranks_of(("shm", 2), ("threads", 2))

COUNT = 300_000  # elements or bytes that rank 1 has no room for
CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "recv": lambda comm, x: comm.recv(None, 0) if comm.rank else comm.send(x, 1),
    "sendrecv": lambda comm, x: comm.sendrecv(x, 1 - comm.rank, 1 - comm.rank),
    "broadcast": lambda comm, x: comm.broadcast(None if comm.rank else x),
    "broadcast of a structure": lambda comm, x: comm.broadcast(None if comm.rank else [x]),
    "scatter": lambda comm, x: comm.scatter(None if comm.rank else np.concatenate([x, x])),
    "all_gather": lambda comm, x: comm.all_gather(x[comm.rank :]),
    "all_gather of a structure": lambda comm, x: comm.all_gather([x[:20_000], x[comm.rank : 2]]),
}


def _call(comm: Communicator, call: str) -> list[str]:
    x, real = np.ones(COUNT), np.empty

    def empty(shape: Any, *args: Any, **options: Any) -> Any:
        if np.prod(shape) >= COUNT:
            raise MemoryError("there is none left")
        return real(shape, *args, **options)

    heard = []
    if comm.rank:
        np.empty = empty
    try:
        for make in (lambda: CALLS[call](comm, x), lambda: comm.all_gather(np.ones(1))):
            try:
                make()
                heard.append("returned")
            except (CollectiveError, MemoryError) as error:
                heard.append(type(error).__name__)
    finally:
        np.empty = real
    return heard


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("call", CALLS)
def test_call_without_memory_for_its_result_fails_on_every_rank(call: str, transport: str) -> None:
    if transport == "gloo":
        pytest.importorskip("torch", reason="gloo stands on PyTorch")
    with RankPool(2, transport) as pool:
        sender, receiver = pool.run(_call, call, call_timeout=20.0)
    assert receiver[0] == "MemoryError"
    assert receiver[1] != "returned"
    # A sender may be through with a short call before, and hears of it in the next.
    assert PeerFailedError.__name__ in sender
    assert sender[1] == PeerFailedError.__name__


BETWEEN = {
    "all_gather": (AllGather, "uneven"),
    "scatter": (Scatter, "_scatter_known"),
    "broadcast": (Broadcast.__mro__[1], "root_header"),
}


@pytest.mark.parametrize("call", BETWEEN)
@on_ranks("pair")
def test_rank_that_goes_on_to_another_call_between_rounds_is_a_mismatch(
    comm: Communicator, call: str
) -> None:
    kind, name = BETWEEN[call]
    whole = getattr(kind, name)

    def part(self: Any, *args: Any) -> Any:
        if self.path.rank == 1:  # a class is the other rank's, too, if ranks are threads
            raise LookupError("another thing to do")
        return whole(self, *args)

    comm = comm.dup()
    if comm.rank == 1:
        with mock.patch.object(kind, name, part), pytest.raises(LookupError):
            getattr(comm, call)(np.ones(7) if call == "all_gather" else None)
        with pytest.raises(MismatchError, match=call):
            comm.reduce(np.ones(5))
    else:
        with pytest.raises(MismatchError, match="reduce"):
            getattr(comm, call)(np.ones(5))
