"""What the tests of the ABI fake's communicators and of their failures share."""

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
    made = Nccl()
    made.context(0)
    yield made
    for name, usual in {"init_polls": 0, "init_error": 0, "remote_error_at": 0}.items():
        made.knob(name, usual)
    made.knob("fault_rank", -1)
    made.knob("multi_rank_gpu", 0)
    made.knob("lazy_connect", 2)


def leftovers(pid=None):
    """Return the files of communicators whose unique id this process, or another, has made."""
    prefix = f"fake-nccl-{pid or os.getpid()}-"
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def sums(rank, comm=None, count=10):
    """All-reduce the rank's number, plus 1; the result's first element."""
    send, recv = rank.array(np.full(count, rank.rank + 1.0)), rank.empty(count, "f8")
    rank.call("AllReduce", send, recv, count, FLOAT64, SUM, comm=comm)
    return recv.get()[0]


def number(nccl, name, comm):
    answer = ctypes.c_int(-1)
    nccl.call(name, comm, answer)
    return answer.value
