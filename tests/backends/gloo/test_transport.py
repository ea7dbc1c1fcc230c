"""Life cycle of the gloo transport: listening, refused settings, cleanup and process exit."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from collective.backends.peers.channel import Channel
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    CommunicatorAbortedError,
    ConfigError,
    MismatchError,
    PeerFailedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.start.connecting import connect
from collective.start.stores import FileStore
from collective.testing import RankPool
from tests import warm
from tests.backends.peers.test_monitor import listening
from tests.support.interpreter import run_together
from tests.support.on_ranks import on_ranks, ranks_of

torch = pytest.importorskip("torch", reason="the gloo transport needs PyTorch")

from collective.backends.gloo import GlooBackend  # noqa: E402
from collective.backends.gloo.engine import device  # noqa: E402

two = ranks_of(("gloo", 2), timeout=40.0)

# -- errors of a wait ---------------------------------------------------------------------


class _Broken:
    """Channel that finds its communicator broken while a call waits."""

    rank, size, failure = 0, 2, None

    def wait(self, *_: Any, **__: Any) -> Any:
        return self

    def slice(self) -> float:
        return 0.01

    def check(self) -> None:
        raise MismatchError("recv: the ranks made different calls")

    def explain(self, *_: Any) -> Exception:
        return CommunicatorAbortedError("recv: broken by an earlier mismatch")


class _Silent:
    """Stand-in for a Gloo process group; its messages do not arrive before ``over`` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def recv(self, *_: Any) -> Any:
        return self

    def wait(self, timeout: timedelta) -> None:
        self.over.wait(timeout.total_seconds())


def test_long_wait_raises_mismatch_unchanged() -> None:
    world: Any = None
    broken: Any = _Broken()
    backend, group = GlooBackend(world, broken), _Silent()
    backend._group = group
    try:
        with pytest.raises(MismatchError):
            backend.recv(Buffer.empty(1 << 17, BY_NAME["uint8"]), 1, 0, Deadline(10.0))
    finally:
        group.over.set()


# -- listening addresses ------------------------------------------------------------------


@on_ranks("two")
def test_single_host_job_listens_on_loopback_only(comm: Any) -> None:
    before = listening()
    gloo = device(comm.inner.transport._world)
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert [address.partition(":")[0] for address in listening() - before] == [loopback]
    del gloo


@on_ranks("two")
def test_connected_ranks_listen_at_no_port(comm: Any) -> None:
    with comm.dup() as group:
        group.barrier()  # both ranks have connected
        assert listening() == set(), "a stranger's connections would take descriptors"


class Apart(GlooBackend):
    """Transport whose ranks take themselves for ranks of different hosts."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        world = dataclasses.replace(world, local_rank=0, local_size=1, address="127.0.0.2")
        return super().connect(world, deadline)


def total_of_ranks(comm: Any) -> float:
    return float(comm.all_reduce(np.array([comm.rank + 1.0]))[0])


def test_rank_of_several_hosts_listens_at_its_address() -> None:
    with RankPool(2, Apart, timeout=40.0) as pool:
        assert pool.run(total_of_ranks) == [3.0, 3.0]


def _world(directory: Path, rank: int = 0, size: int = 2, **changes: Any) -> World:
    return World(
        rank, size, 0, 1, "here", "none", "test", FileStore(directory), **changes
    )  # fmt: skip


def test_address_of_another_host_is_refused(tmp_path: Path) -> None:
    world = _world(tmp_path / "store", address="192.0.2.1")  # RFC 5737: reserved for documentation
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*COLLECTIVE_INTERFACE"):
        GlooBackend.connect(world, Deadline(5.0))


# -- the program's process group, and cleanup -----------------------------------------------


@on_ranks("two")
def test_process_group_of_program_stays_usable(comm: Any, tmp_path: Path) -> None:
    import torch.distributed as dist

    assert not dist.is_initialized()
    where = f"file://{tmp_path}/theirs"
    dist.init_process_group("gloo", init_method=where, rank=comm.rank, world_size=comm.size)
    try:
        tensor = torch.full((1,), comm.rank + 1.0)
        total = comm.all_reduce(np.array([comm.rank + 10.0]))
        dist.all_reduce(tensor)
        assert (total[0], tensor[0]) == (21.0, 3.0)
    finally:
        dist.destroy_process_group()


def _left() -> tuple[int, int, list[str]]:
    gc.collect()
    sockets = [fd for fd in os.listdir("/proc/self/fd")
               if os.path.islink(f"/proc/self/fd/{fd}")
               and os.readlink(f"/proc/self/fd/{fd}").startswith("socket")]  # fmt: skip
    threads = [t.name for t in threading.enumerate() if t.name == "collective-monitor"]
    return len(os.listdir("/proc/self/task")), len(sockets), threads


def _once(world: World) -> None:
    comm = connect(world, "gloo", timeout=20.0)
    group = comm.dup().dup()
    total = group.all_reduce(np.ones(300_000))
    assert total[0] == total[-1] == comm.size
    group.sendrecv(np.ones(3), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
    comm.close()


@on_ranks("two")
def test_closed_communicator_leaves_no_thread_or_socket(comm: Any, tmp_path: Path) -> None:
    backend = comm.inner.transport
    store = FileStore(tmp_path)
    world = dataclasses.replace(backend._world, job="another", store=store)
    comm.all_reduce(np.ones(1 << 20))
    comm.recv(None, 1) if comm.rank == 0 else comm.send(np.ones(1 << 18), 0)
    for _ in range(2):
        _once(world)
    before = _left()
    for _ in range(4):
        _once(world)
    # When the other rank closes, some threads of this rank end a moment later.
    end = time.monotonic() + 20
    while (after := _left()) > before and time.monotonic() < end:
        time.sleep(0.05)
    comm.barrier()
    assert after <= before, "threads, sockets or monitors remain"
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # os.fork() in a process with threads
@on_ranks("two")
def test_forked_child_does_not_wait_for_threads_of_parent(comm: Any) -> None:
    group = comm.dup()
    pid = os.fork()
    if pid == 0:
        # The child does not have the threads of the process group, so it must not wait for them.
        held = group.inner.transport
        held._group = None
        del group, held
        gc.collect()
        os._exit(7)
    end = time.monotonic() + 20
    while not (status := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.01)
    if not status[0]:
        os.kill(pid, 9)
        status = os.waitpid(pid, 0)
    comm.barrier()
    assert os.waitstatus_to_exitcode(status[1]) == 7


# -- the program exits although its process groups are still busy ------------------------------

# Two imports of PyTorch fit into this time on a busy machine. A hang would take minutes.
ENDS_S = 45

PROGRAM = """
import os, sys, threading, time
import numpy as np
import collective

rank, directory = int(sys.argv[1]), sys.argv[2]
comm = collective.init("gloo", rank=rank, size=2, store=directory, timeout=200.0)
large = np.ones(16 << 20, np.float32)

def tell(word):
    open(f"{directory}.{word}", "x").close()

def until(word):
    while not os.path.exists(f"{directory}.{word}"):
        time.sleep(0.01)

comm.barrier()
"""

ENDINGS = {
    # Program of rank 0, program of rank 1, and exit code of rank 0.
    "a peer dies in a long call": (
        """
        while True:
            comm.all_reduce(large, out=large, op="max")
        """,
        """
        threading.Timer(0.5, os._exit, (3,)).start()
        while True:
            comm.all_reduce(large, out=large, op="max")
        """,
        1,
    ),
    "pending call": (
        "comm.all_reduce(large, async_op=True)",
        "time.sleep(1)",
        0,
    ),
    "message that never arrives": (
        "comm.recv(None, 1, async_op=True); time.sleep(0.2)",
        "time.sleep(1)",
        0,
    ),
    "message from any source that never arrives": (
        "comm.recv(None, collective.ANY_SOURCE, async_op=True); time.sleep(0.2)",
        "time.sleep(1)",
        0,
    ),
    "deadline": (
        """
        try:
            comm.all_reduce(large, timeout=0.3)
        except collective.CollectiveTimeoutError:
            tell("late")
            sys.exit(5)
        """,
        "until('late')",
        5,
    ),
    "abort": (
        """
        tell("through")
        try:
            comm.recv(None, 1)
        except collective.CommunicatorAbortedError:
            sys.exit(6)
        """,
        "until('through'); time.sleep(0.3); comm.abort('enough')",
        6,
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_exits(ending: str, tmp_path: Path) -> None:
    *parts, code = ENDINGS[ending]
    # One case starts a fresh interpreter. The others start from a warm one, which is faster.
    python = sys.executable if ending == "message that never arrives" else warm.python()
    ranks = (
        ["-c", PROGRAM + textwrap.dedent(part), rank, tmp_path / "s"]
        for rank, part in enumerate(parts)
    )
    results = run_together(*ranks, python=python, timeout=ENDS_S)
    assert results[0].returncode == code, results[0].stderr
    if "dies" in ending:
        assert "PeerLostError" in results[0].stderr
        assert "rank 1" in results[0].stderr
    for result in results:
        assert "terminate called" not in result.stderr


def test_failure_while_peer_connects_is_raised_by_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = Channel._hear

    def hear_late(channel: Channel, message: Any) -> None:
        # Rank 1 receives the failure before the notice that all ranks are connected.
        if channel.rank == 0 or message.get("name") != "proved 0":
            hear(channel, message)

    def program(rank: int) -> str:
        world = World(rank, 2, rank, 2, "here", "none", "job", FileStore(tmp_path))
        comm = connect(world, "gloo", timeout=60.0)
        try:
            with comm:
                if rank == 0:
                    raise LookupError("lost the keys")
                comm.barrier()
        except (LookupError, PeerFailedError) as error:
            return type(error).__name__
        return "returned"

    monkeypatch.setattr(Channel, "_hear", hear_late)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(program, range(2))) == ["LookupError", "PeerFailedError"]
