"""Messages over shm, where memory can be read across and where it cannot."""

from __future__ import annotations

import numpy as np
import pytest
from shm_ranks import messages, shm  # noqa: F401

from collective.errors import DtypeError, ShapeError


def outstanding(comm) -> None:
    peer = 1 - comm.rank
    arrays = [np.full(20_000 if k % 3 else 7, k + comm.rank, np.int64) for k in range(100)]
    works = [comm.send(a, peer, tag=k % 5, async_op=True) for k, a in enumerate(arrays)]
    for tag in range(5):
        for k in range(tag, 100, 5):
            got = comm.recv(None, peer, tag=tag)
            assert got.shape == arrays[k].shape, k
            assert (got == k + peer).all(), k
    for work in works:
        work.wait()
    comm.barrier()


def refused_messages(comm) -> None:
    x = np.arange(6.0)
    if comm.rank == 0:
        for _ in range(3):
            comm.send(x, 1)
        return
    out = np.full(5, -1.0)
    with pytest.raises(ShapeError, match="recv"):
        comm.recv(out, 0)
    with pytest.raises(DtypeError, match="recv"):
        comm.recv(np.zeros(6, np.float32), 0)
    assert (out == -1).all()
    assert (comm.recv(np.zeros(6), 0) == x).all()


def structures(comm) -> None:
    peer = 1 - comm.rank
    tree = {"b": [np.arange(3.0) + comm.rank], "a": np.full((200, 300), comm.rank)}
    got = comm.sendrecv(tree, peer, peer)
    assert (got["a"] == peer).all()
    assert (got["b"][0] == np.arange(3.0) + peer).all()
    assert comm.sendrecv(np.float64(comm.rank), peer, peer).shape == ()


PAIRS = (outstanding, refused_messages, structures)


@pytest.mark.parametrize("program", PAIRS, ids=lambda program: program.__name__)
def test_messages(shm, program):  # noqa: F811
    shm(2, program)


@pytest.mark.parametrize("program", PAIRS, ids=lambda program: program.__name__)
def test_messages_without_reading_peers_memory(messages, program):  # noqa: F811
    messages(2, program)
