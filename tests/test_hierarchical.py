"""The ``hierarchical`` transport, on hosts that are pretended: see test_hosts.py for real ones."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="between hosts there is Gloo, which stands on PyTorch")

from collective.backends.hierarchical import HierarchicalBackend, transport
from collective.backends.hierarchical.topology import Topology
from collective.backends.shm import ShmBackend
from collective.communicator import Communicator
from collective.contract.world import World
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
from tests.conformance_parts import BY_PLACE, all_but
from tests.pretended import Interleaved, Lopsided, Pairs, Single

Check = Callable[[], None]


@parametrize_with_checks(Pairs, sizes=(4,), checks=all_but("check_shrink", "check_shrink_left"))
def test_pairs(check: Check) -> None:
    check()


@parametrize_with_checks(Pairs, sizes=(3,), checks=BY_PLACE)
def test_a_pair_and_one(check: Check) -> None:
    check()


@parametrize_with_checks(Interleaved, sizes=(4,), checks=BY_PLACE)
def test_interleaved(check: Check) -> None:
    check()


@parametrize_with_checks(Lopsided, sizes=(4,), checks=BY_PLACE)
def test_lopsided(check: Check) -> None:
    check()


@parametrize_with_checks(Single, sizes=(2,), checks=BY_PLACE)
def test_one_host(check: Check) -> None:
    check()


# -- who is where -----------------------------------------------------------------------


def test_places_of_pairs() -> None:
    topology = Topology(["a", "a", "b", "b"], 3)
    assert topology.members == [[0, 1], [2, 3]]
    assert (topology.host, topology.local_rank, topology.local) == (1, 1, [2, 3])
    assert (topology.common, topology.even, topology.in_order, topology.levels) == (
        2,
        True,
        True,
        True,
    )
    assert [topology.local_rank_of(rank) for rank in range(4)] == [None, None, 0, 1]
    assert [topology.host_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert topology.at(1) == [1, 3]


def test_places_out_of_order_and_uneven() -> None:
    topology = Topology(["a", "b", "a", "a"], 2)
    assert topology.members == [[0, 2, 3], [1]]
    assert (topology.common, topology.even, topology.in_order, topology.levels) == (
        1,
        False,
        False,
        True,
    )
    assert not Topology(["a", "b", "c"], 0).levels


def test_parts_are_the_same_on_all_hosts() -> None:
    uneven = ["a", "a", "a", "b", "b"]
    assert Topology(uneven, 0).parts(7, None) == [4, 3, 0]
    assert Topology(uneven, 3).parts(7, None) == [4, 3]
    assert Topology(uneven, 3).parts(7, 1) == [0, 7]


@pytest.fixture(scope="module")
def pairs() -> Iterator[RankPool]:
    """Four ranks on two hosts; starting processes with PyTorch takes seconds."""
    with RankPool(4, Pairs) as pool:
        yield pool


# -- groups ---------------------------------------------------------------------------------


def _kinds(comm: Communicator) -> list[str | None]:
    found: list[str | None] = []
    for members in ([0, 1], [2, 3], [0, 2], [1, 2, 3], [3, 1, 0]):
        if comm.rank not in members:
            found.append(None)
            continue
        with comm.group(members) as group:
            total = group.all_reduce(np.array([comm.rank]))
            assert total.item() == sum(members)
            found.append(group.backend)
    return found


def test_groups_take_the_nearest_transport(pairs: RankPool) -> None:
    kinds = pairs.run(_kinds)
    two, flat = "hierarchical-pairs", "gloo"
    assert kinds == [
        ["shm", None, flat, None, two],
        ["shm", None, None, two, two],
        [None, "shm", flat, two, None],
        [None, "shm", None, two, two],
    ]


# -- failures ---------------------------------------------------------------------------------


def _heard(call: Callable[[], Any]) -> CollectiveError:
    """Repeat ``call`` until it raises; return the error."""
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
def test_a_killed_rank_is_named_on_all_hosts(pairs: RankPool, victim: int, count: int) -> None:
    plan = [faults.kill(victim, at_call=3)]
    with pytest.raises(RanksFailedError) as failed:
        pairs.run(_until_it_breaks, count, faults=plan)
    assert set(failed.value.errors) == {victim}
    assert isinstance(failed.value.errors[victim], RankDiedError)
    for error in failed.value.results.values():
        assert isinstance(error, PeerLostError), error
        assert error.ranks == (victim,)
        assert f"rank {victim} " in str(error)


def _until_heard(folder: str, count: int) -> None:
    """Wait until that many ranks have heard of something."""
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)


def _late(comm: Communicator, late: int, folder: str) -> CollectiveError:
    comm.barrier()
    if comm.rank == late:
        _until_heard(folder, comm.size - 1)
    error = _heard(lambda: comm.all_reduce(np.ones(3), timeout=1.0))
    Path(folder, str(comm.rank)).touch()
    return error


@pytest.mark.parametrize("late", range(4))
def test_a_late_rank_is_named_on_all_hosts(pairs: RankPool, late: int, tmp_path: Path) -> None:
    for rank, error in enumerate(pairs.run(_late, late, str(tmp_path))):
        if rank == late:
            assert isinstance(error, CommunicatorAbortedError), error
        else:
            assert isinstance(error, CollectiveTimeoutError), error
            assert error.ranks == (late,), error


def _closing(comm: Communicator, leaver: int) -> CollectiveError | None:
    comm.barrier()
    if comm.rank == leaver:
        comm.close()
        return None
    return _heard(comm.barrier)


@pytest.mark.parametrize("leaver", range(4))
def test_a_rank_that_left_is_named_on_all_hosts(pairs: RankPool, leaver: int) -> None:
    for rank, error in enumerate(pairs.run(_closing, leaver)):
        if rank != leaver:
            assert isinstance(error, PeerLostError), error
            assert error.ranks == (leaver,), error


def _failing(comm: Communicator, victim: int) -> CollectiveError:
    if comm.rank == victim:
        comm.barrier()
        raise ValueError("lost the keys")
    return _heard(comm.barrier)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_failed_rank_is_told_to_all_hosts(pairs: RankPool, victim: int) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pairs.run(_failing, victim)
    for error in failed.value.results.values():
        assert isinstance(error, PeerFailedError), error
        assert error.rank == victim
        assert "lost the keys" in str(error)


def _receiving(comm: Communicator, source: int, folder: str) -> CollectiveError:
    comm.barrier()
    if comm.rank != 1:
        _until_heard(folder, 1)
        return _heard(comm.barrier)
    error = _heard(lambda: comm.recv(None, source, timeout=0.5))
    Path(folder, "heard").touch()
    return error


@pytest.mark.parametrize("source", [0, 3])
def test_a_message_that_does_not_come_names_its_sender(
    pairs: RankPool, source: int, tmp_path: Path
) -> None:
    error = pairs.run(_receiving, source, str(tmp_path))[1]
    assert isinstance(error, CollectiveTimeoutError), error
    assert error.ranks == (source,)
    assert "recv(tag=" in str(error)


# -- disagreement ---------------------------------------------------------------------------


def _differing(comm: Communicator, others: list[int]) -> tuple[CollectiveError, CollectiveError]:
    comm.barrier()
    if comm.rank in others:
        first = _heard(comm.barrier)
    else:
        first = _heard(lambda: comm.all_reduce(np.ones(5)))
    return first, _heard(comm.barrier)


@pytest.mark.parametrize("others", [[0], [1], [3], [2, 3], [1, 3]])
def test_different_calls_are_found_unasked(pairs: RankPool, others: list[int]) -> None:
    # Inside a host at once, between hosts when the call has stalled for a second; too late
    # in either case for what the other ranks have sent.
    for error, later in pairs.run(_differing, others, call_timeout=20.0):
        assert isinstance(error, MismatchError), error
        lines = [line for line in str(error).splitlines() if line.startswith("  rank")]
        by_call = {line.partition(":")[2].split("(")[0].strip(): line for line in lines}
        # Where two of them differ at once, the others may not have come yet.
        late = by_call.pop("has not come so far", "")
        assert set(by_call) == {"barrier", "all_reduce"}, error
        ranks = {what: re.findall(r"\d+", line.partition(":")[0]) for what, line in by_call.items()}
        assert {int(rank) for rank in ranks["barrier"]} <= set(others), error
        assert {int(rank) for rank in ranks["all_reduce"]}.isdisjoint(others), error
        named = [*ranks["barrier"], *ranks["all_reduce"], *re.findall(r"\d+", late)]
        assert sorted(map(int, named)) == [0, 1, 2, 3], error
        assert isinstance(later, CommunicatorAbortedError), later


# -- memory ---------------------------------------------------------------------------------


def _no_memory(comm: Communicator) -> tuple[str, float]:
    inner: Any = comm._backend._inner  # type: ignore[attr-defined]
    if comm.rank == 2:

        def refuse(nbytes: int, timeout: float) -> None:
            raise AllocationError("empty: out of memory, as planned")

        inner._heap.empty = refuse
    if comm.rank == 3:

        def wait(nbytes: int, timeout: float) -> None:
            raise AllocationError("empty: out of memory, says rank 2")

        inner._heap.empty = wait
    with pytest.raises(AllocationError) as refused:
        comm.empty(1000)
    return str(refused.value), comm.all_reduce(np.ones(1)).item()


def test_no_memory_on_one_host_is_no_memory_on_all(pairs: RankPool) -> None:
    results = pairs.run(_no_memory)
    assert [total for _, total in results] == [4.0] * 4
    assert all("rank 2's host" in text for text, _ in results[:2]), results


def _symmetric(comm: Communicator) -> float:
    x = comm.empty(300_000, "float32")
    x[:] = comm.rank + 1
    y = comm.empty(300_000, "float32")
    for _ in range(3):
        comm.all_reduce(x, out=y)
        comm.all_reduce(y, out=y, op="max")
    assert float(y.min()) == float(y.max())
    return float(y[0])


def test_memory_of_its_own(pairs: RankPool) -> None:
    assert pairs.run(_symmetric) == [10.0] * 4


# -- connecting -------------------------------------------------------------------------------


class Broken(Pairs):
    """On the second host shared memory cannot be had; on the first rank 1 hears that early."""

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
    def connect(cls, world: World, timeout: float) -> NoShm:
        raise BackendUnavailableError("shm: a shared segment cannot be made, as planned")


class LateShm(ShmBackend):
    """Does not join before it has heard of a failure, so never: rank 0 waits for it."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> LateShm:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            world.store.check()
            time.sleep(0.01)
        raise AssertionError("no failure was heard of")


def _nothing(comm: Communicator) -> None:
    """Get no further than here."""


def test_a_host_without_shared_memory_is_told_to_all() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, _nothing, backend=Broken, timeout=15.0)
    errors = failed.value.errors
    assert isinstance(errors[2], BackendUnavailableError)
    for rank in (0, 1, 3):
        assert isinstance(errors[rank], RendezvousError), errors[rank]
        assert "rank 2" in str(errors[rank])
        assert "as planned" in str(errors[rank])


def test_only_a_watched_transport_can_be_between_the_hosts() -> None:
    store: Any = None  # refused before anybody is met
    world = World(0, 2, 0, 1, "here", "none", "job", store, {"across": "shm"})
    with pytest.raises(UnsupportedError, match=r"hierarchical: 'shm' between the hosts.*'gloo'"):
        HierarchicalBackend.connect(world, 1.0)
