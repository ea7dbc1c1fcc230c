"""Programs of ranks with plain messages, handled by the native core or by Python.

Use :data:`PROGRAMS` in tests of a transport whose messages pass through C. Over ``shm`` C handles
all messages except exchanges in place. Over ``mpi`` C handles messages with a named sender, and
exchanges of payloads that fit into a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collective
from collective import native
from collective.communicator import Communicator, Status
from collective.errors import (
    CommunicatorClosedError,
    DtypeError,
    InvalidArgumentError,
    RankError,
    ShapeError,
)

__all__ = ["LENGTHS", "PROGRAMS", "data", "tensors", "without_python"]

# Sizes around these limits: the payload of a head, a message that leaves the sender at once, a
# message that is matched first, a ring, and a long message that the receiver fetches.
_EDGES = [896, 2 << 10, 64 << 10, 256 << 10, 3 << 20]
LENGTHS = [0, 1, *(edge + more for edge in _EDGES for more in (-1, 0, 1))]


def data(nbytes: int, rank: int) -> Any:
    """Return the bytes that a rank sends."""
    return np.random.default_rng([nbytes, rank]).integers(0, 255, nbytes, np.uint8)


def without_python(comm: Communicator) -> None:
    """Make every message that passes through Python fail."""

    def refuse(*_: Any) -> None:
        raise AssertionError("by Python")

    for name in ("send", "recv", "sendrecv"):
        setattr(comm.inner.transport, name, refuse)


def to_and_fro(comm: Communicator) -> None:
    """Send messages of all sizes to and fro, without Python."""
    group, peer, over_shm = comm.dup(), 1 - comm.rank, comm.backend == "shm"
    without_python(group)
    for tag, nbytes in enumerate(LENGTHS):
        x, out, wanted = data(nbytes, comm.rank), np.empty(nbytes, np.uint8), data(nbytes, peer)
        for _ in range(2):
            out[:] = 0
            if comm.rank:
                group.send(x, peer, tag=tag)
                assert group.recv(out, peer, tag=tag) is out
            else:
                assert group.recv(out, peer, tag=tag, timeout=30) is out
                group.send(x, peer, tag=tag)
            assert out.tobytes() == wanted.tobytes(), nbytes
        if over_shm or nbytes <= native.HEAD_ROOM:
            out[:] = 0
            into = out if over_shm else x
            assert group.sendrecv(x, peer, peer, out=into, tag=tag) is into
            assert into.tobytes() == wanted.tobytes(), nbytes
    group.close()


def beside_python(comm: Communicator) -> None:
    """Exchange messages that Python handles on one rank and C on the other."""
    peer, tree, status = 1 - comm.rank, {"a": np.arange(3.0), "b": [np.ones((300, 300))]}, Status()
    for count in (2, 500, 50_000):
        x = np.arange(2.0 * count)
        for strided_out in (comm.rank == 0, comm.rank == 1):
            out = np.zeros(2 * count)[::2] if strided_out else np.zeros(count)
            values = np.arange(4.0 * count)[::2][:count] if not strided_out else 2 * x[:count]
            comm.sendrecv(values, peer, peer, out=out)
            assert (out == 2 * x[:count]).all()
        assert (comm.sendrecv(x, peer, peer) == x).all()
        assert (comm.sendrecv(x, peer, peer, out=x) == np.arange(2.0 * count)).all()
        if comm.rank:
            comm.send(x, peer)
            assert (comm.recv(None, peer) == x).all()
        else:
            comm.recv(out := np.empty_like(x), collective.ANY_SOURCE, status=status)
            assert (out == x).all()
            assert status.source == peer
            comm.send(x, peer)
    if comm.rank:
        comm.send(tree, peer)
        comm.send(np.float32([[1, 2]]), peer)
    else:
        with pytest.raises(InvalidArgumentError):
            comm.recv(np.zeros(3), peer)
        assert comm.recv(None, peer).tolist() == [[1, 2]]
    out = np.zeros(3)
    got = comm.sendrecv(tree if comm.rank else tree["a"], peer, peer, out=None if peer else out)
    assert (out == tree["a"]).all() if comm.rank else (got["b"][0] == 1).all()


def misfits(comm: Communicator) -> None:
    """Check that a message that does not fit is dropped, as in Python, and the next arrives."""
    peer = 1 - comm.rank
    for count in (3, 400, 90_000, 1 << 20):
        x, out = np.arange(float(count)), np.zeros(count)
        with pytest.raises(ShapeError):
            comm.sendrecv(x, peer, peer, out=np.zeros(7))
        assert (comm.sendrecv(x, peer, peer, out=out) == x).all()
        if comm.rank:
            for more in range(3):
                comm.send(x + more, peer)
        else:
            for size, dtype, error in ((7, "f8", ShapeError), (count, "f4", DtypeError)):
                wrong = np.zeros(size, dtype)
                with pytest.raises(error, match="recv"):
                    comm.recv(wrong, peer)
                assert not wrong.any()
            assert (comm.recv(out, peer) == x + 2).all()


def refused(comm: Communicator) -> None:
    """Check that a recv with a refused argument leaves the message for the next recv."""
    peer, x, closed = 1 - comm.rank, np.arange(4.0), comm.dup()
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    if comm.rank:
        comm.send(x, peer)
    else:
        with pytest.raises(InvalidArgumentError):
            comm.recv(fixed, peer)
        assert (comm.recv(np.zeros(4), peer) == x).all()
    for dst in (comm.rank, 7, True, "1"):
        with pytest.raises(RankError):
            comm.send(x, dst)
    for tag in (-1, 1 << 31, 0.5, True):
        with pytest.raises(InvalidArgumentError):
            comm.recv(x, peer, tag=tag)
    with pytest.raises(InvalidArgumentError):
        comm.send(x, peer, timeout=-1)
    closed.close()
    with pytest.raises(CommunicatorClosedError):
        closed.send(x, peer)
    comm.barrier()


def tensors(comm: Communicator) -> None:
    """Exchange PyTorch tensors, without Python."""
    torch = pytest.importorskip("torch")
    group, peer = comm.dup(), 1 - comm.rank
    group.sendrecv(torch.ones(1), peer, peer)  # C handles tensors once Python has seen one.
    without_python(group)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for count in (5, 5_000, 50_000):
            x, out = torch.ones(3, count, dtype=dtype), torch.zeros(3, count, dtype=dtype)
            calls = [lambda x=x: group.send(x, peer), lambda out=out: group.recv(out, peer)]
            for call in calls if comm.rank else reversed(calls):
                call()
            assert torch.equal(x, out)
        x, out = torch.ones(3, 5, dtype=dtype), torch.zeros(3, 5, dtype=dtype)
        assert group.sendrecv(x, peer, peer, out=out) is out
        assert torch.equal(x, out)


PROGRAMS = (to_and_fro, beside_python, misfits, refused)
