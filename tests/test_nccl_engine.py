"""NCCL's communicators over the ABI fake: how they come up, are derived, fail and go."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any

import fakes
import numpy as np
import pytest
from nccl_ranks import (
    DEADLINE_S,
    FLOAT32,
    NEW,
    OLD,
    OLDER,
    SUM,
    Ranks,
    at,
    destroy,
    fresh,
    ranks,
    until,
    within,
)

from collective import cuda
from collective.backends.nccl.engine import NcclComm
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    UnsupportedError,
)

__all__ = ["fresh", "ranks"]  # fixtures


# -- coming up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [NEW, OLD, OLDER])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_come_up_and_reduce(fresh: Callable[[int], Ranks], version: int, size: int) -> None:
    ranks = fresh(version)
    comms = ranks.create(size)
    assert [(comm.rank, comm.size) for comm in comms] == [(rank, size) for rank in range(size)]
    assert all(comm.handle for comm in comms)
    assert ranks.sums(comms) == [[size * (size + 1) / 2] * 3] * size
    destroy(ranks, comms)
    assert not any(comm.handle for comm in comms)
    name = "ncclCommInitRank(" if version == OLDER else "ncclCommInitRankConfig"
    assert len(ranks.fake.log(name)) == size
    assert len(ranks.fake.log("ncclCommFinalize")) == (0 if version == OLDER else size)
    assert len(ranks.fake.log("ncclCommDestroy")) == size
    assert ranks.fake.log("ncclCommAbort") == []


def test_ranks_of_other_processes(ranks: Ranks) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    unique_id = ranks.library.unique_id()
    processes = [
        context.Process(target=process, args=(rank, 3, unique_id, answers)) for rank in range(3)
    ]
    for each in processes:
        each.start()
    for each in processes:
        each.join(DEADLINE_S)
    codes = [each.exitcode for each in processes]
    for each in processes:
        each.kill()
    assert codes == [0, 0, 0]
    assert sorted(answers.get() for _ in range(3)) == [(0, 6.0), (1, 6.0), (2, 6.0)]


def process(rank: int, size: int, unique_id: bytes, answers: Any) -> None:
    os.environ.update(fakes.environment(NEW, host_pointers=1))
    ranks = Ranks(NEW)
    comm = NcclComm.create(ranks.library, unique_id, rank, size, cuda.device(rank), within())
    answers.put((rank, ranks.sums([comm])[0][0]))
    comm.destroy(within())


@pytest.mark.parametrize("version", [NEW, OLD])
def test_a_deadline_during_init_leaves_nothing(fresh: Callable[[int], Ranks], version: int) -> None:
    ranks = fresh(version)
    unique_id, before = ranks.library.unique_id(), set(threading.enumerate())
    with ranks.fake.turned("init_polls", -1):  # in progress for ever
        for rank in range(2):
            with pytest.raises(CollectiveTimeoutError, match="the test's deadline"):
                NcclComm.create(ranks.library, unique_id, rank, 2, cuda.device(rank), within(0.05))
    assert len(ranks.fake.log("ncclCommAbort")) == 2
    assert set(threading.enumerate()) <= before


def test_an_absent_rank_is_waited_for_as_long_as_poll_says(ranks: Ranks) -> None:
    polls = 0

    def poll() -> None:
        nonlocal polls
        polls += 1
        if polls == 10:
            raise CollectiveTimeoutError("rank 1 is not there")

    with pytest.raises(CollectiveTimeoutError, match="rank 1 is not there"):
        NcclComm.create(ranks.library, ranks.library.unique_id(), 0, 2, cuda.device(0), poll)
    assert len(ranks.fake.log("ncclCommAbort")) == 1


def test_blocking_init_given_up_is_undone_when_it_returns(fresh: Callable[[int], Ranks]) -> None:
    ranks = fresh(OLDER)
    unique_id, before = ranks.library.unique_id(), set(threading.enumerate())
    with pytest.raises(CollectiveTimeoutError):
        NcclComm.create(ranks.library, unique_id, 0, 2, cuda.device(0), within(0.05))
    (left,) = set(threading.enumerate()) - before
    assert left.name == "collective-nccl-blocking"
    assert ranks.fake.log("ncclCommAbort") == []
    # The other rank comes after all: the call that was given up returns.
    other = NcclComm.create(ranks.library, unique_id, 1, 2, cuda.device(1), within())
    left.join(DEADLINE_S)
    assert not left.is_alive()
    assert len(ranks.fake.log("ncclCommAbort")) == 1
    other.abort()


def test_two_ranks_on_one_gpu_are_told_the_remedy(ranks: Ranks) -> None:
    unique_id = ranks.library.unique_id()

    def one(rank: int) -> str:
        with pytest.raises(BackendError) as caught:
            NcclComm.create(ranks.library, unique_id, rank, 2, cuda.device(0), within())
        assert caught.value.code == 5
        return str(caught.value)

    for text in ranks.run(2, one):
        assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device" in text
        assert "COLLECTIVE_DEVICE or CUDA_VISIBLE_DEVICES" in text
    assert len(ranks.fake.log("ncclCommAbort")) == 2


@pytest.mark.parametrize("version", [NEW, OLDER])
def test_an_error_during_init_has_nccls_words(fresh: Callable[[int], Ranks], version: int) -> None:
    ranks = fresh(version)
    with (
        ranks.fake.turned("init_error", 2),
        pytest.raises(BackendError, match=r"of rank 0: unhandled system error.*NCCL_DEBUG=INFO"),
    ):
        NcclComm.create(ranks.library, ranks.library.unique_id(), 0, 1, cuda.device(0), within())


def test_calls_may_block_though_initialisation_does_not(ranks: Ranks) -> None:
    comms = ranks.create(2, blocking=True)
    assert all("blocking=0" in line for line in ranks.fake.log("ncclCommInitRankConfig"))
    x = np.ones(1, np.float32)

    def one(rank: int) -> bool:
        return comms[rank].all_reduce(at(x), at(x), 0, FLOAT32, SUM, ranks.stream(rank))

    assert ranks.run(2, one) == [False, False]  # not even when the ranks connect
    assert ranks.sums(comms) == [[3.0] * 3] * 2
    destroy(ranks, comms)
    # The first one has gone, too.
    assert len(ranks.fake.log("ncclCommDestroy")) == 4


# -- deriving -----------------------------------------------------------------------------------


def test_split_by_color_in_the_order_of_keys(ranks: Ranks) -> None:
    comms = ranks.create(4)

    def one(rank: int) -> NcclComm | None:
        color = None if rank == 3 else rank % 2
        return comms[rank].split(color, -rank, within())

    parts = ranks.run(4, one)
    assert parts[3] is None
    assert [(part.rank, part.size) for part in parts if part] == [(1, 2), (0, 1), (0, 2)]
    assert ranks.sums([part for part in (parts[0], parts[2]) if part]) == [[3.0] * 3] * 2
    assert ranks.sums(comms) == [[10.0] * 3] * 4  # they go on to work
    destroy(ranks, [part for part in (parts[0], parts[2]) if part])


def test_split_that_is_given_up_aborts_both(ranks: Ranks) -> None:
    comms = ranks.create(2)
    with pytest.raises(CollectiveTimeoutError):
        comms[0].split(0, 0, within(0.05))
    assert comms[0].handle == 0
    with pytest.raises(CommunicatorAbortedError, match="rank 0 was aborted"):
        comms[0].all_reduce(1, 1, 1, FLOAT32, SUM, 0)
    comms[1].abort()


def test_shrink_leaves_the_others(ranks: Ranks) -> None:
    comms = ranks.create(3)
    left = {}

    def one(rank: int) -> None:
        if rank != 1:
            left[rank] = comms[rank].shrink([1], within())

    ranks.run(3, one)
    assert [(left[rank].rank, left[rank].size) for rank in (0, 2)] == [(0, 2), (1, 2)]
    assert ranks.sums([left[0], left[2]]) == [[3.0] * 3] * 2


def test_old_versions_name_the_one_that_can(fresh: Callable[[int], Ranks]) -> None:
    ranks = fresh(OLD)
    (comm,) = ranks.create(1)
    with pytest.raises(UnsupportedError, match=r"2\.18\.1 brings it"):
        comm.split(0, 0, within())
    with pytest.raises(UnsupportedError, match=r"2\.27\.3 brings it"):
        comm.shrink([], within())
    with pytest.raises(UnsupportedError, match=r"2\.19\.1 brings it"):
        comm.register(1 << 20, 64)
    assert ranks.sums([comm]) == [[1.0] * 3]
    comm.destroy(within())


# -- going --------------------------------------------------------------------------------------


def test_an_error_of_another_rank_is_seen(ranks: Ranks) -> None:
    comms = ranks.create(2)
    assert [comm.async_error() for comm in comms] == [None, None]
    x = np.ones(3, np.float32)
    with ranks.fake.turned("fault_rank", 0, -1), ranks.fake.turned("remote_error_at", 1):
        for rank, comm in enumerate(comms):
            comm.all_reduce(at(x), at(x), 3, FLOAT32, SUM, ranks.stream(rank))
        text = until(comms[0].async_error)
    with comms[0]._lock:  # as a call does that is inside NCCL
        assert ranks.run(1, lambda _: comms[0].async_error(wait=False)) == [None]
    assert comms[0].async_error(wait=False) == text
    assert "rank 0 of NCCL's communicator: remote process exited" in text
    assert "ncclRemoteError, 6" in text
    comms[0].destroy(within())  # what is broken is aborted, not destroyed
    comms[1].abort()
    assert ranks.fake.log("ncclCommDestroy") == []
    assert len(ranks.fake.log("ncclCommAbort")) == 2
    assert [comm.async_error() for comm in comms] == [None, None]


def test_abort_frees_once_from_any_thread(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    ranks.run(4, lambda rank: comm.abort())
    comm.abort()
    comm.destroy(within())
    assert len(ranks.fake.log("ncclCommAbort")) == 1
    assert ranks.fake.log("ncclCommDestroy") == []


def test_abort_wakes_a_call_that_waits_for_another_rank(ranks: Ranks) -> None:
    comms = ranks.create(2)
    x = np.ones(1, np.float32)
    begun = threading.Event()

    def call(rank: int) -> None:
        if rank == 1:
            begun.wait(DEADLINE_S)
            comms[0].abort()
            return
        assert comms[0].send(at(x), 1, FLOAT32, 1, ranks.stream(0))  # it has to connect
        with pytest.raises(CommunicatorAbortedError, match=r"settle: .* rank 0 was aborted"):
            comms[0].settle(begun.set)

    ranks.run(2, call)
    comms[1].abort()


def test_abort_wakes_a_call_that_blocks(fresh: Callable[[int], Ranks]) -> None:
    ranks = fresh(OLDER)
    comms = ranks.create(2)
    x = np.ones(1, np.float32)

    def call(rank: int) -> None:
        if rank == 1:
            until(lambda: ranks.fake.log("ncclSend") or None)
            comms[0].abort()
            return
        with pytest.raises((CommunicatorAbortedError, BackendError)):
            comms[0].send(at(x), 1, FLOAT32, 1, ranks.stream(0))

    ranks.run(2, call)
    comms[1].abort()
    assert len(ranks.fake.log("ncclCommAbort")) == 2


def test_destroy_that_is_given_up_aborts(ranks: Ranks) -> None:
    comms = ranks.create(2)
    x = np.ones(1, np.float32)
    # Its peer never receives, so what is enqueued does not end.
    comms[0].all_reduce(at(x), at(x), 1, FLOAT32, SUM, ranks.stream(0))
    with pytest.raises(CollectiveTimeoutError):
        comms[0].destroy(within(0.05))
    assert comms[0].handle == 0
    assert len(ranks.fake.log("ncclCommAbort")) == 1
    comms[1].abort()
