"""``scatter`` with ``out`` on all, some or no ranks.

If every rank can derive the root's call from its ``out``, scatter is one call of the transport.
Otherwise the ranks use the root's header, with the same results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import CollectiveError, ShapeError
from tests.support.on_ranks import on_ranks, ranks_of
from tests.support.selection import in_whole

pool = ranks_of(("shm", 2), ("shm", 3), ("threads", 3), in_whole(("gloo", 2)))


def _inputs(rows: int, strided: bool) -> Any:
    array = np.arange(rows * 4, dtype=np.int64).reshape(rows, 4)
    return np.repeat(array, 2, axis=1)[:, ::2] if strided else array


@pytest.mark.parametrize("outs", ["all", "none", "odd"])
@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("rows", [6, 7, 2, 0, 12_000])
@on_ranks("pool")
def test_scatter_gives_each_rank_its_piece(
    comm: Communicator, rows: int, strided: bool, outs: str
) -> None:
    """Scatter from each root in turn.

    Args:
        rows: number of rows of the root's array.
        strided: if true, the root's array is strided, so the root takes the path in Python.
        outs: the ranks that pass ``out``.
    """
    for root in range(comm.size):
        array = _inputs(rows, strided)
        wanted = np.array_split(array, comm.size)[comm.rank]
        passes_out = outs == "all" or (outs == "odd" and comm.rank % 2 == 1)
        out = np.full(wanted.shape, -1) if passes_out else None
        piece = comm.scatter(array if comm.rank == root else None, root=root, out=out)
        assert piece.tolist() == wanted.tolist(), f"root {root}"
        assert out is None or piece is out


@on_ranks("pool")
def test_scatter_with_wrong_out_raises_on_that_rank_only(comm: Communicator) -> None:
    array, length = np.arange(12.0), 12 // comm.size
    if comm.rank == 1:
        out = np.full(length + 1, -1.0)  # too long for its piece
        with pytest.raises(ShapeError):
            comm.scatter(None, out=out)
        assert (out == -1.0).all()
    else:
        out = np.empty(length)
        comm.scatter(array if comm.rank == 0 else None, out=out)
        assert out.tolist() == np.array_split(array, comm.size)[comm.rank].tolist()
    comm.barrier()


@on_ranks("pool")
def test_scatter_with_two_roots_raises_mismatch(comm: Communicator) -> None:
    with pytest.raises(CollectiveError, match="different calls"):
        comm.dup().scatter(np.ones(6), root=comm.rank, timeout=5.0)
