"""``grow()``, ``waiting()`` and ``join``, beyond the public suite: refusals and errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective.backends.threads import ThreadsBackend
from collective.communicator import Communicator
from collective.contract.process import RankProcess
from collective.contract.world import World
from collective.control.secret import Secret
from collective.errors import (
    CollectiveTimeoutError,
    ConfigError,
    ExcludedError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from collective.generations.arrivals import Arrivals
from collective.start.stores import MemoryStore, seal
from tests.contract.test_process import other  # noqa: F401  a fixture
from tests.elastic.test_shrinking import FAR_S, alone, on_threads
from tests.support.interpreter import run_together
from tests.support.network_hosts import free_port

Other = tuple[subprocess.Popen[str], RankProcess]
WORLD = World(0, 1, 0, 1, "a", "none", "job", MemoryStore())


def join(store: Any, backend: Any = "threads", seconds: float = FAR_S, **settings: Any) -> Any:
    """Return the communicator of a process that joins, or the error that it got."""
    world = replace(WORLD, store=store)
    try:
        return collective.connect(
            world, backend, join=True, start_timeout=seconds, timeout=FAR_S, **settings
        )
    except collective.CollectiveError as error:
        return error


def joined(store: Any) -> Any:
    """Join; return the origin, this process's rank, and a sum over the ranks."""
    with join(store) as comm:
        return comm.membership.origin, comm.rank, float(comm.all_reduce(np.ones(1))[0])


def members(store: Any, program: Callable[[Communicator], Any], size: int = 2) -> list[Any]:
    return on_threads(size, program, store, shrink_grace=0.2)


def grown(comm: Communicator, wanted: int = 1) -> tuple[Any, ...]:
    """Grow when ``wanted`` processes wait; return origin, lost ranks and a sum over the ranks."""
    while comm.membership.waiting() < wanted:
        time.sleep(0.001)
    with comm.grow() as new:
        return new.membership.origin, new.membership.lost, float(new.all_reduce(np.ones(1))[0])


def test_grow_admits_two_processes_with_separate_numbers() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(joined, store) for _ in range(2)]
        results = members(store, lambda comm: grown(comm, 2))
        joined_results = sorted(future.result(FAR_S) for future in joining)
    assert joined_results == [((0, 1, 2, 3), rank, 4.0) for rank in (2, 3)]
    assert results == [((0, 1, 2, 3), frozenset(), 4.0)] * 2


def test_grow_never_reuses_origin_number() -> None:
    store = MemoryStore()

    def program(comm: Communicator) -> Any:
        for _ in range(2):
            while not comm.membership.waiting():
                time.sleep(0.001)
            comm = comm.grow()
            comm.barrier()
            comm = comm.shrink(exclude=[2] if comm.rank == 0 else [])
        comm.close()
        return comm.membership.origin

    def joining() -> tuple[int, ...]:
        with join(store) as comm:
            comm.barrier()
            with pytest.raises(ExcludedError):
                comm.shrink()
            numbers: tuple[int, ...] = comm.membership.origin
            return numbers

    with ThreadPoolExecutor(1) as pool:
        first, second = pool.submit(joining), pool.submit(joining)
        assert members(store, program) == [(0, 1)] * 2
        assert (first.result(FAR_S), second.result(FAR_S)) == ((0, 1, 2), (0, 1, 3))


def test_grow_of_group_raises_unsupported_error() -> None:
    def program(comm: Communicator) -> Any:
        group = comm.dup()
        with pytest.raises(UnsupportedError, match="grow: processes cannot join a group"):
            group.grow()
        group.barrier()
        return "goes on"

    assert members(MemoryStore(), program) == ["goes on"] * 2


def test_grow_of_single_rank_admits_process() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(1) as pool, alone(store) as comm:
        joining = pool.submit(joined, store)
        assert grown(comm) == ((0, 1), frozenset(), 2.0)
        assert joining.result(FAR_S) == ((0, 1), 1, 2.0)


def test_grow_timeout_names_silent_rank_and_aborts() -> None:
    def program(comm: Communicator) -> Any:
        if comm.rank == 1:
            return comm.barrier()
        with pytest.raises(CollectiveTimeoutError) as caught:
            comm.grow(timeout=0.05)
        assert caught.value.ranks == (1,)
        comm.barrier()

    errors = members(MemoryStore(), program)
    assert [type(error) for error in errors] == [collective.CommunicatorAbortedError] * 2


def test_waiting_without_store_raises_rendezvous_error_on_all() -> None:
    class Gone(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            raise RendezvousError("it is gone")

    errors = members(Gone(), lambda comm: comm.membership.waiting())
    assert [type(error) for error in errors] == [RendezvousError] * 2
    assert "rank 0 cannot read the store in which the ranks met [rank 1 of 2]" in str(errors[1])


def test_shrink_of_joined_process_after_end_of_store_raises() -> None:
    """The first ranks take over the store, but the joined process has no access to the new one."""

    class Theirs(MemoryStore):
        served_by_rank = True
        ended = False

        def put_if_absent(self, key: str, value: bytes) -> bytes:
            if self.ended:
                raise RendezvousError("it is gone")
            return super().put_if_absent(key, value)

    store = MemoryStore()
    store_of_joiner = Theirs()
    store_of_joiner._values = store._values

    def joining() -> Any:
        with join(store_of_joiner) as comm:
            comm.barrier()
            store_of_joiner.ended = True
            with pytest.raises(RendezvousError) as caught:
                comm.shrink()
            return str(caught.value)

    def program(comm: Communicator) -> Any:
        while not comm.membership.waiting():
            time.sleep(0.001)
        comm = comm.grow()
        comm.barrier()
        with comm.shrink() as new:
            return new.membership.origin

    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(joining)
        assert members(store, program) == [(0, 1)] * 2
        assert "joined later, so it has no access to the store" in joined.result(FAR_S)


# -- processes that are not admitted ------------------------------------------------------------


def knock(store: MemoryStore, process: RankProcess) -> None:
    entry = {"host": "a", "process": str(process)}
    store.put_if_absent("join.0", json.dumps(entry).encode())


def test_grow_leaves_out_process_that_died_while_waiting(other: Other) -> None:  # noqa: F811
    store = MemoryStore()
    knock(store, other[1])

    def program(comm: Communicator) -> Any:
        before = comm.membership.waiting()
        if comm.rank == 0:
            os.kill(other[0].pid, signal.SIGKILL)
            other[0].wait()
        comm.barrier()
        after = comm.membership.waiting()
        with comm.grow() as new:
            return before, after, new.membership.origin, new.membership.generation

    assert members(store, program) == [(1, 0, (0, 1), 1)] * 2


def test_grow_leaves_out_process_that_dies_before_connecting(other: Other) -> None:  # noqa: F811
    store = MemoryStore()
    knock(store, other[1])

    def program(comm: Communicator) -> Any:
        if comm.rank == 0:
            kill = threading.Thread(target=kill_once_answered)
            kill.start()
        with comm.grow() as new:
            return new.membership.origin, new.membership.generation

    def kill_once_answered() -> None:
        while store.try_get("join.0.answer") is None:
            time.sleep(0.001)
        os.kill(other[0].pid, signal.SIGKILL)

    assert members(store, program) == [((0, 1), 2)] * 2


def test_grow_renews_announcement_of_rank_that_is_lost_meanwhile(other: Other) -> None:  # noqa: F811
    """A process that joins waits longer than its grace, because a rank comes late to grow()."""
    store, grace = MemoryStore(), 0.2
    other[0].kill()
    other[0].wait()

    def until_there(key: str) -> None:
        while store.try_get(key) is None:
            time.sleep(0.001)

    def program(comm: Communicator) -> Any:
        comm.membership.waiting()
        assert comm.inner.succession.lineage is not None
        if comm.rank == 0:
            until_there("join.0")
            until_there(f"{comm.inner.succession.lineage.name}.1.1")  # rank 1 is in grow()
            # This rank announced the ranks. Its process ends now, and its last word is not "ended".
            entry = {"protocol": 1, "backend": "threads", "process": str(other[1])}
            store.set("join", json.dumps(entry).encode())
            comm.inner.succession.keep_announcement()
            return None
        if comm.rank == 2:
            until_there(f"{comm.inner.succession.lineage.name}.1.1")
            time.sleep(5 * grace)
        with comm.grow() as new:
            return new.membership.origin

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, store, shrink_grace=grace)
        assert on_threads(3, program, store, shrink_grace=FAR_S)[1:] == [(1, 2, 3)] * 2
        with joining.result(FAR_S) as comm:
            assert comm.membership.origin == (1, 2, 3)


def test_rank_left_out_of_grow_does_not_announce_the_end_of_the_others() -> None:
    store = MemoryStore()

    def program(comm: Communicator) -> Any:
        comm.membership.waiting()
        if comm.rank == 1:
            with comm.shrink(exclude=[0]) as new:
                rolls = [store.try_get("join")]
                out.wait(FAR_S)
                rolls.append(store.try_get("join"))
                return new.membership.origin, [b"ended" in roll for roll in rolls if roll]
        with pytest.raises(ExcludedError):
            comm.grow()
        comm.close()
        out.set()

    out = threading.Event()
    assert members(store, program)[1] == ((1,), [False, False])


def test_join_with_other_secret_times_out_and_names_secret() -> None:
    store = MemoryStore()
    store_of_ranks, store_of_joiner = (seal(store, Secret(letter * 16)) for letter in (b"a", b"b"))
    done = threading.Event()

    def program(comm: Communicator) -> Any:
        first = comm.membership.waiting()
        done.wait(FAR_S)
        return first, comm.membership.waiting()

    with ThreadPoolExecutor(1) as pool:
        counts = pool.submit(members, store_of_ranks, program)
        error = join(store_of_joiner, seconds=0.1)
        done.set()
        assert counts.result(FAR_S) == [(0, 0)] * 2
    assert isinstance(error, CollectiveTimeoutError)
    assert "another secret (COLLECTIVE_SECRET), or with none, cannot be seen" in str(error)


@pytest.mark.parametrize(
    ("says", "kind", "text"),
    [
        ({"protocol": 2, "backend": "threads"}, ConfigError, "use protocol 2, this process 1"),
        ({"protocol": 1, "backend": "shm"}, ConfigError, "connected by 'shm', but this process"),
        ({"protocol": 1, "ended": True}, ExcludedError, "have ended, so this process cannot join"),
    ],
    ids=["protocol", "transport", "ended"],
)
def test_join_of_unsuitable_ranks_raises_error(says: Any, kind: type, text: str) -> None:
    store = MemoryStore()
    store.set("join", json.dumps(says).encode())
    error = join(store, shrink_grace=0.01)
    assert type(error) is kind
    assert text in str(error)


def test_join_after_death_of_ranks_raises_excluded_error(other: Other) -> None:  # noqa: F811
    store = MemoryStore()
    entry = {"protocol": 1, "backend": "threads", "process": str(other[1])}
    store.set("join", json.dumps(entry).encode())
    other[0].kill()
    other[0].wait()
    assert type(join(store, shrink_grace=0.01)) is ExcludedError


def test_join_raises_excluded_error_when_ranks_end() -> None:
    store = MemoryStore()
    knocked = Arrivals(store, "threads")

    def program(comm: Communicator) -> None:
        comm.membership.waiting()
        while comm.rank == 0 and not knocked.waiting():
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, store, shrink_grace=0.01)
        members(store, program)
        assert type(joining.result(FAR_S)) is ExcludedError


def test_grow_below_min_ranks_raises_peer_lost() -> None:
    def program(comm: Communicator) -> Any:
        return comm.grow() if comm.rank else None  # rank 0 leaves

    errors = on_threads(3, program, min_ranks=3)[1:]
    assert [type(error) for error in errors] == [PeerLostError] * 2


def test_arrivals_ignore_malformed_entries() -> None:
    store = MemoryStore()
    for number, text in enumerate([b"not JSON", b"[]", b'{"host": "a"}']):
        store.set(f"join.{number}", text)
    assert Arrivals(store, "threads").waiting() == []


def test_arrivals_report_admitted_process() -> None:
    store, own = MemoryStore(), RankProcess.own()
    assert own is not None
    knock(store, own)
    arrivals = Arrivals(store, "threads")
    assert arrivals.admitted() == set()
    arrivals.claim("T", 1, (0, 1), 2)
    assert arrivals.admitted() == {own}


# -- init() -----------------------------------------------------------------------------------

MEMBER = """
import sys, time, numpy as np, collective
comm = collective.init("shm", rank=int(sys.argv[2]), size=2, store=sys.argv[1], timeout=60)
while not comm.membership.waiting():
    time.sleep(0.001)
comm = comm.grow()
total = comm.all_reduce(np.ones(1))[0]
print(comm.rank, comm.membership.origin, collective.current() is comm, total)
"""
NEWCOMER = """
import sys, numpy as np, collective
comm = collective.init(store=sys.argv[1], join=sys.argv[2], timeout=60)
if sys.argv[2] == "late":
    assert comm.membership.joins and comm.size == 1 and comm.all_reduce(np.ones(1))[0] == 1
    comm = comm.grow()
assert not comm.membership.joins
total = comm.all_reduce(np.ones(1))[0]
print(comm.rank, comm.membership.origin, collective.current() is comm, total)
"""


@pytest.mark.parametrize("how", ["on", "late"])
@pytest.mark.parametrize("store_kind", ["directory", "tcp"])
def test_init_with_join_enters_running_ranks(how: str, store_kind: str, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    if store_kind == "tcp":
        store = f"tcp://127.0.0.1:{free_port()}"
    done = run_together(
        ["-c", MEMBER, store, 0], ["-c", MEMBER, store, 1], ["-c", NEWCOMER, store, how],
        timeout=2 * FAR_S, COLLECTIVE_SECRET="a" * 32,
    )  # fmt: skip
    expected = [f"{rank} (0, 1, 2) True 3.0\n" for rank in range(3)]
    assert [process.stdout for process in done] == expected, [process.stderr for process in done]


def test_init_with_join_without_store_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="no setting tells where the ranks to join have met"):
        collective.init(join=True)


def test_waiting_on_transport_that_cannot_grow_raises_unsupported() -> None:
    class Still(ThreadsBackend):
        capabilities = replace(ThreadsBackend.capabilities, grows=False)

    with collective.connect(WORLD, Still) as comm, pytest.raises(UnsupportedError):
        comm.membership.waiting()
