"""The shm transport on real processes: deaths, failures, cleanup, groups and waiting."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import collective
from collective import native
from collective.backends.shm import messages
from collective.backends.shm.segment import Segment
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RendezvousError,
    UnsupportedError,
)
from collective.start.connecting import connect
from collective.start.stores import FileStore
from collective.testing import RankDiedError, RanksFailedError, run_ranks
from collective.testing.checks_shrink import await_files, gather
from tests.support.on_ranks import on_ranks, ranks_of

pytestmark = pytest.mark.quick

two = ranks_of(("shm", 2), timeout=20.0)
three = ranks_of(("shm", 3), timeout=20.0)


def _mapped() -> int:
    """Return how many bytes of shared segments this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:collective" in line:
            start, stop = line.split()[0].split("-")
            total += int(stop, 16) - int(start, 16)
    return total


def _left() -> tuple[list[str], list[str], int]:
    """Return the descriptors, threads and mapped bytes of communicators in this process."""
    gc.collect()
    descriptors = sorted(
        link
        for entry in os.scandir("/proc/self/fd")
        if "collective" in (link := os.readlink(entry.path) if entry.is_symlink() else "")
    )
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("collective"))
    return descriptors, threads, _mapped()


# -- deaths ------------------------------------------------------------------------------


def reads_of_a_survivor_that_left(comm, marks: str) -> tuple[str, tuple]:
    x = np.ones(8, np.float32)
    addresses = comm.all_gather_object(x.ctypes.data)
    gather(comm, marks)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0:
        with pytest.raises(PeerLostError):
            comm.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    control = comm.inner.transport._control
    while control.segment.alive(0):
        time.sleep(0.01)
    with pytest.raises(PeerLostError) as caught:
        control.fetch(0, addresses[0], x)
    return str(caught.value), caught.value.ranks


def test_first_death_is_named_after_its_witness_died(three, tmp_path):
    with pytest.raises(RanksFailedError) as caught:
        three.run(reads_of_a_survivor_that_left, str(tmp_path))
    text, lost = caught.value.results[2]
    assert re.search(r"rank 1 \(pid \d+\) has died", text)
    assert lost == (1,)


def killed_before_a_group(comm, marks: str) -> str:
    gather(comm, marks)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while comm.inner.transport._control.segment.alive(1):
        time.sleep(0.01)
    try:
        comm.dup()
    except CommunicatorAbortedError as error:
        return str(error)
    return "nothing was noticed"


def test_dup_after_peer_death_reports_death(three, tmp_path):
    with pytest.raises(RanksFailedError) as caught:
        three.run(killed_before_a_group, str(tmp_path))
    for rank in (0, 2):
        assert "has died" in caught.value.results[rank]


def killed_with_a_message_under_way(comm, sends: bool, reading: bool, marks: str) -> tuple:
    """Kill rank 1 when a part of its message is in the ring, or before it receives."""
    comm.inner.transport._disabled = "" if reading else "shm_single_copy"
    native.switch(False)
    group, x = comm.dup(), np.ones(1 << 20)
    gather(comm, marks)
    if comm.rank == 1:

        def die(*_) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if sends:
            messages.wait_for_message = die
            group.send(x, 0)
        die()
    while group.inner.transport._control.segment.alive(1):
        time.sleep(0.01)
    call = group.recv if sends else group.send
    with pytest.raises(PeerLostError, match=r"rank 1 .*has died") as lost:
        call(x, 1)
    return lost.value.ranks


@pytest.mark.parametrize("reading", [False, True])
@pytest.mark.parametrize("sends", [False, True])
def test_death_with_message_in_flight_is_named_without_core(sends, reading, tmp_path):
    program = killed_with_a_message_under_way
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, program, sends, reading, str(tmp_path), backend="shm")
    assert isinstance(caught.value.errors[1], RankDiedError)
    assert caught.value.results[0] == (1,)


@on_ranks("two")
def test_member_missing_at_group_is_named(comm):
    if comm.rank == 1:
        time.sleep(0.6)
        return
    comm.timeout = 0.2
    with pytest.raises(CollectiveTimeoutError, match="rank 1") as caught:
        comm.group([0, 1])
    assert caught.value.ranks == (1,)


# -- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "ValueError: plain"),
        ("\0\n" * 20_000, "\0\n\0\n"),
        ("é" * 20_000 + "end", "éééend"),
        ("\udcff", r"ValueError: \udcff"),
    ],
    ids=["plain", "control_characters", "long", "lone_surrogate"],
)
@on_ranks("two")
def test_failure_with_any_text_reaches_peers(comm, text, expected):
    if comm.rank == 0:
        with contextlib.suppress(ValueError), comm:
            raise ValueError(text)
        return
    with pytest.raises(PeerFailedError) as caught:
        comm.barrier()
    assert caught.value.rank == 0
    assert expected in caught.value.traceback


@on_ranks("three")
def test_late_rank_gets_error_that_names_it(comm, tmp_path):
    """Rank 1 calls after the others have given up, each with a different error."""
    late = comm.rank == 1
    if late:
        await_files(tmp_path / "0", tmp_path / "2")
    expected = CommunicatorAbortedError if late else CollectiveTimeoutError
    with pytest.raises(expected, match=r"waited 0\.3 s for rank 1" if late else "") as caught, comm:
        comm.barrier(timeout=0.3 if comm.rank == 0 else 60.0)
    assert type(caught.value) is expected
    (tmp_path / str(comm.rank)).touch()


# -- cleanup -------------------------------------------------------------------------------


def segments() -> set[str]:
    """Return the names of this package's shared memory, also of concurrent tests."""
    return {name for name in os.listdir("/dev/shm") if "collective" in name}


@on_ranks("two")
def test_closed_communicator_leaves_no_descriptor_thread_or_mapping(comm):
    comm.all_reduce(np.ones(3))
    before, listing = _left(), segments()
    with comm.dup() as other:
        work = [other.all_reduce(np.ones(100_000), async_op=True) for _ in range(3)]
        peer = (comm.rank + 1) % comm.size
        work.append(other.send(np.ones(5), peer, async_op=True))
        other.recv(None, (comm.rank - 1) % comm.size)
        for w in work:
            w.wait()
        other.empty(1000)
        assert _left()[0] != before[0], "the test is void: the group has no descriptor"
    del other, work, w
    assert _left() == before
    # The segments of concurrent tests have names only while their ranks connect.
    new, deadline = segments() - listing, Deadline(10.0)
    while new & segments() and not deadline.expired:
        time.sleep(0.01)
    assert not new & segments()


@on_ranks("two")
def test_dropped_groups_leave_no_descriptor(comm):
    counts = []
    for _ in range(3):
        for _ in range(5):
            comm.dup().barrier()
        gc.collect()
        counts.append(len(_left()[0]))
        comm.barrier()
    assert counts == counts[:1] * 3


def test_segments_are_private():
    segment = Segment.create(8192)
    status = os.stat(segment.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    segment.close_descriptor()
    assert not os.path.exists(segment.path)


def test_path_to_another_file_is_not_opened(tmp_path):
    with open(tmp_path / "precious", "w+b") as file:
        file.write(b"x" * 8192)
        file.flush()
        with pytest.raises(OSError, match="no longer a segment"):
            Segment.open(f"/proc/{os.getpid()}/fd/{file.fileno()}", 1)


@on_ranks("two")
def test_symmetric_memory_is_unmapped_with_last_array(comm):
    gc.collect()
    count = 1 << 20
    start = _mapped()
    for use in ("nothing", "in_place", "out_of_place", "broadcast", "view", "send"):
        x = comm.empty(count)
        x[:] = comm.rank
        if use == "in_place":
            comm.all_reduce(x, out=x)
        elif use == "out_of_place":
            comm.all_reduce(x)
        elif use == "broadcast":
            comm.broadcast(x, out=x)
        elif use == "view":
            part = x[10:-10]
            comm.all_reduce(part, out=part)
            del part
        elif use == "send":
            comm.sendrecv(x, comm.rank ^ 1, comm.rank ^ 1)
        assert _mapped() - start >= 4 * count * comm.size, "the test is void: nothing is mapped"
        del x
        assert (_mapped(), len(comm.inner.transport._heap._by_number)) == (start, 0), use


@on_ranks("two")
def test_twenty_connects_over_one_store_leave_it_empty(comm, tmp_path):
    directory = tmp_path / "store"
    for step in range(20):
        store = FileStore(directory)
        world = World(comm.rank, comm.size, comm.rank, comm.size, "h", "none", "job", store)
        with collective.connect(world, "shm", start_timeout=60) as other:
            assert other.all_reduce(np.array([step]))[0] == 2 * step
    comm.barrier()
    assert os.listdir(directory) == []


# -- groups --------------------------------------------------------------------------------


@on_ranks("two")
def test_missing_ranks_are_named_with_whole_timeout(comm, tmp_path):
    if comm.rank == 1:
        time.sleep(0.3)  # by then the segment of rank 0 exists, and less of the timeout remains
    world = World(comm.rank, 3, comm.rank, 3, "h", "none", "job", FileStore(tmp_path / "store"))
    with pytest.raises(RendezvousError, match=r"after 3 s ranks \[2\] of 3 have not arrived"):
        collective.connect(world, "shm", start_timeout=3.0)


@on_ranks("two")
def test_many_open_groups_reduce_separately(comm):
    groups = [comm.dup() for _ in range(30)]
    for i, group in enumerate(reversed(groups)):
        assert group.all_reduce(np.array([i]))[0] == 2 * i
    for group in groups:
        group.close()


# -- payloads and waiting ------------------------------------------------------------------


@on_ranks("two")
def test_long_payloads_are_exchanged(comm) -> None:
    payload = {"rank": comm.rank, "bulk": "x" * (1_200_000 + 70_000 * comm.rank)}
    payloads = comm.all_gather_object(payload)
    assert [f["rank"] for f in payloads] == list(range(comm.size))
    assert [len(f["bulk"]) for f in payloads] == [1_200_000 + 70_000 * r for r in range(comm.size)]
    tree = {f"key_{k:06}": np.ones(1) for k in range(6000)}
    if comm.rank == 1:
        tree["key_005999"] = np.ones(2)
    with pytest.raises(MismatchError, match="all_reduce") as caught:
        comm.all_reduce(tree)
    assert len(str(caught.value)) > 2 * (64 << 10), "the test is void: the headers are short"
    assert comm.all_reduce(np.ones(1))[0] == comm.size


@pytest.mark.parametrize("how", ["barrier", "recv"])
@on_ranks("two")
def test_wait_of_one_second_uses_at_most_a_tenth_of_a_core(comm, how):
    comm.barrier()
    if comm.rank == 1:
        time.sleep(1.0)
    before = time.process_time()
    if how == "barrier":
        comm.barrier()
    elif comm.rank == 1:
        comm.send(np.ones(3), 0)
    else:
        comm.recv(None, 1)
    assert comm.rank == 1 or time.process_time() - before <= 0.1


@on_ranks("two")
def test_wait_after_deadline_does_not_yield_first(comm):
    """A call may wait many times, and each wait would take longer than the timeout."""
    group, looks = comm.dup(), []
    if comm.rank == 0:
        group.inner.transport.sleep_after(5.0)
        with pytest.raises(CollectiveTimeoutError):
            group.inner.transport._control.wait(
                lambda: looks.append(0), lambda: [1], "recv", Deadline(0.0)
            )
        assert len(looks) <= 3
    comm.barrier()


@pytest.mark.parametrize("core", [True, False])
@on_ranks("three")
def test_sources_of_messages_from_any_take_turns(comm, core):
    if core and native.chosen.extension is None:
        return
    before = native.chosen.extension is not None
    native.switch(core)
    group = comm.dup()
    native.switch(before)
    if comm.rank:
        for _ in range(4):  # the rings hold all of them
            group.send(np.ones(1), 0)
    group.barrier()
    if comm.rank == 0:
        status, sources = collective.Status(), []
        for _ in range(8):
            group.recv(np.ones(1), collective.ANY_SOURCE, status=status)
            sources.append(status.source)
        assert sources == [1, 2] * 4


@on_ranks("two")
def test_message_sent_before_close_arrives(comm):
    if comm.rank == 0:
        comm.send(np.arange(10), 1, tag=4)
        comm.close()
        return
    time.sleep(0.3)
    assert comm.recv(None, 0, tag=4).tolist() == list(range(10))
    with pytest.raises(PeerLostError, match=re.escape("rank 0 has closed its communicator")):
        comm.recv(None, 0, tag=4)


def test_ranks_as_threads_of_one_process_are_refused(tmp_path):
    def join(rank):
        world = World(rank, 2, rank, 2, "here", "none", "job", FileStore(tmp_path / "store"))
        with pytest.raises(UnsupportedError, match=r"2 ranks in 1 processes.*backend='threads'"):
            connect(world, "shm", start_timeout=20.0)
        return rank

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, range(2))) == [0, 1]


@on_ranks("two")
def test_closed_communicator_is_freed_without_garbage_collector(comm):
    gc.collect()
    gc.disable()
    try:
        descriptor_counts = []
        for _ in range(3):
            group = comm.dup()
            group.all_reduce(np.ones(3))
            group.barrier()
            group.close()
            del group
            descriptor_counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert descriptor_counts == descriptor_counts[:1] * 3
