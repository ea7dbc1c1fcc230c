"""What the ``tcp`` transport promises of many ranks, and of ranks that wait."""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np
import pytest

from collective.testing import run_ranks
from tests.backends.tcp.test_conformance import Without

pytestmark = pytest.mark.whole

# Measured on two cores: 0.5 to 0.9 s, of which the processors work for 1 s in all.
CONNECTED_S = 5.0


def _connect_group(comm: Any) -> float:
    comm.barrier()
    since = time.monotonic()
    with comm.dup():
        return time.monotonic() - since


def test_32_ranks_connect_all_to_all_in_time() -> None:
    seconds = run_ranks(32, _connect_group, backend="tcp", timeout=120.0)
    assert max(seconds) < CONNECTED_S


def _used_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _wait_for_rank_0(comm: Any, operation: str) -> float:
    x = np.ones(1)
    comm.all_reduce(x)
    comm.barrier()
    if comm.rank == 0:
        time.sleep(2.0)
        if operation == "recv":
            comm.send(x, 1)
        else:
            comm.all_reduce(x)
        return 0.0
    used, since = _used_s(), time.monotonic()
    if operation == "recv":
        comm.recv(x, 0)
    else:
        comm.all_reduce(x)
    return (_used_s() - used) / (time.monotonic() - since)


@pytest.mark.parametrize("operation", ["recv", "all_reduce"])
@pytest.mark.parametrize("backend", ["tcp", Without], ids=["core", "python"])
def test_waiting_rank_uses_less_than_a_hundredth_of_a_processor(
    backend: Any, operation: str
) -> None:
    share = run_ranks(2, _wait_for_rank_0, operation, backend=backend, timeout=60.0)[1]
    assert share < 0.01
