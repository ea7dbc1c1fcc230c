"""Helpers shared by the tests of the ABI fake's communicators and of their failures."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest

from tests.fakes.raw import DTYPES, SUM, Nccl

__all__ = ["DIED", "FLOAT64", "INT32", "leftovers", "nccl", "number", "sums"]

FLOAT64, INT32 = DTYPES["float64"], DTYPES["int32"]
DIED = 86


@pytest.fixture
def nccl():
    """Yield the fake NCCL with a context of GPU 0; reset its knobs at the end."""
    library = Nccl()
    library.context(0)
    yield library
    for name, default in {"init_polls": 0, "init_error": 0, "remote_error_at": 0}.items():
        library.knob(name, default)
    library.knob("fault_rank", -1)
    library.knob("multi_rank_gpu", 0)
    library.knob("lazy_connect", 2)


def leftovers(pid=None):
    """Return the files of communicators whose unique id was made by this process, or by ``pid``."""
    prefix = f"fake-nccl-{pid or os.getpid()}-"
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def sums(rank, comm=None, count=10):
    """All-reduce the rank's number plus 1; return the first element of the result."""
    send, recv = rank.array(np.full(count, rank.rank + 1.0)), rank.empty(count, "f8")
    rank.call("AllReduce", send, recv, count, FLOAT64, SUM, comm=comm)
    return recv.get()[0]


def number(nccl, name, comm):
    """Return the integer that a query such as ``ncclCommCount`` gives for a communicator."""
    answer = ctypes.c_int(-1)
    nccl.call(name, comm, answer)
    return answer.value
