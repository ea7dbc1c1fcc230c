"""The shm transport among real processes: life, death, memory, groups, waiting."""

from __future__ import annotations

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
from transport_ranks import shm  # noqa: F401

import collective
from collective.backends.shm.segment import Segment
from collective.contract.world import World
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
from collective.start.file_store import FileStore
from collective.testing import RanksFailedError
from collective.testing.checks_shrink import await_files, gather

PROMISED_S = 2.0


def _mapped() -> int:
    """Bytes of shared segments that this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:collective" in line:
            start, stop = line.split()[0].split("-")
            total += int(stop, 16) - int(start, 16)
    return total


def _left() -> tuple[list[str], list[str], int]:
    """What a communicator could leave behind in this process."""
    gc.collect()
    descriptors = sorted(
        link
        for entry in os.scandir("/proc/self/fd")
        if "collective" in (link := os.readlink(entry.path) if entry.is_symlink() else "")
    )
    threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("collective"))
    return descriptors, threads, _mapped()


# -- death -------------------------------------------------------------------------------


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
    control = comm._backend._control
    while control.segment.alive(0):
        time.sleep(0.01)
    with pytest.raises(PeerLostError) as caught:
        comm._backend.peers.fetch(0, addresses[0], x)
    return str(caught.value), caught.value.ranks


def test_the_first_to_die_is_named_also_when_who_noticed_is_gone(shm, tmp_path):  # noqa: F811
    with pytest.raises(RanksFailedError) as caught:
        shm(3, reads_of_a_survivor_that_left, str(tmp_path))
    text, lost = caught.value.results[2]
    assert re.search(r"rank 1 \(pid \d+\) has died", text)
    assert lost == (1,)


def killed_before_a_group(comm, marks: str) -> str:
    gather(comm, marks)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while comm._backend._control.segment.alive(1):
        time.sleep(0.01)
    try:
        comm.dup()
    except CommunicatorAbortedError as error:
        return str(error)
    return "nothing was noticed"


def test_a_peer_that_died_before_a_group_was_made_is_noticed(shm, tmp_path):  # noqa: F811
    with pytest.raises(RanksFailedError) as caught:
        shm(3, killed_before_a_group, str(tmp_path))
    for rank in (0, 2):
        assert "has died" in caught.value.results[rank]


def stays_away_from_a_group(comm) -> str:
    if comm.rank == 1:
        time.sleep(0.6)
        return ""
    comm.timeout = 0.2
    with pytest.raises(CollectiveTimeoutError, match="rank 1") as caught:
        comm.group([0, 1])
    return str(caught.value.ranks)


def test_a_member_that_does_not_come_to_a_group_is_named(shm):  # noqa: F811
    assert shm(2, stays_away_from_a_group) == ["(1,)", ""]


# -- failure -------------------------------------------------------------------------------


def raises(comm, text: str) -> str:
    if comm.rank == 0:
        try:
            with comm:
                raise ValueError(text)
        except ValueError:
            return ""
    with pytest.raises(PeerFailedError) as caught:
        comm.barrier()
    assert caught.value.rank == 0
    return caught.value.traceback


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
def test_any_text_of_a_failure_reaches_the_peers(shm, text, expected):  # noqa: F811
    assert expected in shm(2, raises, text)[1]


def late(comm, marks: str) -> str:
    """Rank 1 comes when the others have given up, each telling its own story."""
    if comm.rank == 1:
        await_files(Path(marks, "0"), Path(marks, "2"))
    try:
        with comm:
            comm.barrier(timeout=0.3 if comm.rank == 0 else 5.0)
    except (CollectiveTimeoutError, CommunicatorAbortedError) as error:
        Path(marks, str(comm.rank)).touch()
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


def test_the_late_rank_hears_that_it_was_late(shm, tmp_path):  # noqa: F811
    first, second, third = shm(3, late, str(tmp_path))
    assert first.startswith("CollectiveTimeoutError")
    assert third.startswith("CollectiveTimeoutError")
    assert second.startswith("CommunicatorAbortedError")
    assert "waited 0.3 s for rank 1" in second


# -- what is left --------------------------------------------------------------------------


def leaves_nothing(comm) -> list:
    comm.all_reduce(np.ones(3))
    before = _left()
    with comm.dup() as other:
        work = [other.all_reduce(np.ones(100_000), async_op=True) for _ in range(3)]
        peer = (comm.rank + 1) % comm.size
        work.append(other.send(np.ones(5), peer, async_op=True))
        other.recv(None, (comm.rank - 1) % comm.size)
        for w in work:
            w.wait()
        other.empty(1000)
        assert _left()[0] != before[0], "the test is void: a group shows no descriptor"
    del other, work, w
    return [before, _left()]


def segments() -> list[str]:
    """Return the files of ours that shared memory is in; MPI's of tests beside this come and go."""
    return sorted(name for name in os.listdir("/dev/shm") if "collective" in name)


def test_a_closed_communicator_leaves_no_descriptor_thread_or_mapping(shm):  # noqa: F811
    listing = segments()
    for before, after in shm(2, leaves_nothing):
        assert after[0] == before[0], "descriptors"
        assert after[1] == before[1], "threads"
        assert after[2] == before[2], "mapped bytes"
    assert segments() == listing


def dropped_groups(comm) -> list[int]:
    counts = []
    for _ in range(3):
        for _ in range(5):
            comm.dup().barrier()
        gc.collect()
        counts.append(len(_left()[0]))
        comm.barrier()
    return counts


def test_groups_that_were_dropped_unclosed_leave_no_descriptor(shm):  # noqa: F811
    for counts in shm(2, dropped_groups):
        assert counts == counts[:1] * 3


def test_segments_are_private():
    segment = Segment.create(8192)
    status = os.stat(segment.path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    segment.close_descriptor()
    assert not os.path.exists(segment.path)


def test_a_path_that_now_leads_to_another_file_is_not_opened(tmp_path):
    with open(tmp_path / "precious", "w+b") as file:
        file.write(b"x" * 8192)
        file.flush()
        with pytest.raises(OSError, match="no longer a segment"):
            Segment.open(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def dropped_arrays(comm) -> list[int]:
    gc.collect()
    count = 1 << 20
    start = _mapped()
    sizes = []
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
        sizes.append(_mapped() - start + len(comm._backend._heap._by_number))
    return sizes


def test_symmetric_memory_goes_with_its_last_array(shm):  # noqa: F811
    names = ("nothing", "in_place", "out_of_place", "broadcast", "view", "send")
    for sizes in shm(2, dropped_arrays):
        assert dict(zip(names, sizes)) == dict.fromkeys(names, 0)


def connects_again(comm, directory: str) -> int:
    total = 0
    for step in range(20):
        store = FileStore(directory)
        world = World(comm.rank, comm.size, comm.rank, comm.size, "h", "none", "job", store)
        with collective.connect(world, "shm", start_timeout=10) as other:
            total += int(other.all_reduce(np.array([step]))[0])
    return total


def test_twenty_communicators_one_after_the_other_over_one_store(shm, tmp_path):  # noqa: F811
    directory = tmp_path / "store"
    assert shm(2, connects_again, str(directory)) == [2 * sum(range(20))] * 2
    assert os.listdir(directory) == []


# -- groups --------------------------------------------------------------------------------


def waits_for_a_third(comm, directory: str) -> str:
    if comm.rank == 1:
        time.sleep(0.3)  # rank 0's segment is there by then, and less of the time is left
    world = World(comm.rank, 3, comm.rank, 3, "h", "none", "job", FileStore(directory))
    with pytest.raises(RendezvousError) as caught:
        collective.connect(world, "shm", start_timeout=1.0)
    return str(caught.value)


def test_ranks_that_do_not_come_are_named_with_the_whole_time(shm, tmp_path):  # noqa: F811
    directory = tmp_path / "store"
    for text in shm(2, waits_for_a_third, str(directory)):
        assert "after 1 s ranks [2] of 3 have not arrived" in text


def many_groups(comm) -> int:
    groups = [comm.dup() for _ in range(30)]
    total = sum(int(g.all_reduce(np.array([i]))[0]) for i, g in enumerate(reversed(groups)))
    for group in groups:
        group.close()
    return total


def test_many_groups_side_by_side(shm):  # noqa: F811
    assert shm(2, many_groups) == [2 * sum(range(30))] * 2


# -- notes and waiting ---------------------------------------------------------------------


def long_notes(comm) -> None:
    mine = {"rank": comm.rank, "bulk": "x" * (1_200_000 + 70_000 * comm.rank)}
    found = comm.all_gather_object(mine)
    assert [f["rank"] for f in found] == list(range(comm.size))
    assert [len(f["bulk"]) for f in found] == [1_200_000 + 70_000 * r for r in range(comm.size)]
    tree = {f"key_{k:06}": np.ones(1) for k in range(6000)}
    if comm.rank == 1:
        tree["key_005999"] = np.ones(2)
    with pytest.raises(MismatchError, match="all_reduce") as caught:
        comm.all_reduce(tree)
    assert len(str(caught.value)) > 2 * (64 << 10), "the test is void: the notes are short"
    assert comm.all_reduce(np.ones(1))[0] == comm.size


def test_notes_of_any_length(shm):  # noqa: F811
    shm(2, long_notes)


def waits(comm, how: str) -> float:
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
    return time.process_time() - before


@pytest.mark.parametrize("how", ["barrier", "recv"])
def test_waiting_for_a_second_takes_a_tenth_of_a_core(shm, how):  # noqa: F811
    assert shm(2, waits, how)[0] <= 0.1


def last_words(comm) -> str:
    if comm.rank == 0:
        comm.send(np.arange(10), 1, tag=4)
        comm.close()
        return ""
    time.sleep(0.3)
    got = comm.recv(None, 0, tag=4)
    with pytest.raises(PeerLostError, match=re.escape("rank 0 has closed its communicator")):
        comm.recv(None, 0, tag=4)
    return str(got.tolist())


def test_what_was_sent_before_a_close_still_arrives(shm):  # noqa: F811
    assert shm(2, last_words)[1] == str(list(range(10)))


def test_ranks_that_are_threads_of_one_process_are_refused(tmp_path):
    def join(rank):
        world = World(rank, 2, rank, 2, "here", "none", "job", FileStore(tmp_path / "store"))
        with pytest.raises(UnsupportedError, match=r"2 ranks in 1 processes.*backend='threads'"):
            connect(world, "shm", start_timeout=20.0)
        return rank

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(join, range(2))) == [0, 1]


def descriptors_after_closing(comm) -> list[int]:
    """Return how many descriptors there are, the collector off, after each of some groups."""
    gc.collect()
    gc.disable()
    try:
        found = []
        for _ in range(3):
            group = comm.dup()
            group.all_reduce(np.ones(3))
            group.barrier()
            group.close()
            del group
            found.append(len(os.listdir("/proc/self/fd")))
        return found
    finally:
        gc.enable()


def test_a_closed_communicator_is_freed_without_the_garbage_collector(shm):  # noqa: F811
    for found in shm(2, descriptors_after_closing):
        assert found == found[:1] * 3
