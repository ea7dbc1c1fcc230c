"""Pools of ranks started by ``mpiexec``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.errors import BackendUnavailableError
from collective.testing import Mpiexec, RankDiedError, RankHungError, RankPool, RanksFailedError
from tests.support.mpi_launches import by_vendor, launch_of

pytestmark = pytest.mark.whole


def _total(comm: Communicator) -> tuple[int, int]:
    return int(comm.all_reduce(np.array([comm.rank]))[0]), os.getpid()


def _dies(comm: Communicator) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def _hangs(comm: Communicator) -> None:
    if comm.rank == 0:
        time.sleep(60)


@by_vendor
def test_pool_keeps_mpi_ranks_until_one_is_gone(vendor: str) -> None:
    with RankPool(2, "mpi", timeout=20.0, mpiexec=launch_of(vendor)) as pool:
        first = pool.run(_total)
        assert [total for total, _ in first] == [1, 1]
        assert pool.run(_total) == first
        with pytest.raises(RanksFailedError) as died:
            pool.run(_dies)
        assert isinstance(died.value.errors[1], RankDiedError)
        second = pool.run(_total)
        assert [total for total, _ in second] == [1, 1]
        assert not {pid for _, pid in first} & {pid for _, pid in second}
        with pytest.raises(RanksFailedError) as hung:
            pool.run(_hangs, timeout=1.0)
        error = hung.value.errors[0]
        assert isinstance(error, RankHungError)
        assert "in _hangs" in error.stack
        assert [total for total, _ in pool.run(_total)] == [1, 1]
        third = {pid for _, pid in pool.run(_total)}
    deadline = time.monotonic() + 10.0
    while any(_runs(pid) for pid in third):
        assert time.monotonic() < deadline, "processes outlive their pool"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_pool_without_mpiexec_recommends_installation(tmp_path: Path) -> None:
    missing = str(tmp_path / "mpiexec")
    with (
        RankPool(2, "mpi", mpiexec=Mpiexec(program=missing)) as pool,
        pytest.raises(BackendUnavailableError, match=r"pip install .*\[mpi\]"),
    ):
        pool.run(_total)


@by_vendor
def test_pool_with_broken_python_raises_unavailable_error(vendor: str, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such Python >&2\nexit 3\n")
    broken.chmod(0o755)
    launch = Mpiexec(str(broken), launch_of(vendor).command(1)[0])
    with (
        RankPool(2, "mpi", mpiexec=launch) as pool,
        pytest.raises(BackendUnavailableError, match=r"(?s)0 of 2 ranks.*no such Python"),
    ):
        pool.run(_total)
