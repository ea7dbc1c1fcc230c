"""The ``hierarchical`` transport on simulated hosts. For real hosts see system/test_hosts.py."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from collective.backends.hierarchical import HierarchicalBackend, transport
from collective.backends.hierarchical.topology import Topology
from collective.backends.shm import ShmBackend
from collective.communicator import Communicator
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    AllocationError,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from collective.testing import (
    RankDiedError,
    RankPool,
    RanksFailedError,
    faults,
    parametrize_with_checks,
    run_ranks,
)
from tests.support.conformance_parts import BY_PLACE, all_but
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.simulated_hosts import (
    Interleaved,
    Lopsided,
    Mixed,
    Pairs,
    PairsOverGloo,
    Single,
    Without,
)

Check = Callable[[], None]

_exchange = transport._exchange


@parametrize_with_checks(Pairs, sizes=(4,), checks=all_but("check_shrink", "check_shrink_left"))
def test_host_pairs_pass_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks(Pairs, sizes=(2, 3, 5), checks=BY_PLACE)
def test_host_pairs_and_single_ranks_pass_suite(check: Check) -> None:
    check()


@parametrize_with_checks(Mixed, sizes=(4,), checks=BY_PLACE)
def test_host_pairs_with_and_without_core_pass_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks(Without, sizes=(4,), checks=BY_PLACE)
def test_host_pairs_without_core_pass_suite(check: Check) -> None:
    check()


@parametrize_with_checks(PairsOverGloo, sizes=(4,), checks=BY_PLACE)
def test_host_pairs_over_gloo_pass_suite(check: Check) -> None:
    pytest.importorskip("torch", reason="the gloo transport needs PyTorch")
    check()


@parametrize_with_checks(Interleaved, sizes=(4,), checks=BY_PLACE)
def test_interleaved_hosts_pass_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks(Lopsided, sizes=(4,), checks=BY_PLACE)
def test_lopsided_hosts_pass_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@parametrize_with_checks(Single, sizes=(2,), checks=BY_PLACE)
def test_single_host_passes_suite(check: Check) -> None:
    check()


# -- ranks and hosts --------------------------------------------------------------------


def test_topology_of_pairs_has_members_of_each_host() -> None:
    topology = Topology(["a", "a", "b", "b"], 3)
    assert topology.members == [[0, 1], [2, 3]]
    assert (topology.local, topology.local_rank, topology.levels) == ([2, 3], 1, True)
    assert [topology.local_rank_of(rank) for rank in range(4)] == [None, None, 0, 1]


def test_topology_of_uneven_hosts_has_levels() -> None:
    topology = Topology(["a", "b", "a", "a"], 2)
    assert topology.members == [[0, 2, 3], [1]]
    assert (topology.local, topology.local_rank, topology.levels) == ([0, 2, 3], 1, True)
    assert not Topology(["a", "b", "c"], 0).levels


pairs = ranks_of(("tests.support.simulated_hosts:Pairs", 4))

# -- groups ---------------------------------------------------------------------------------


@on_ranks("pairs")
def test_groups_use_nearest_transport(comm: Communicator) -> None:
    two, flat = "hierarchical-pairs", "tcp"
    kinds = {(0, 1): "shm", (2, 3): "shm", (0, 2): flat, (1, 2, 3): two, (3, 1, 0): two}
    for members, kind in kinds.items():
        if comm.rank in members:
            with comm.group(members) as group:
                assert group.all_reduce(np.array([comm.rank])).item() == sum(members)
                assert group.backend == kind


# -- failures ---------------------------------------------------------------------------------


def _heard(call: Callable[[], Any]) -> CollectiveError:
    """Call ``call`` until it raises, and return the error."""
    while True:
        try:
            call()
        except CollectiveError as error:
            return error


def _until_it_breaks(comm: Communicator, count: int) -> CollectiveError:
    x = np.ones(count, np.float32)
    return _heard(lambda: comm.all_reduce(x, out=x, op="max"))


@pytest.mark.parametrize("count", [3, 1 << 20])
@pytest.mark.parametrize("victim", range(4))
def test_killed_rank_is_named_on_every_host(pairs: RankPool, victim: int, count: int) -> None:
    plan = [faults.kill(victim, at_call=3)]
    with pytest.raises(RanksFailedError) as failed:
        pairs.run(_until_it_breaks, count, faults=plan)
    assert set(failed.value.errors) == {victim}
    assert isinstance(failed.value.errors[victim], RankDiedError)
    for error in failed.value.results.values():
        assert isinstance(error, PeerLostError), error
        assert error.ranks == (victim,)
        assert f"rank {victim} " in str(error)


def _until_heard(folder: Path, count: int) -> None:
    """Wait until ``count`` ranks have left a file in ``folder``, as a sign of their error."""
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)


@pytest.mark.parametrize("late", range(4))
@on_ranks("pairs")
def test_late_rank_is_named_on_every_host(comm: Communicator, late: int, tmp_path: Path) -> None:
    comm.barrier()
    if comm.rank == late:
        _until_heard(tmp_path, comm.size - 1)
    error = _heard(lambda: comm.all_reduce(np.ones(3), timeout=1.0))
    (tmp_path / str(comm.rank)).touch()
    if comm.rank == late:
        assert isinstance(error, CommunicatorAbortedError), error
    else:
        assert isinstance(error, CollectiveTimeoutError), error
        assert error.ranks == (late,), error


@pytest.mark.parametrize("leaver", range(4))
@on_ranks("pairs")
def test_departed_rank_is_named_on_every_host(comm: Communicator, leaver: int) -> None:
    comm.barrier()
    if comm.rank == leaver:
        comm.close()
        return
    with pytest.raises(PeerLostError) as lost:
        comm.barrier()
    assert lost.value.ranks == (leaver,)


def _failing(comm: Communicator, victim: int) -> CollectiveError:
    if comm.rank == victim:
        comm.barrier()
        raise ValueError("lost the keys")
    return _heard(comm.barrier)


@pytest.mark.parametrize("victim", [0, 3])
def test_failed_rank_is_named_on_every_host(pairs: RankPool, victim: int) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pairs.run(_failing, victim)
    for error in failed.value.results.values():
        assert isinstance(error, PeerFailedError), error
        assert error.rank == victim
        assert "lost the keys" in str(error)


@pytest.mark.parametrize("source", [0, 3])
@on_ranks("pairs")
def test_recv_timeout_names_sender(comm: Communicator, source: int, tmp_path: Path) -> None:
    comm.barrier()
    if comm.rank != 1:
        _until_heard(tmp_path, 1)
        _heard(comm.barrier)
        return
    with pytest.raises(CollectiveTimeoutError, match=r"recv\(tag=") as late:
        comm.recv(None, source, timeout=0.5)
    assert late.value.ranks == (source,)
    (tmp_path / "heard").touch()


# -- one message inside the host and one across ---------------------------------------------

# Bytes of a message that fits neither into a ring nor into the buffers of a socket.
LONG = 32 << 20


@on_ranks("pairs")
def test_sendrecv_inside_and_across_needs_no_thread(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with mock.patch.object(threading, "Thread", side_effect=AssertionError):
        for count in (1, 1000, LONG // 8):
            received = comm.sendrecv(np.full(count, comm.rank), after, before)
            assert (received == before).all(), count
            x = np.full(count, comm.rank)
            assert (comm.sendrecv(x, after, before, out=x) == before).all(), count


@on_ranks("pairs")
def test_sendrecv_inside_and_across_times_out(comm: Communicator, tmp_path: Path) -> None:
    comm.barrier()
    if comm.rank == 1:
        x = np.ones(LONG, np.uint8)
        with pytest.raises(CollectiveTimeoutError, match=r"sendrecv\(tag=0\)"):
            comm.sendrecv(x, 0, 2, timeout=0.5)
        (tmp_path / "heard").touch()
    else:
        _until_heard(tmp_path, 1)
    assert isinstance(_heard(comm.barrier), CollectiveError)


def _exchanging_with_dying(comm: Communicator, victim: int) -> CollectiveError:
    comm.barrier()
    x = np.ones(LONG, np.uint8)
    if comm.rank == victim:
        os._exit(1)
    return _heard(lambda: comm.sendrecv(x, 0, 2) if comm.rank == 1 else comm.barrier())


@pytest.mark.parametrize("victim", [0, 2])
def test_sendrecv_inside_and_across_names_dead_peer(pairs: RankPool, victim: int) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pairs.run(_exchanging_with_dying, victim)
    assert set(failed.value.errors) == {victim}
    for error in failed.value.results.values():
        assert isinstance(error, PeerLostError), error
        assert error.ranks == (victim,)


# -- disagreement ---------------------------------------------------------------------------


def _ranks_of(line: str) -> list[int]:
    """Return the ranks at the begin of a line such as ``ranks 0-2, 5: barrier()``."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", line.partition(":")[0])
    return [rank for low, high in spans for rank in range(int(low), int(high or low) + 1)]


@pytest.mark.parametrize("others", [[0], [1], [3], [2, 3], [1, 3]])
@on_ranks("pairs")
def test_different_calls_raise_mismatch_on_all_hosts_at_once(
    comm: Communicator, others: list[int]
) -> None:
    x = np.full(1 << 16, comm.rank)
    with pytest.raises(MismatchError):
        comm.all_reduce(x, out=x, op="max" if comm.rank in others else "min")
    assert (x == comm.rank).all()
    assert comm.all_reduce(x, op="max")[0] == 3


over_gloo = ranks_of(("tests.support.simulated_hosts:PairsOverGloo", 4))


@pytest.mark.parametrize("others", [[0], [1], [3], [2, 3], [1, 3]])
@on_ranks("over_gloo", call_timeout=20.0)
def test_different_calls_over_gloo_raise_mismatch_without_setting(
    comm: Communicator, others: list[int]
) -> None:
    comm.barrier()
    # The ranks notice the difference after the calls have stalled for one second. By then some of
    # them may have sent their data.
    error = _heard(comm.barrier if comm.rank in others else lambda: comm.all_reduce(np.ones(5)))
    assert isinstance(error, MismatchError), error
    lines = [line for line in str(error).splitlines() if line.startswith("  rank")]
    by_call = {line.partition(":")[2].split("(")[0].strip(): line for line in lines}
    # If two ranks of one host differ, the error can come before the other host has called.
    late = by_call.pop("has not come so far", "")
    assert set(by_call) == {"barrier", "all_reduce"}, error
    ranks = {operation: _ranks_of(line) for operation, line in by_call.items()}
    assert set(ranks["barrier"]) <= set(others), error
    assert set(ranks["all_reduce"]).isdisjoint(others), error
    named = [*ranks["barrier"], *ranks["all_reduce"], *_ranks_of(late)]
    assert sorted(named) == [0, 1, 2, 3], error
    later = _heard(comm.barrier)
    assert isinstance(later, CommunicatorAbortedError), later


# -- memory ---------------------------------------------------------------------------------


@on_ranks("pairs")
def test_allocation_failure_on_one_host_raises_on_all(comm: Communicator) -> None:
    inner: Any = comm.inner.transport._inner  # type: ignore[attr-defined]

    def refuse(nbytes: int, timeout: float) -> None:
        raise AllocationError("empty: out of memory, as planned")

    if comm.rank in (2, 3):
        inner._heap.empty = refuse
    with pytest.raises(AllocationError, match="" if comm.rank > 1 else "the host of rank 2"):
        comm.empty(1000)
    assert comm.all_reduce(np.ones(1)).item() == 4.0


@on_ranks("pairs")
def test_symmetric_memory_is_reduced_across_hosts(comm: Communicator) -> None:
    x = comm.empty(300_000, "float32")
    x[:] = comm.rank + 1
    y = comm.empty(300_000, "float32")
    for _ in range(3):
        comm.all_reduce(x, out=y)
        comm.all_reduce(y, out=y, op="max")
    assert (y == 10.0).all()


# -- connecting -------------------------------------------------------------------------------


class Broken(Pairs):
    """Hosts of which the second has no shared memory; rank 1 learns of that while connecting."""

    name = "hierarchical-broken"

    @classmethod
    def host_of(cls, world: World) -> str:
        if world.rank == 2:
            transport.ShmBackend = NoShm  # type: ignore[misc]
        elif world.rank == 1:
            transport.ShmBackend = LateShm  # type: ignore[misc]
        return super().host_of(world)


class NoShm(ShmBackend):
    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> NoShm:
        raise BackendUnavailableError("shm: a shared segment cannot be made, as planned")


class LateShm(ShmBackend):
    """Shared memory that waits for a failure instead of joining, so that rank 0 waits for it."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> LateShm:
        while not deadline.expired:
            world.store.check()
            time.sleep(0.01)
        raise AssertionError("no failure was reported")


def _nothing(comm: Communicator) -> None:
    """Do nothing; connecting fails before this function runs."""


def test_host_without_shared_memory_is_named_on_all_ranks() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, _nothing, backend=Broken, timeout=15.0)
    errors = failed.value.errors
    assert isinstance(errors[2], BackendUnavailableError)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], RendezvousError), errors[rank]
        assert "rank 2" in str(errors[rank])
        assert "as planned" in str(errors[rank])


class Late(Pairs):
    """Hosts on which rank 0 finishes connecting only after a failure has been reported."""

    name = "hierarchical-late"

    @classmethod
    def host_of(cls, world: World) -> str:
        if world.rank == 0:
            transport._exchange = _late_exchange
        return super().host_of(world)


def _late_exchange(outer: Any, text: str, deadline: Deadline) -> list[str]:
    texts = _exchange(outer, text, deadline)
    while text == "ready" and outer.channel.failure is None and not deadline.expired:
        time.sleep(0.01)
    outer.channel.check("connect")
    return texts


def _failing_at_once(comm: Communicator) -> CollectiveError:
    if comm.rank == 3:
        raise ValueError("lost the keys")
    return _heard(comm.barrier)


def test_failure_while_peer_connects_is_raised_by_first_call() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, _failing_at_once, backend=Late, timeout=15.0)
    assert list(failed.value.errors) == [3]
    for error in failed.value.results.values():
        assert isinstance(error, PeerFailedError), error


def test_unwatched_transport_between_hosts_is_refused() -> None:
    store: Any = None  # no store is needed, because the transport is refused before the ranks meet
    world = World(0, 2, 0, 1, "here", "none", "job", store, {"across": "shm"})
    with pytest.raises(UnsupportedError, match=r"transport 'shm' cannot connect the hosts.*'tcp'"):
        HierarchicalBackend.connect(world, 1.0)
