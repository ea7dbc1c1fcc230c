"""``shm`` with collectives in C: correct at every length, and with ranks without the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective import native
from collective.backends.shm.layout import LINE, SLOT_BYTES
from collective.communicator import Communicator
from collective.errors import CollectiveError
from collective.testing import run_ranks
from tests.support.huge_pages import in_huge_pages, lies_in_huge_pages, needs_huge_pages
from tests.support.on_ranks import on_ranks, ranks_of

pytest.importorskip("collective.native._core", reason="the native core is not built")

# Bytes at which a call changes its method. COUNTS has float32 elements around these limits, and a
# length of several blocks of pieces.
_LIMITS = (16, 24 << 10, 64 << 10, SLOT_BYTES)
_POSTED = 40  # as in collective/native/shared.h
COUNTS = [nbytes // 4 + more for nbytes in _LIMITS for more in (-1, 0, 1)] + [0, 1, 7, 300_003]


pool = ranks_of(("shm", 2), ("shm", 3))


def _wanted(name: str, inputs: list[Any], rank: int, root: int) -> Any:
    """Return the result of a rank for the given inputs, whose sums are exact."""
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
        return np.concatenate(
            [np.array_split(inputs_of_rank, size)[rank] for inputs_of_rank in inputs]
        )
    return sum(inputs[: rank + 1])


_ROOTED = ("broadcast", "gather", "reduce", "scatter")
_NAMES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter",
    "all_to_all", "scan",
)  # fmt: skip


def _calls(comm: Communicator, name: str, where: str) -> list[str]:
    """Make calls of all lengths; return the wrong ones.

    Args:
        where: memory of the inputs: "ordinary", "symmetric", or "mixed" (rank 0 symmetric).
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
        result = getattr(comm, name)(x, **options)
        expected = _wanted(name, inputs, comm.rank, root)
        wrong += [f"{count}"] * (result is not None and result.tobytes() != expected.tobytes())
        if where == "symmetric" and name in ("all_gather", "all_to_all", "reduce_scatter"):
            out = results[: expected.size]
            getattr(comm, name)(x, out=out)
            wrong += [f"{count} to symmetric memory"] * (out.tobytes() != expected.tobytes())
        if name in ("all_reduce", "broadcast", "scan"):
            getattr(comm, name)(x, out=x, **options)
            wrong += [f"{count} in place"] * (x.tobytes() != expected.tobytes())
    return wrong


@pytest.mark.parametrize("where", ["ordinary", "symmetric", "mixed"])
@pytest.mark.parametrize("name", _NAMES)
@on_ranks("pool")
def test_calls_of_every_length_are_correct(comm: Communicator, name: str, where: str) -> None:
    assert _calls(comm, name, where) == []


@on_ranks("pool")
def test_pieces_of_different_lengths_are_moved(comm: Communicator) -> None:
    wrong = []
    for count in COUNTS:
        lengths = [count * rank // comm.size for rank in range(comm.size)]
        inputs = [np.full(length, rank, np.int16) for rank, length in enumerate(lengths)]
        result = comm.all_gather(inputs[comm.rank])
        wrong += [f"all_gather of {count}"] * (result.tolist() != np.concatenate(inputs).tolist())
        # Odd and even ranks cut in opposite order.
        cut = lengths if comm.rank % 2 else lengths[::-1]
        sent = np.repeat(np.arange(comm.size, dtype=np.int16), cut)
        result = comm.all_to_all(sent, counts=cut)
        total = sum(
            (lengths if rank % 2 else lengths[::-1])[comm.rank] for rank in range(comm.size)
        )
        wrong += [f"all_to_all of {count}"] * (result.tolist() != [comm.rank] * total)
    assert wrong == []


@pytest.mark.parametrize(
    "without", [(), (0,), (1,)], ids=["all", "all but rank 0", "all but rank 1"]
)
@on_ranks("pool")
def test_rank_without_core_makes_all_use_python(
    comm: Communicator, without: tuple[int, ...]
) -> None:
    native.switch(comm.rank not in without)
    group = comm.dup()  # the new group checks which ranks have the core
    native.switch(True)
    assert (group.inner.transport._compiled is not None) == (not without)  # type: ignore[attr-defined]
    assert _calls(group, "all_reduce", "ordinary") == []


@needs_huge_pages
@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "broadcast", "gather", "scatter"])
@on_ranks("pool")
def test_kernel_copies_inputs_in_huge_pages(comm: Communicator, name: str) -> None:
    x = in_huge_pages(4 << 20).view(np.float32)[: (4 << 18) - 5]
    numbers = np.arange(x.size, dtype=np.float32)
    inputs = [numbers + rank for rank in range(comm.size)]
    x[:] = inputs[comm.rank]
    options = {"root": 1} if name in _ROOTED else {}
    control: Any = comm.inner.transport._control  # type: ignore[attr-defined]
    posted = control.words[(1 + comm.rank) * LINE + _POSTED]
    for _ in range(2):
        result = getattr(comm, name)(x, **options)
    expected = _wanted(name, inputs, comm.rank, 1)
    assert result is None if name == "gather" and comm.rank != 1 else (result == expected).all()
    huge = comm.all_reduce(np.array([lies_in_huge_pages(x)]), op="min")
    # No block has been staged.
    assert not huge[0] or control.words[(1 + comm.rank) * LINE + _POSTED] == posted


@on_ranks("pool")
def test_timeout_names_last_call_after_many_calls(comm: Communicator) -> None:
    """Make more kinds of calls than are remembered; the last call repeats one of the first."""
    for count in [*range(1, 100), 1]:
        comm.all_reduce(np.ones(count, np.float32))
    if comm.rank != 1:
        with pytest.raises(CollectiveError, match=r"all_reduce\(float32\[1\], op=sum\)"):
            comm.all_reduce(np.ones(2, np.float32), timeout=0.2)


@on_ranks("pool")
def test_native_switch_after_connecting_keeps_ranks_consistent(comm: Communicator) -> None:
    native.switch(comm.rank != 1)
    total = comm.all_reduce(np.ones(300_000))
    native.switch(True)
    assert total[-1] == comm.size


def _move_a_large_one(comm: Communicator) -> bool:
    """Broadcast and send data so large that stores bypass the caches, to an odd address."""
    inputs = np.resize(np.arange(251, dtype=np.uint8), (48 << 20) + 5)
    moved = np.zeros(inputs.size + 1, np.uint8)[1:]
    comm.broadcast(inputs if comm.rank == 0 else None, root=0, out=moved if comm.rank else None)
    received = np.zeros_like(inputs)
    if comm.rank == 0:
        comm.recv(received, 1)
        return np.array_equal(received, inputs)
    comm.send(moved, 0)
    return np.array_equal(moved, inputs)


def test_data_larger_than_caches_is_moved_completely() -> None:
    assert run_ranks(2, _move_a_large_one, backend="shm") == [True, True]
