"""A communicator that is garbage-collected without a close does not count as its rank's death."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from collective.communicator import Communicator
from collective.errors import PeerLostError
from collective.testing import run_ranks
from tests.support.mpi_launches import REPEATED, VENDORS, launch_of
from tests.support.selection import in_whole

# A name and not an import, because MPI ranks import this module without needing PyTorch.
PAIRS = "tests.support.simulated_hosts:Pairs"


def _lost(comm: Communicator) -> str:
    """Return this rank's error text after the last rank has dropped a communicator.

    The barrier of ``comm`` at the end shows that the last rank is still alive.
    """
    group: Any = comm.dup()
    group.barrier()
    if comm.rank == comm.size - 1:
        del group
        gc.collect()
        comm.barrier()
        return ""
    with pytest.raises(PeerLostError) as caught:
        _repeat(group.barrier)
    comm.barrier()
    return str(caught.value)


def _repeat(call: Callable[[], Any]) -> None:
    while True:
        call()


@pytest.mark.parametrize(
    "transport",
    ["threads", "shm", in_whole("tcp"), in_whole("gloo"), PAIRS, *REPEATED],
)
def test_peer_lost_error_names_rank_that_dropped_communicator(transport: str) -> None:
    if transport in ("gloo", PAIRS):
        pytest.importorskip("torch", reason="Gloo stands on PyTorch")
    if transport in VENDORS:
        *texts, _ = run_ranks(3, _lost, backend="mpi", mpiexec=launch_of(transport))
    else:
        *texts, _ = run_ranks(3, _lost, backend=transport)
    for text in texts:
        assert "rank 2 has dropped its communicator without closing it" in text


def _descriptors(comm: Communicator) -> int:
    """Return how many descriptors remain of groups dropped with a message in flight."""
    before = 0
    for turn in range(6):
        group: Any = comm.dup()
        group.recv(None, 1 - comm.rank, async_op=True)
        del group
        gc.collect()
        comm.barrier()
        if turn == 1:
            before = len(os.listdir("/proc/self/fd"))
    return len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_dropped_communicator_with_message_in_flight_leaves_no_descriptor(transport: str) -> None:
    assert run_ranks(2, _descriptors, backend=transport) == [0, 0]
