"""A scatter is one call where ranks can tell from their ``out`` what it is, and right elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import CollectiveError, ShapeError
from collective.testing import RankPool


@pytest.fixture(
    scope="module", params=[("shm", 2), ("shm", 3), ("threads", 3), ("gloo", 2)], ids=str
)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    backend, size = request.param
    with RankPool(size, backend, timeout=60.0) as ranks:
        yield ranks


def _inputs(rows: int, strided: bool) -> Any:
    whole = np.arange(rows * 4, dtype=np.int64).reshape(rows, 4)
    return np.repeat(whole, 2, axis=1)[:, ::2] if strided else whole


def _scattered(comm: Communicator, rows: int, strided: bool, outs: str) -> list[Any]:
    """Return what is wrong, of a scatter from each root in turn.

    Args:
        rows: of the root's array.
        strided: whether it is, so that the root goes Python's way.
        outs: which ranks say where their piece goes: ``"all"``, ``"none"``, ``"odd"``.
    """
    wrong = []
    for root in range(comm.size):
        whole = _inputs(rows, strided)
        wanted = np.array_split(whole, comm.size)[comm.rank]
        given = outs == "all" or (outs == "odd" and comm.rank % 2 == 1)
        out = np.full(wanted.shape, -1) if given else None
        found = comm.scatter(whole if comm.rank == root else None, root=root, out=out)
        if found.tolist() != wanted.tolist() or (out is not None and found is not out):
            wrong.append((root, found.tolist()))
    return wrong


@pytest.mark.parametrize("outs", ["all", "none", "odd"])
@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("rows", [6, 7, 2, 0, 12_000])
def test_each_rank_gets_its_piece(pool: RankPool, rows: int, strided: bool, outs: str) -> None:
    assert pool.run(_scattered, rows, strided, outs) == [[]] * pool.size


def _misfit(comm: Communicator) -> Any:
    whole = np.arange(12.0)
    length = 12 // comm.size + (comm.rank == 1)  # too long for its piece
    out = np.full(length, -1.0)
    try:
        found = comm.scatter(whole if comm.rank == 0 else None, out=out)
    except ShapeError:
        return out.tolist()
    finally:
        comm.barrier()
    return found.tolist()


def test_an_out_that_does_not_fit_is_its_own_ranks_error(pool: RankPool) -> None:
    first, second, *_ = pool.run(_misfit)
    assert first == [*range(12 // pool.size)]
    assert second == [-1.0] * (12 // pool.size + 1)


def _two_roots(comm: Communicator) -> str:
    x = np.ones(6)
    with pytest.raises(CollectiveError) as caught:
        comm.dup().scatter(x, root=comm.rank, timeout=5.0)
    return str(caught.value)


def test_two_roots_are_a_mismatch(pool: RankPool) -> None:
    if "gloo" in str(pool.backend):
        pytest.skip("compares nothing by itself")
    assert [text for text in pool.run(_two_roots) if "different calls" not in text] == []
