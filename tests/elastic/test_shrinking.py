"""``shrink()`` and ``agree()``, beyond the public suite: arguments, settings, leftovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective.backends.peers.channel import Channel
from collective.communicator import Communicator
from collective.contract.world import World
from collective.errors import (
    CommunicatorClosedError,
    InvalidArgumentError,
    PeerLostError,
    RankError,
    RendezvousError,
    UnsupportedError,
)
from collective.start.stores import FileStore, MemoryStore
from collective.testing import RanksFailedError, run_ranks
from collective.testing.survivors import await_files
from tests.support.interpreter import run_python
from tests.support.selection import in_whole

FAR_S = 30.0


def alone(store: Any = None, **settings: Any) -> Communicator:
    world = World(0, 1, 0, 1, "here", "none", "job", store or MemoryStore())
    return collective.connect(world, "threads", **settings)


def on_threads(
    size: int, program: Callable[[Communicator], Any], store: Any = None,
    hosts: str = "", **settings: Any,
) -> list[Any]:  # fmt: skip
    """Run ``program`` on ranks that are threads and meet in ``store``; return results and errors.

    Use it for tests of ``shrink``, ``grow`` and ``agree`` that need a store or hosts of their own.
    """
    rendezvous = MemoryStore() if store is None else store
    hosts = hosts or "a" * size

    def run(rank: int) -> Any:
        local = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
        world = World(rank, size, *local, hosts[rank], "none", "job", rendezvous)
        try:
            with collective.connect(world, "threads", timeout=FAR_S, **settings) as comm:
                return program(comm)
        except collective.CollectiveError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"exclude": [0]}, RankError),
        ({"exclude": [1]}, RankError),
        ({"min_ranks": 0}, InvalidArgumentError),
        ({"min_ranks": True}, InvalidArgumentError),
        ({"timeout": -1}, InvalidArgumentError),
    ],
    ids=str,
)
def test_shrink_with_bad_argument_leaves_communicator_usable(
    arguments: dict[str, Any], kind: type
) -> None:
    with alone() as comm:
        with pytest.raises(kind):
            comm.shrink(**arguments)
        assert comm.all_reduce(np.ones(1))[0] == 1


def test_shrink_of_closed_communicator_raises_closed_error() -> None:
    comm = alone()
    comm.close()
    for call in (comm.shrink, comm.membership.agree):
        with pytest.raises(CommunicatorClosedError):
            call()


def test_shrink_of_communicator_without_origin_raises_unsupported() -> None:
    with alone() as comm:
        communicator = Communicator(
            comm.inner.transport, local_rank=0, local_size=1, host="here", timeout=FAR_S
        )
        with pytest.raises(UnsupportedError, match=r"Use collective\.init\(\)"):
            communicator.shrink()


def test_shrink_respects_min_ranks_setting() -> None:
    def program(comm: Communicator) -> Any:
        return comm.shrink() if comm.rank else None  # rank 0 leaves

    errors = on_threads(3, program, min_ranks=3)[1:]
    assert [type(error) for error in errors] == [PeerLostError] * 2


def test_shrink_respects_grace_setting() -> None:
    released = threading.Event()

    def program(comm: Communicator) -> Any:
        if comm.rank == 1:
            released.wait(FAR_S)
            return None
        with comm.shrink() as new:
            released.set()
            return new.size

    assert on_threads(2, program, shrink_grace=0.01)[0] == 1


def test_shrink_renumbers_local_ranks() -> None:
    def program(comm: Communicator) -> Any:
        if comm.rank == 0:
            return None
        with comm.shrink() as new:
            return new.local_rank, new.local_size

    assert on_threads(4, program, hosts="abab")[1:] == [(0, 2), (0, 1), (1, 2)]


def test_shrink_of_two_communicators_in_one_store_does_not_mix() -> None:
    def program(comm: Communicator) -> Any:
        with comm.shrink() as new:
            return new.membership.origin

    store = MemoryStore()
    for _ in range(2):
        assert on_threads(2, program, store) == [(0, 1)] * 2


def test_shrink_without_store_raises_rendezvous_error(tmp_path: Path) -> None:
    together = threading.Barrier(2)
    store = FileStore(tmp_path / "store")

    def program(comm: Communicator) -> Any:
        together.wait(FAR_S)
        shutil.rmtree(store.directory, ignore_errors=True)
        together.wait(FAR_S)
        comm.shrink()

    errors = on_threads(2, program, store)
    assert [type(error) for error in errors] == [RendezvousError] * 2
    assert "COLLECTIVE_STORE" in str(errors[0])


def test_shrink_reports_new_group_to_listener() -> None:
    groups = []

    class Listening(collective.communicator.listener.Listener):  # type: ignore[name-defined]
        def group(self, child: Any, ranks: Any) -> None:
            groups.append((child.size, list(ranks)))

    with alone() as comm:
        comm.inner.listen(Listening())
        comm.shrink().close()
    assert groups == [(1, [0])]


def _meet(comm: Communicator) -> None:
    """Wait until all ranks have the communicator."""
    # The rank that leaves the barrier first may shrink, which aborts the barrier of the other.
    with contextlib.suppress(collective.CommunicatorAbortedError):
        comm.barrier()


def _many(comm: Communicator) -> list[tuple[int, int]]:
    """Return the numbers of descriptors and threads, generation after generation."""
    counts = []
    _meet(comm)
    for _ in range(8):
        comm = comm.shrink()
        _meet(comm)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    comm.close()
    return counts


@pytest.mark.parametrize("backend", ["shm", "tcp", in_whole("gloo")])
def test_shrink_leaves_no_descriptors_or_threads(backend: str) -> None:
    if backend == "gloo":
        pytest.importorskip("torch")
    for counts in run_ranks(2, _many, backend=backend, timeout=FAR_S):
        for series in zip(*counts, strict=True):
            # Threads of the previous generation may take a moment to end; a leak would add up.
            assert min(series[4:]) <= max(series[:4]), counts


def _loses_one_that_was_to_connect(comm: Communicator, marks: str) -> Any:
    """Shrink; rank 1 dies after it has published its address, and before it connects."""
    from collective.backends.gloo.engine import AddressStore

    with contextlib.suppress(collective.CommunicatorAbortedError):
        comm.barrier()
    rank, offer, read = comm.rank, AddressStore.set, AddressStore.get

    def offer_and_die(self: AddressStore, key: str, value: Any) -> None:
        # Of two ranks the rank with the greater port connects, so both others wait for rank 1.
        address = bytearray(bytes(value))
        port = 8 + int.from_bytes(address[:8], "little") + 8 + 2
        address[port : port + 2] = b"\xff\xff"
        offer(self, key, bytes(address))
        await_files(*(Path(marks, str(other)) for other in (0, 2)))
        os.kill(os.getpid(), signal.SIGKILL)

    def read_and_mark(self: AddressStore, key: str) -> bytes:
        address = read(self, key)
        if key.endswith("/2"):  # the last address; the rank connects after it
            Path(marks, str(rank)).touch()
        return address

    if rank == 1:
        AddressStore.set = offer_and_die  # type: ignore[method-assign]
    else:
        AddressStore.get = read_and_mark  # type: ignore[method-assign]
    with comm.shrink() as new:
        total = float(new.all_reduce(np.full(1, 2.0**rank))[0])
        # If a thread still waited for the dead rank, a second thread would have taken its work.
        waiting = [thread.name for thread in threading.enumerate() if "gloo-wait" in thread.name]
        return new.membership.origin, new.membership.generation, total, len(waiting)


def test_gloo_shrink_does_not_wait_for_rank_dead_before_connecting(tmp_path: Path) -> None:
    """Check also that the survivors do not exclude a rank that the dead rank has delayed."""
    pytest.importorskip("torch")
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(3, _loses_one_that_was_to_connect, str(tmp_path), backend="gloo", timeout=FAR_S)
    assert caught.value.results == dict.fromkeys((0, 2), ((0, 2), 2, 5.0, 1))


@pytest.mark.parametrize(("backend", "last"), [("tcp", "connected"), in_whole("gloo", "proved")])
def test_shrink_before_peer_knows_that_all_are_connected_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, last: str
) -> None:
    """The other rank's ``init()`` then returns a communicator that is already aborted."""
    if backend == "gloo":
        pytest.importorskip("torch")
    hear = Channel._hear

    def hear_late(channel: Channel, message: Any) -> None:
        if channel.rank == 0 or message.get("name") != last:
            hear(channel, message)

    monkeypatch.setattr(Channel, "_hear", hear_late)

    def rank(number: int) -> Any:
        world = World(number, 2, number, 2, "here", "none", "job", FileStore(tmp_path))
        with collective.connect(world, backend, timeout=FAR_S) as comm:
            if number == 1:
                with pytest.raises(collective.CommunicatorAbortedError, match="call shrink"):
                    comm.barrier()
            monkeypatch.setattr(Channel, "_hear", hear)
            with comm.shrink() as new:
                return new.membership.generation, float(new.all_reduce(np.ones(1))[0])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [(1, 2.0)] * 2


def test_shrink_makes_next_generation_current(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import collective
        first = collective.init()
        if first.rank == 0:
            first.close()
        else:
            second = collective.shrink()
            assert collective.current() is second
            assert second is not first
            print("rank", collective.rank(), "of", collective.size())
    """)
    )
    done = run_python(
        "-m", "collective", "run", "-n", "3", "--backend", "threads", program, timeout=2 * FAR_S
    )
    assert sorted(done.stdout.splitlines()) == ["[1] rank 0 of 2", "[2] rank 1 of 2"], done.stderr
