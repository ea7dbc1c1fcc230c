"""A rank that fails between the rounds of a call: its peers get an error and never mixed data."""

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
from tests.support.selection import in_whole

pair = ranks_of(("shm", 2), ("threads", 2))

COUNT = 300_000  # elements or bytes from which rank 1's allocation fails
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

    outcomes = []
    if comm.rank:
        np.empty = empty
    try:
        for make in (lambda: CALLS[call](comm, x), lambda: comm.all_gather(np.ones(1))):
            try:
                make()
                outcomes.append("returned")
            except (CollectiveError, MemoryError) as error:
                outcomes.append(type(error).__name__)
    finally:
        np.empty = real
    return outcomes


@pytest.mark.parametrize("transport", ["shm", in_whole("gloo")])
@pytest.mark.parametrize("call", CALLS)
def test_call_without_memory_for_result_fails_on_every_rank(call: str, transport: str) -> None:
    if transport == "gloo":
        pytest.importorskip("torch", reason="gloo stands on PyTorch")
    with RankPool(2, transport) as pool:
        sender, receiver = pool.run(_call, call, call_timeout=20.0)
    assert receiver[0] == "MemoryError"
    assert receiver[1] != "returned"
    # A sender may complete a short call before rank 1 fails; then its next call raises the error.
    assert PeerFailedError.__name__ in sender
    assert sender[1] == PeerFailedError.__name__


BETWEEN = {
    "all_gather": (AllGather, "uneven"),
    "scatter": (Scatter, "_scatter_known"),
    "broadcast": (Broadcast.__mro__[1], "root_header"),
}


@pytest.mark.parametrize("call", BETWEEN)
@on_ranks("pair")
def test_rank_making_other_call_between_rounds_raises_mismatch_error(
    comm: Communicator, call: str
) -> None:
    kind, name = BETWEEN[call]
    original = getattr(kind, name)

    def failing(self: Any, *args: Any) -> Any:
        if self.path.rank == 1:  # ranks that are threads share the class
            raise LookupError("another thing to do")
        return original(self, *args)

    comm = comm.dup()
    if comm.rank == 1:
        with mock.patch.object(kind, name, failing), pytest.raises(LookupError):
            getattr(comm, call)(np.ones(7) if call == "all_gather" else None)
        with pytest.raises(MismatchError, match=call):
            comm.reduce(np.ones(5))
    else:
        with pytest.raises(MismatchError, match="reduce"):
            getattr(comm, call)(np.ones(5))
