"""When file descriptors run out, all ranks get an error, before any rank begins."""

from __future__ import annotations

import itertools
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import AllocationError, RendezvousError
from collective.start.stores import FileStore
from collective.testing import run_ranks
from tests.support.selection import in_whole
from tests.support.simulated_hosts import Pairs

ROOM = 40  # free descriptors: enough for some groups and for the reserve


def _until_they_run_out(comm: Communicator) -> tuple[int, str]:
    """Make groups until the last rank has no descriptors; return their number and the error."""
    groups: list[Any] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank == comm.size - 1:
        limit = len(os.listdir("/dev/fd")) + ROOM
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        with pytest.raises(AllocationError) as caught:
            _fill(comm, groups)
        for group in (comm, *groups):
            assert group.all_reduce(np.ones(2)).tolist() == [comm.size] * 2
        # Closing one group frees enough descriptors for another group.
        groups.pop().close()
        comm.dup().close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return len(groups), str(caught.value)


def _fill(comm: Communicator, groups: list[Any]) -> None:
    for _ in range(ROOM):
        groups.append(comm.dup())


@pytest.mark.parametrize("transport", ["shm", in_whole("tcp"), in_whole("gloo"), Pairs])
def test_group_without_free_descriptors_raises_on_every_rank(transport: Any) -> None:
    if transport not in ("shm", "tcp"):
        pytest.importorskip("torch", reason="Gloo stands on PyTorch")
    outcomes = run_ranks(3, _until_they_run_out, backend=transport)
    assert len({count for count, _ in outcomes}) == 1
    for _, text in outcomes:
        assert "rank 2: " in text
        assert "file descriptors are in use" in text
        assert "ulimit -n" in text


def _few_at_the_start(rank: int, room: int) -> None:
    if rank == 0:
        used = {int(name) for name in os.listdir("/dev/fd")}
        # The limit applies to descriptor numbers, and numbers below the highest may be free.
        free = (number for number in itertools.count() if number not in used)
        limit = next(itertools.islice(free, room, None))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _call_the_roll(comm: Communicator) -> str:
    from tests.backends.peers.test_monitor import FAR, hub_of, until
    from tests.backends.peers.test_strangers import knock

    if comm.rank == 1:
        address = comm.broadcast_object(None)
        connections = [knock(address) for _ in range(10)]
        comm.barrier()
        return f"{len(connections)} have knocked"
    hub = hub_of(2, None)
    _few_at_the_start(comm.rank, 5)
    comm.broadcast_object(hub.address)
    until(lambda: hub._server.scarce, FAR)
    hub._deadline = Deadline(0.0)
    until(lambda: hub.refusal, FAR)
    comm.barrier()
    return str(hub.refusal)


def test_hub_without_free_descriptors_names_cause() -> None:
    text = run_ranks(2, _call_the_roll, backend="shm")[0]
    assert "; rank 0 could not accept them: [Errno 24]" in text
    assert "ulimit -n" in text


def _connect(comm: Communicator, directory: str) -> str:
    from collective.backends.gloo import GlooBackend

    _few_at_the_start(comm.rank, 20)  # enough for the roll call
    world = World(
        comm.rank, comm.size, comm.rank, comm.size, "here", "none", "few", FileStore(directory)
    )
    with pytest.raises(RendezvousError) as caught:
        GlooBackend.connect(world, Deadline(20.0))
    return str(caught.value)


def test_gloo_start_without_free_descriptors_raises_rendezvous_error(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="Gloo stands on PyTorch")
    for text in run_ranks(3, _connect, str(tmp_path), backend="shm"):
        assert "rank 0: " in text
        assert "file descriptors are in use" in text
