"""The gloo transport among real processes: what it listens on, leaves behind and refuses."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.backend import COLLECTIVE_TAG
from collective.buffer import Buffer
from collective.communicator import connect
from collective.dtypes import BY_NAME
from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    ConfigError,
    MismatchError,
)
from collective.ops import as_op, premul_sum
from collective.store import FileStore
from collective.testing import RankPool
from collective.testing.samples import expected, plain, values
from collective.world import World

torch = pytest.importorskip("torch", reason="the gloo transport stands on PyTorch")

from collective.backends.gloo import GlooBackend  # noqa: E402
from collective.backends.gloo.tensors import native  # noqa: E402

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def gloo() -> Iterator[Run]:
    """Run a function on ranks that are kept for the next test: ``gloo(size, function, …)``."""
    pools: dict[int, RankPool] = {}

    def run(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if size not in pools:
            pools[size] = RankPool(size, "gloo", timeout=40.0)
        return pools[size].run(function, *args, **options)

    yield run
    for pool in pools.values():
        pool.close()


# -- where it listens ---------------------------------------------------------------------


def _listening() -> list[str]:
    """Return the addresses of the TCP sockets on which this process listens."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.islink(f"/proc/self/fd/{fd}")}  # fmt: skip
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                found.append(words[1].partition(":")[0])
    return found


def listening(comm: Any) -> tuple[list[str], list[str]]:
    comm.barrier()
    before = _listening()
    comm.dup()
    return before, _listening()


def test_on_one_host_it_listens_on_loopback_only(gloo: Run) -> None:
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    for before, after in gloo(2, listening):
        assert set(before) == {loopback}
        assert after == before, "a group listens on more"


class OverLoopback(GlooBackend):
    """Ranks that believe that they are on different hosts, with an interface configured."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        options = {"interface": "lo"}
        world = dataclasses.replace(world, local_rank=0, local_size=1, options=options)
        return super().connect(world, timeout)


def total_of_ranks(comm: Any) -> float:
    return float(comm.all_reduce(np.array([comm.rank + 1.0]))[0])


def test_the_configured_interface_is_used() -> None:
    with RankPool(2, OverLoopback, timeout=40.0) as pool:
        assert pool.run(total_of_ranks) == [3.0, 3.0]


def _world(directory: Path, rank: int = 0, size: int = 2, **changes: Any) -> World:
    return World(
        rank, size, 0, 1, "here", "none", "test", FileStore(directory), **changes
    )  # fmt: skip


def test_an_unknown_interface_is_refused_before_anything_is_connected(tmp_path: Path) -> None:
    world = _world(tmp_path / "store", options={"interface": "nonesuch0"})
    with pytest.raises(ConfigError, match=r"interface 'nonesuch0'.*\blo\b.*COLLECTIVE_INTERFACE"):
        GlooBackend.connect(world, 5.0)
    assert os.listdir(tmp_path / "store") == []


def test_an_address_of_another_host_is_refused(tmp_path: Path) -> None:
    world = _world(tmp_path / "store", address="192.0.2.1")  # RFC 5737: nobody's
    with pytest.raises(ConfigError, match=r"'192\.0\.2\.1'.*COLLECTIVE_INTERFACE"):
        GlooBackend.connect(world, 5.0)


# -- what it leaves alone, and what behind --------------------------------------------------


def beside_torch(comm: Any, directory: str) -> tuple[float, float]:
    import torch.distributed as dist

    assert not dist.is_initialized()
    path = f"{directory}/theirs"
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size
    )
    try:
        theirs = torch.full((1,), comm.rank + 1.0)
        ours = comm.all_reduce(np.array([comm.rank + 10.0]))
        dist.all_reduce(theirs)
        return float(ours[0]), float(theirs[0])
    finally:
        dist.destroy_process_group()


def test_the_programs_own_process_group_is_left_alone(gloo: Run, tmp_path: Path) -> None:
    assert gloo(2, beside_torch, str(tmp_path)) == [(21.0, 3.0)] * 2


def _left() -> tuple[int, int, list[str]]:
    gc.collect()
    sockets = [fd for fd in os.listdir("/proc/self/fd")
               if os.path.islink(f"/proc/self/fd/{fd}")
               and os.readlink(f"/proc/self/fd/{fd}").startswith("socket")]  # fmt: skip
    threads = [t.name for t in threading.enumerate() if t.name == "collective-monitor"]
    return len(os.listdir("/proc/self/task")), len(sockets), threads


def used_and_closed(comm: Any) -> tuple[Any, Any, list[str]]:
    backend = comm._backend
    world = dataclasses.replace(backend._world, job="another")
    comm.all_reduce(np.ones(1 << 20))
    comm.recv(None, 1) if comm.rank == 0 else comm.send(np.ones(1 << 18), 0)
    for _ in range(2):
        _once(world)
    before = _left()
    for _ in range(4):
        _once(world)
    # The other rank's closing ends threads here, a moment later.
    end = time.monotonic() + 20
    while (after := _left()) > before and time.monotonic() < end:
        time.sleep(0.05)
    comm.barrier()
    return before, after, os.listdir(world.store.directory)


def _once(world: World) -> None:
    other = connect(world, "gloo", timeout=20.0)
    group = other.dup().dup()
    total = group.all_reduce(np.ones(300_000))
    assert total[0] == total[-1] == other.size
    group.sendrecv(np.ones(3), (other.rank + 1) % other.size, (other.rank - 1) % other.size)
    other.close()


def test_nothing_is_left_when_a_communicator_is_closed(gloo: Run) -> None:
    for before, after, files in gloo(2, used_and_closed):
        assert after <= before, "threads, sockets, monitors"
        assert files == []


def forked(comm: Any) -> int:
    group = comm.dup()
    pid = os.fork()
    if pid == 0:
        # A process group whose threads are not there must not be waited for.
        held = group._backend
        held._groups = ()
        del group, held
        gc.collect()
        os._exit(7)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            comm.barrier()
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


def test_a_forked_child_does_not_wait_for_its_parents_threads(gloo: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads
        assert gloo(2, forked) == [7, 7]


# -- groups, threads, tags ------------------------------------------------------------------


def groups_of_groups(comm: Any) -> list[float]:
    half = comm.split(comm.rank % 2, key=-comm.rank)
    pair = half.group([1, 0])
    again = half.group([1, 0])
    x = np.array([float(comm.rank)])
    return [float(c.all_reduce(x)[0]) for c in (comm, half, pair, again, comm)] + [pair.rank]


def test_groups_of_groups(gloo: Run) -> None:
    assert gloo(4, groups_of_groups) == [
        [6.0, 2.0, 2.0, 2.0, 6.0, 0],
        [6.0, 4.0, 4.0, 4.0, 6.0, 0],
        [6.0, 2.0, 2.0, 2.0, 6.0, 1],
        [6.0, 4.0, 4.0, 4.0, 6.0, 1],
    ]


def messages_beside_collectives(comm: Any) -> int:
    other, wrong = 1 - comm.rank, []

    def talk(tag: int) -> None:
        for turn in range(20):
            x = np.full(1000 * (turn % 5) + 1, 100.0 * tag + turn)
            sent = comm.send(x, other, tag=tag, async_op=True)
            if not (comm.recv(None, other, tag=tag) == x).all():
                wrong.append((tag, turn))
            sent.wait()

    talkers = [threading.Thread(target=talk, args=(tag,)) for tag in (1, 2)]
    for thread in talkers:
        thread.start()
    for turn in range(20):
        work = comm.all_reduce(np.full(50_000, turn), async_op=True)
        if not (work.wait() == 2 * turn).all():
            wrong.append(("all_reduce", turn))
    for thread in talkers:
        thread.join(30)
    return len(wrong) + sum(thread.is_alive() for thread in talkers)


def test_threads_exchange_messages_while_collectives_run(gloo: Run) -> None:
    assert gloo(2, messages_beside_collectives) == [0, 0]


TAGS = (0, 5, 2**31 - 1, 2**31 - 2, 2**31, -2, 2**62 + 1, -(2**63), COLLECTIVE_TAG)


def all_tags(comm: Any) -> list[int]:
    backend, found = comm._backend, []
    numbers = [Buffer(np.array([n]), BY_NAME["int64"]) for n in range(len(TAGS))]
    if comm.rank == 0:
        threads = [
            threading.Thread(target=backend.send, args=(number, 1, tag, 20.0))
            for number, tag in zip(numbers, TAGS, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return []
    for tag in reversed(TAGS):
        room = Buffer.empty(1, BY_NAME["int64"])
        assert backend.recv(room, 0, tag, 20.0) == 0
        found.append(int(room.array[0]))
    return found


def test_messages_of_any_tag_do_not_meet(gloo: Run) -> None:
    assert gloo(2, all_tags)[1] == list(reversed(range(len(TAGS))))


def read_only(comm: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = np.frombuffer(np.full(400_000, comm.rank + 1.0).tobytes())
        assert not x.flags.writeable
        other = 1 - comm.rank
        got = comm.sendrecv(x, other, other)
        total = comm.all_reduce(x)
        both = comm.all_gather(x[:3])
    assert (got == other + 1.0).all()
    assert (total == 3.0).all()
    assert both.tolist() == [1.0] * 3 + [2.0] * 3
    return "ok"


def test_read_only_arrays_are_sent_without_a_warning(gloo: Run) -> None:
    assert gloo(2, read_only) == ["ok", "ok"]


# -- Gloo's own folds -----------------------------------------------------------------------

FOLDS = [
    (op, dtype)
    for dtype in ("int8", "int32", "int64", "uint8", "uint32", "uint64", "float16", "bfloat16",
                  "float32", "float64", "complex64", "complex128")
    for op in ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
    if native(op, BY_NAME[dtype]) is not None
]  # fmt: skip


def folds(comm: Any) -> list[str]:
    """Fold 3 MB of each, which goes to Gloo, and compare with NumPy."""
    wrong = []
    for op, dtype in FOLDS:
        count = 3_000_000 // BY_NAME[dtype].itemsize + 1
        short = [values(dtype, 1000, rank, 1, op) for rank in range(comm.size)]
        inputs = [np.resize(x, count) if isinstance(x, np.ndarray) else x.repeat(count // 1000)
                  for x in short]  # fmt: skip
        wanted = np.resize(expected(op, short), len(inputs[0]))
        mine = inputs[comm.rank]
        kept = plain(mine).copy()
        for root in (None, comm.size - 1):
            if root is None:
                found = comm.all_reduce(mine, op=op)
            else:
                found = comm.reduce(mine, root=root, op=op)
            if found is not None:
                got = plain(found)
                tolerance = (0.02, 0.05) if op == "avg" else (0.0, 0.0)
                close = np.allclose(got, wanted.astype(got.dtype), *tolerance)
                if not close:
                    wrong.append(f"{op} of {dtype}, root {root}")
        if not np.array_equal(plain(mine), kept):
            wrong.append(f"the input of {op} of {dtype}")
    return wrong


def test_gloos_folds_are_ours(gloo: Run) -> None:
    assert len(FOLDS) > 40
    assert gloo(3, folds, timeout=100.0) == [[], [], []]


def wrapping(comm: Any) -> list[bool]:
    count = 1 << 19
    top = np.full(count, 2**32 - 1, np.uint32)
    scaled = comm.all_reduce(np.ones(count, np.float32), op=premul_sum(comm.rank + 1.0))
    nan = np.ones(count, np.float32)
    nan[comm.rank :: 1000] = np.nan
    low = comm.all_reduce(nan, op="min")
    lost = [np.isnan(low[rank::1000]).all() for rank in range(comm.size)]
    whole = bool((comm.all_reduce(top) == np.uint32(2**32 - comm.size)).all())
    return [whole, bool((scaled == sum(range(1, comm.size + 1))).all()), *map(bool, lost)]


def test_large_folds_wrap_scale_and_keep_nan(gloo: Run) -> None:
    for rank in gloo(3, wrapping):
        assert rank == [True] * 5


def test_what_gloo_folds_differently_is_not_given_to_it() -> None:
    for op, dtype in (("max", "float32"), ("min", "bfloat16"), ("max", "uint32"),
                      ("prod", "complex64"), ("sum", "int16"), ("land", "int32"),
                      ("user", "float32")):  # fmt: skip
        assert native(op, BY_NAME[dtype]) is None, (op, dtype)
    assert native(as_op("avg").name, BY_NAME["float32"]) is not None


# -- ranks that disagree, or do not come ------------------------------------------------------


def disagree(comm: Any, mine: tuple[str, int, dict[str, Any]]) -> tuple[str, float]:
    name, count, options = mine[comm.rank]  # type: ignore[misc]
    x = np.full(count, comm.rank + 1.0)
    kept = x.copy()
    began = time.monotonic()
    try:
        getattr(comm, name)(x, **options)
    except MismatchError as error:
        assert np.array_equal(x, kept)
        return str(error), time.monotonic() - began
    return "nothing was noticed", time.monotonic() - began


@pytest.mark.parametrize(
    "calls",
    [
        [("all_reduce", 6, {}), ("all_reduce", 7, {})],
        [("all_reduce", 1 << 20, {}), ("all_reduce", (1 << 20) + 1, {})],
        [("all_reduce", 1 << 20, {"op": "sum"}), ("all_reduce", 1 << 20, {"op": "prod"})],
        [("reduce", 9, {"root": 0}), ("reduce", 9, {"root": 1})],
        [("all_reduce", 9, {}), ("scan", 9, {})],
    ],
    ids=["short", "long", "op", "root", "operation"],
)
def test_different_calls_are_noticed_within_seconds(gloo: Run, calls: Any) -> None:
    """Gloo itself would end the process, or hand out wrong numbers."""
    for text, seconds in gloo(2, disagree, calls):
        assert "different calls" in text
        assert "test_gloo.py" in text
        assert seconds < 10


def late(comm: Any) -> tuple[str, tuple[int, ...]]:
    comm.all_reduce(np.ones(2))
    if comm.rank == 2:
        time.sleep(1.0)
    try:
        comm.all_reduce(np.ones(3), timeout=0.3)
    except (CollectiveTimeoutError, CommunicatorAbortedError) as error:
        return str(error), getattr(error, "ranks", ())
    return "it went on", ()


def test_a_deadline_names_the_absent_rank_and_what_it_did_last(gloo: Run) -> None:
    told = gloo(3, late)
    for text, ranks in told[:2]:
        assert ranks == (2,)
        assert "rank 2 last did its call 1, all_reduce(float64[2]" in text
    assert "waited 0.3 s for rank 2" in told[2][0]


def any_source_aborted(comm: Any) -> tuple[str, float]:
    if comm.rank == 0:
        began = time.monotonic()
        try:
            comm.recv(None, -1)
        except CommunicatorAbortedError as error:
            return str(error), time.monotonic() - began
    time.sleep(0.3)
    comm.abort("out of patience")
    return "out of patience", 0.0


def test_a_receive_from_anybody_ends_with_the_communicator(gloo: Run) -> None:
    for text, seconds in gloo(2, any_source_aborted):
        assert "out of patience" in text
        assert seconds < 3
