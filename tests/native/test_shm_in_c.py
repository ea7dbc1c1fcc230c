"""``shm`` with its collectives in C: right at every length, and beside ranks without the core."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from collective import native
from collective.backends.shm.layout import SLOT_BYTES
from collective.communicator import Communicator
from collective.errors import CollectiveError
from collective.memory.dtypes import BY_NAME
from collective.request import Request
from collective.testing import run_ranks
from tests.support.on_ranks import on_ranks, ranks_of

pytest.importorskip("collective.native._core", reason="the native core is not built")

# Elements of float32 around where a call takes another way, and some blocks of pieces.
_LIMITS = (16, 24 << 10, 64 << 10, SLOT_BYTES)
# Bytes of what only moves, up to which it is staged.
_LONGEST = 4 << 20
COUNTS = [nbytes // 4 + more for nbytes in _LIMITS for more in (-1, 0, 1)] + [0, 1, 7, 300_003]


pool = ranks_of(("shm", 2), ("shm", 3))


def _wanted(name: str, inputs: list[Any], rank: int, root: int) -> Any:
    """Return what a rank gets of the ranks' inputs, of which all folds are exact."""
    size, total = len(inputs), sum(inputs)
    if name in ("all_reduce", "reduce"):
        return total
    if name == "broadcast":
        return inputs[root]
    if name in ("all_gather", "gather"):
        return np.concatenate(inputs)
    if name == "reduce_scatter":
        return np.array_split(total, size)[rank]
    if name == "scatter":
        return np.array_split(inputs[root], size)[rank]
    if name == "all_to_all":
        return np.concatenate([np.array_split(each, size)[rank] for each in inputs])
    return sum(inputs[: rank + 1])


_ROOTED = ("broadcast", "gather", "reduce", "scatter")
_NAMES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter",
    "all_to_all", "scan",
)  # fmt: skip


def _calls(comm: Communicator, name: str, where: str) -> list[str]:
    """Make calls of all lengths; return which are wrong.

    Args:
        where: the inputs, in ordinary or symmetric memory, or one rank's in the other.
    """
    wrong = []
    memory = comm.empty(max(COUNTS), "float32")
    results = comm.empty(comm.size * max(COUNTS), "float32")
    symmetric = where == "symmetric" or (where == "mixed" and comm.rank == 0)
    for count in COUNTS:
        root = count % comm.size if name in _ROOTED else 0
        numbers = np.arange(count, dtype=np.float32) % 97
        inputs = [numbers + rank for rank in range(comm.size)]
        x = inputs[comm.rank]
        if symmetric:
            memory[:count] = x
            x = memory[:count]
        options = {"root": root} if name in _ROOTED else {}
        found = getattr(comm, name)(x, **options)
        wanted = _wanted(name, inputs, comm.rank, root)
        wrong += [f"{count}"] * (found is not None and found.tobytes() != wanted.tobytes())
        if where == "symmetric" and name in ("all_gather", "all_to_all", "reduce_scatter"):
            out = results[: wanted.size]
            getattr(comm, name)(x, out=out)
            wrong += [f"{count} to symmetric memory"] * (out.tobytes() != wanted.tobytes())
        if name in ("all_reduce", "broadcast", "scan"):
            getattr(comm, name)(x, out=x, **options)
            wrong += [f"{count} in place"] * (x.tobytes() != wanted.tobytes())
    return wrong


@pytest.mark.parametrize("where", ["ordinary", "symmetric", "mixed"])
@pytest.mark.parametrize("name", _NAMES)
@on_ranks("pool")
def test_every_call_at_every_length(comm: Communicator, name: str, where: str) -> None:
    assert _calls(comm, name, where) == []


@on_ranks("pool")
def test_pieces_of_different_lengths(comm: Communicator) -> None:
    wrong = []
    for count in COUNTS:
        lengths = [count * rank // comm.size for rank in range(comm.size)]
        inputs = [np.full(length, rank, np.int16) for rank, length in enumerate(lengths)]
        found = comm.all_gather(inputs[comm.rank])
        wrong += [f"all_gather of {count}"] * (found.tolist() != np.concatenate(inputs).tolist())
        # Every rank cuts the other way round than the next.
        cut = lengths if comm.rank % 2 else lengths[::-1]
        sent = np.repeat(np.arange(comm.size, dtype=np.int16), cut)
        found = comm.all_to_all(sent, counts=cut)
        total = sum(
            (lengths if rank % 2 else lengths[::-1])[comm.rank] for rank in range(comm.size)
        )
        wrong += [f"all_to_all of {count}"] * (found.tolist() != [comm.rank] * total)
    assert wrong == []


@pytest.mark.parametrize("without", [(), (0,), (1,)], ids=["all", "not the first", "not another"])
@on_ranks("pool")
def test_ranks_take_python_together_if_one_lacks_the_core(
    comm: Communicator, without: tuple[int, ...]
) -> None:
    native.switch(comm.rank not in without)
    group = comm.dup()  # which finds out anew what its ranks have
    native.switch(True)
    assert (group.transport._compiled is not None) == (not without)  # type: ignore[attr-defined]
    assert _calls(group, "all_reduce", "ordinary") == []


@on_ranks("pool")
def test_more_ranks_than_cores_gather_in_c_as_others_do(comm: Communicator) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        group: Any = comm.dup()
    finally:
        os.sched_setaffinity(0, cores)
    x = np.arange(_LONGEST // 4 // comm.size, dtype=np.float32) + comm.rank
    elements = [x.size] * comm.size
    request = Request("gather", BY_NAME["float32"], x.shape, root=1, elements=elements)
    assert group.transport._control.crowded
    assert type(group.transport.plan(request)) is native.chosen.extension.Plan
    found = group.gather(x, root=1)
    whole = np.concatenate([x - comm.rank + rank for rank in range(comm.size)])
    assert found is None if comm.rank != 1 else found.tobytes() == whole.tobytes()


@on_ranks("pool")
def test_a_late_peers_last_call_is_told_after_many(comm: Communicator) -> None:
    """There are more kinds of calls than are noted, and one of the first again, too late."""
    for count in [*range(1, 100), 1]:
        comm.all_reduce(np.ones(count, np.float32))
    if comm.rank != 1:
        with pytest.raises(CollectiveError, match=r"all_reduce\(float32\[1\], op=sum\)"):
            comm.all_reduce(np.ones(2, np.float32), timeout=0.2)


@on_ranks("pool")
def test_a_switch_after_connecting_does_not_part_the_ranks(comm: Communicator) -> None:
    native.switch(comm.rank != 1)
    found = comm.all_reduce(np.ones(300_000))
    native.switch(True)
    assert found[-1] == comm.size


def _move_a_large_one(comm: Communicator) -> bool:
    """Broadcast and send what is written around the caches, to an odd address."""
    inputs = np.resize(np.arange(251, dtype=np.uint8), (48 << 20) + 5)
    moved = np.zeros(inputs.size + 1, np.uint8)[1:]
    comm.broadcast(inputs if comm.rank == 0 else None, root=0, out=moved if comm.rank else None)
    received = np.zeros_like(inputs)
    if comm.rank == 0:
        comm.recv(received, 1)
        return np.array_equal(received, inputs)
    comm.send(moved, 0)
    return np.array_equal(moved, inputs)


def test_what_no_cache_holds_is_moved_whole() -> None:
    assert run_ranks(2, _move_a_large_one, backend="shm") == [True, True]
