"""grow(), waiting() and join beside what the public suite says: who is refused, and why."""

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
from collective.contract.secret import Secret
from collective.contract.world import World
from collective.elastic.arrivals import Arrivals
from collective.errors import (
    CollectiveTimeoutError,
    ConfigError,
    ExcludedError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from collective.start.memory_store import MemoryStore
from collective.start.sealed_store import seal
from tests.contract.test_process import other  # noqa: F401  a fixture
from tests.elastic.test_shrinking import FAR_S, alone, on_threads
from tests.support.interpreter import run_together
from tests.support.network_hosts import free_port

Other = tuple[subprocess.Popen[str], RankProcess]
WORLD = World(0, 1, 0, 1, "a", "none", "job", MemoryStore())


def join(store: Any, backend: Any = "threads", seconds: float = FAR_S, **settings: Any) -> Any:
    """Return the communicator of a process that joins, or what it got instead."""
    world = replace(WORLD, store=store)
    try:
        return collective.connect(
            world, backend, join=True, start_timeout=seconds, timeout=FAR_S, **settings
        )
    except collective.CollectiveError as error:
        return error


def joined(store: Any) -> Any:
    """Join, and return the same as :func:`grown`, with the own rank."""
    with join(store) as comm:
        return comm.origin, comm.rank, float(comm.all_reduce(np.ones(1))[0])


def members(store: Any, program: Callable[[Communicator], Any], size: int = 2) -> list[Any]:
    return on_threads(size, program, store, shrink_grace=0.2)


def grown(comm: Communicator, wanted: int = 1) -> tuple[Any, ...]:
    """Grow once so many wait; return who is there, and their sum."""
    while comm.waiting() < wanted:
        time.sleep(0.001)
    with comm.grow() as new:
        return new.origin, new.lost, float(new.all_reduce(np.ones(1))[0])


def test_two_may_join_at_once_and_each_has_a_number_of_its_own() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(joined, store) for _ in range(2)]
        found = members(store, lambda comm: grown(comm, 2))
        seen = sorted(each.result(FAR_S) for each in joining)
    assert seen == [((0, 1, 2, 3), rank, 4.0) for rank in (2, 3)]
    assert found == [((0, 1, 2, 3), frozenset(), 4.0)] * 2


def test_a_number_is_never_given_twice() -> None:
    store = MemoryStore()

    def program(comm: Communicator) -> Any:
        for _ in range(2):
            while not comm.waiting():
                time.sleep(0.001)
            comm = comm.grow()
            comm.barrier()
            comm = comm.shrink(exclude=[2] if comm.rank == 0 else [])
        comm.close()
        return comm.origin

    def joining() -> tuple[int, ...]:
        with join(store) as comm:
            comm.barrier()
            with pytest.raises(ExcludedError):
                comm.shrink()
            numbers: tuple[int, ...] = comm.origin
            return numbers

    with ThreadPoolExecutor(1) as pool:
        first, second = pool.submit(joining), pool.submit(joining)
        assert members(store, program) == [(0, 1)] * 2
        assert (first.result(FAR_S), second.result(FAR_S)) == ((0, 1, 2), (0, 1, 3))


def test_nobody_joins_a_group() -> None:
    def program(comm: Communicator) -> Any:
        group = comm.dup()
        with pytest.raises(UnsupportedError, match="grow: processes cannot join a group"):
            group.grow()
        group.barrier()
        return "goes on"

    assert members(MemoryStore(), program) == ["goes on"] * 2


def test_one_that_is_alone_grows() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(1) as pool, alone(store) as comm:
        joining = pool.submit(joined, store)
        assert grown(comm) == ((0, 1), frozenset(), 2.0)
        assert joining.result(FAR_S) == ((0, 1), 1, 2.0)


def test_a_rank_that_does_not_call_it_is_named_and_breaks_it() -> None:
    def program(comm: Communicator) -> Any:
        if comm.rank == 1:
            return comm.barrier()
        with pytest.raises(CollectiveTimeoutError) as caught:
            comm.grow(timeout=0.05)
        assert caught.value.ranks == (1,)
        comm.barrier()

    found = members(MemoryStore(), program)
    assert [type(error) for error in found] == [collective.CommunicatorAbortedError] * 2


def test_a_store_that_is_gone_is_told_on_all_ranks() -> None:
    class Gone(MemoryStore):
        def set(self, key: str, value: bytes) -> None:
            raise RendezvousError("it is gone")

    found = members(Gone(), lambda comm: comm.waiting())
    assert [type(error) for error in found] == [RendezvousError] * 2
    assert "rank 0 cannot read the store in which the ranks met [rank 1 of 2]" in str(found[1])


def test_one_that_joined_is_told_that_the_store_ended_with_rank_0() -> None:
    """The first ranks serve it in that one's stead, and it has no part in that."""

    class Theirs(MemoryStore):
        served_by_rank = True
        ended = False

        def put_if_absent(self, key: str, value: bytes) -> bytes:
            if self.ended:
                raise RendezvousError("it is gone")
            return super().put_if_absent(key, value)

    store = MemoryStore()
    theirs = Theirs()
    theirs._values = store._values

    def joining() -> Any:
        with join(theirs) as comm:
            comm.barrier()
            theirs.ended = True
            with pytest.raises(RendezvousError) as caught:
                comm.shrink()
            return str(caught.value)

    def program(comm: Communicator) -> Any:
        while not comm.waiting():
            time.sleep(0.001)
        comm = comm.grow()
        comm.barrier()
        with comm.shrink() as new:
            return new.origin

    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(joining)
        assert members(store, program) == [(0, 1)] * 2
        assert "joined later, so it has no access to the store" in joined.result(FAR_S)


# -- whom nobody lets in ----------------------------------------------------------------------


def knock(store: MemoryStore, process: RankProcess) -> None:
    entry = {"host": "a", "process": str(process)}
    store.put_if_absent("join.0", json.dumps(entry).encode())


def test_one_that_died_after_it_knocked_is_not_let_in(other: Other) -> None:  # noqa: F811
    store = MemoryStore()
    knock(store, other[1])

    def program(comm: Communicator) -> Any:
        before = comm.waiting()
        if comm.rank == 0:
            os.kill(other[0].pid, signal.SIGKILL)
            other[0].wait()
        comm.barrier()
        after = comm.waiting()
        with comm.grow() as new:
            return before, after, new.origin, new.generation

    assert members(store, program) == [(1, 0, (0, 1), 1)] * 2


def test_one_that_dies_before_it_connects_is_left_out_at_once(other: Other) -> None:  # noqa: F811
    store = MemoryStore()
    knock(store, other[1])

    def program(comm: Communicator) -> Any:
        if comm.rank == 0:
            kill = threading.Thread(target=kill_once_answered)
            kill.start()
        with comm.grow() as new:
            return new.origin, new.generation

    def kill_once_answered() -> None:
        while store.try_get("join.0.answer") is None:
            time.sleep(0.001)
        os.kill(other[0].pid, signal.SIGKILL)

    assert members(store, program) == [((0, 1), 2)] * 2


def test_one_with_another_secret_is_not_seen_and_told_what_may_be_wrong() -> None:
    store = MemoryStore()
    ours, theirs = (seal(store, Secret(letter * 16)) for letter in (b"a", b"b"))
    done = threading.Event()

    def program(comm: Communicator) -> Any:
        first = comm.waiting()
        done.wait(FAR_S)
        return first, comm.waiting()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(members, ours, program)
        error = join(theirs, seconds=0.1)
        done.set()
        assert found.result(FAR_S) == [(0, 0)] * 2
    assert isinstance(error, CollectiveTimeoutError)
    assert "another secret (COLLECTIVE_SECRET), or with none, cannot be seen" in str(error)


@pytest.mark.parametrize(
    ("says", "kind", "text"),
    [
        ({"protocol": 2, "backend": "threads"}, ConfigError, "use protocol 2, this process 1"),
        ({"protocol": 1, "backend": "shm"}, ConfigError, "connected by 'shm', and this process"),
        ({"protocol": 1, "ended": True}, ExcludedError, "have ended, so this process cannot join"),
    ],
    ids=["protocol", "transport", "ended"],
)
def test_ranks_that_cannot_be_joined_are_told(says: Any, kind: type, text: str) -> None:
    store = MemoryStore()
    store.set("join", json.dumps(says).encode())
    error = join(store, shrink_grace=0.01)
    assert type(error) is kind
    assert text in str(error)


def test_ranks_that_died_without_a_word_have_ended(other: Other) -> None:  # noqa: F811
    store = MemoryStore()
    entry = {"protocol": 1, "backend": "threads", "process": str(other[1])}
    store.set("join", json.dumps(entry).encode())
    other[0].kill()
    other[0].wait()
    assert type(join(store, shrink_grace=0.01)) is ExcludedError


def test_who_waits_is_told_when_the_ranks_end() -> None:
    store = MemoryStore()
    knocked = Arrivals(store, "threads")

    def program(comm: Communicator) -> None:
        comm.waiting()
        while comm.rank == 0 and not knocked.waiting():
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, store, shrink_grace=0.01)
        members(store, program)
        assert type(joining.result(FAR_S)) is ExcludedError


def test_the_floor_holds_for_those_who_grow() -> None:
    def program(comm: Communicator) -> Any:
        return comm.grow() if comm.rank else None  # rank 0 leaves

    found = on_threads(3, program, min_ranks=3)[1:]
    assert [type(error) for error in found] == [PeerLostError] * 2


def test_what_a_stranger_writes_is_no_process_that_waits() -> None:
    store = MemoryStore()
    for number, text in enumerate([b"not JSON", b"[]", b'{"host": "a"}']):
        store.set(f"join.{number}", text)
    assert Arrivals(store, "threads").waiting() == []


def test_who_is_let_in_is_known_by_its_process() -> None:
    store, own = MemoryStore(), RankProcess.own()
    assert own is not None
    knock(store, own)
    arrivals = Arrivals(store, "threads")
    assert arrivals.admitted() == set()
    arrivals.claim("T", 1, (0, 1), 2)
    assert arrivals.admitted() == {own.pid}


# -- init() -----------------------------------------------------------------------------------

MEMBER = """
import sys, time, numpy as np, collective
comm = collective.init("shm", rank=int(sys.argv[2]), size=2, store=sys.argv[1], timeout=60)
while not comm.waiting():
    time.sleep(0.001)
comm = comm.grow()
print(comm.rank, comm.origin, collective.current() is comm, comm.all_reduce(np.ones(1))[0])
"""
NEWCOMER = """
import sys, numpy as np, collective
comm = collective.init(store=sys.argv[1], join=sys.argv[2], timeout=60)
if sys.argv[2] == "late":
    assert comm.joins and comm.size == 1 and comm.all_reduce(np.ones(1))[0] == 1
    comm = comm.grow()
assert not comm.joins
print(comm.rank, comm.origin, collective.current() is comm, comm.all_reduce(np.ones(1))[0])
"""


@pytest.mark.parametrize("how", ["on", "late"])
@pytest.mark.parametrize("store_kind", ["directory", "tcp"])
def test_a_process_joins_by_init(how: str, store_kind: str, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    if store_kind == "tcp":
        store = f"tcp://127.0.0.1:{free_port()}"
    done = run_together(
        ["-c", MEMBER, store, 0], ["-c", MEMBER, store, 1], ["-c", NEWCOMER, store, how],
        timeout=2 * FAR_S, COLLECTIVE_SECRET="a" * 32,
    )  # fmt: skip
    expected = [f"{rank} (0, 1, 2) True 3.0\n" for rank in range(3)]
    assert [each.stdout for each in done] == expected, [each.stderr for each in done]


def test_one_that_joins_has_to_know_where() -> None:
    with pytest.raises(ConfigError, match="no setting tells where the ranks to join have met"):
        collective.init(join=True)


def test_a_transport_says_whether_it_grows() -> None:
    class Still(ThreadsBackend):
        capabilities = replace(ThreadsBackend.capabilities, grows=False)

    with collective.connect(WORLD, Still) as comm, pytest.raises(UnsupportedError):
        comm.waiting()
