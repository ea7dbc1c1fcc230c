"""Arrays that have more elements than MPI counts in one call."""

from __future__ import annotations

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.testing import RankPool
from tests.support.mpi_launches import by_vendor, launch_of

pytestmark = pytest.mark.whole

_HUGE = 2**31 + 11


def _huge(comm: Communicator) -> list[int]:
    x = np.zeros(_HUGE, np.uint8)
    if comm.rank == 0:
        x[[0, 2**31 - 1, 2**31, -1]] = 1, 2, 3, 4
    comm.broadcast(x, root=0, out=x, timeout=90.0)
    return [int(value) for value in x[[0, 1, 2**31 - 1, 2**31, -1]]]


def _available() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) << 10


@pytest.mark.skipif(_available() < 8 << 30, reason="needs 8 GiB of free memory")
@by_vendor
def test_broadcast_of_more_than_2_to_the_31_elements_succeeds(vendor: str) -> None:
    with RankPool(2, "mpi", timeout=100.0, mpiexec=launch_of(vendor)) as pool:
        assert pool.run(_huge) == [[1, 0, 2, 3, 4]] * 2
