"""A scatter is one call where ranks can tell from their ``out`` what it is, and right elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import CollectiveError, ShapeError
from tests.support.on_ranks import on_ranks, ranks_of

pool = ranks_of(("shm", 2), ("shm", 3), ("threads", 3), ("gloo", 2))


def _inputs(rows: int, strided: bool) -> Any:
    whole = np.arange(rows * 4, dtype=np.int64).reshape(rows, 4)
    return np.repeat(whole, 2, axis=1)[:, ::2] if strided else whole


@pytest.mark.parametrize("outs", ["all", "none", "odd"])
@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("rows", [6, 7, 2, 0, 12_000])
@on_ranks("pool")
def test_each_rank_gets_its_piece(comm: Communicator, rows: int, strided: bool, outs: str) -> None:
    """From each root in turn.

    Args:
        rows: of the root's array.
        strided: whether it is, so that the root goes Python's way.
        outs: which ranks say where their piece goes.
    """
    for root in range(comm.size):
        whole = _inputs(rows, strided)
        wanted = np.array_split(whole, comm.size)[comm.rank]
        given = outs == "all" or (outs == "odd" and comm.rank % 2 == 1)
        out = np.full(wanted.shape, -1) if given else None
        found = comm.scatter(whole if comm.rank == root else None, root=root, out=out)
        assert found.tolist() == wanted.tolist(), f"root {root}"
        assert out is None or found is out


@on_ranks("pool")
def test_an_out_that_does_not_fit_is_its_own_ranks_error(comm: Communicator) -> None:
    whole, length = np.arange(12.0), 12 // comm.size
    if comm.rank == 1:
        out = np.full(length + 1, -1.0)  # too long for its piece
        with pytest.raises(ShapeError):
            comm.scatter(None, out=out)
        assert (out == -1.0).all()
    else:
        out = np.empty(length)
        comm.scatter(whole if comm.rank == 0 else None, out=out)
        assert out.tolist() == np.array_split(whole, comm.size)[comm.rank].tolist()
    comm.barrier()


@on_ranks("pool")
def test_two_roots_are_a_mismatch(comm: Communicator) -> None:
    if comm.capabilities.checks_calls:  # others compare nothing by themselves
        with pytest.raises(CollectiveError, match="different calls"):
            comm.dup().scatter(np.ones(6), root=comm.rank, timeout=5.0)
