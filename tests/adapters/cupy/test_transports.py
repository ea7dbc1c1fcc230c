"""CuPy arrays over the transports: staged through host memory, over MPI and over NCCL."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.testing import RankPool, parametrize_with_checks
from tests.fakes import Fake, FakeArray, compiler
from tests.support.fake_gpu import gpu
from tests.support.mpi_launches import launch_of, needs

cupy = pytest.importorskip("cupy")

from tests.support.fake_cupy import Mpi, Nccl, Shm, over, pretend, values_of  # noqa: E402

pytestmark = pytest.mark.whole

__all__ = ["gpu"]  # a fixture

Check = Callable[[], None]
Run = Callable[..., Any]

_LAUNCH = launch_of("mpich")
# Checks of results, of their memory and of their layouts.
_CHECKS = (
    "check_async", "check_empty", "check_moves_of_layouts", "check_reductions_of_layouts",
    "check_repeated", "check_send_recv", "check_structures",
)  # fmt: skip

with_checks = functools.partial(parametrize_with_checks, sizes=(2,), kind="cupy", checks=_CHECKS)
needs_compiler = pytest.mark.skipif(compiler() is None, reason="the ABI fake needs a C compiler")


@functools.cache
def _mpi_has_cupy() -> bool:
    """Return whether CuPy is installed in the environment of MPICH."""
    return not subprocess.run([_LAUNCH.python, "-c", "import cupy"], capture_output=True).returncode


def _with_mpi(check: Check) -> None:
    if not _mpi_has_cupy():
        pytest.skip("no CuPy in .mpi/mpich; `make test` brings it")
    check()


@needs_compiler
@with_checks(Shm)
def test_shm_conforms_with_cupy_arrays(check: Check) -> None:
    check()


@needs_compiler
@with_checks(Nccl)
def test_nccl_conforms_with_cupy_arrays(check: Check) -> None:
    check()


@needs("mpich")
@needs_compiler
@with_checks(Mpi, mpiexec=_LAUNCH)
def test_mpi_conforms_with_cupy_arrays(check: Check) -> None:
    _with_mpi(check)


# -- streams ----------------------------------------------------------------------------------


@pytest.fixture(params=["threads", Shm, Nccl], ids=str)
def run(request: pytest.FixtureRequest, gpu: Fake) -> Iterator[Run]:
    with contextlib.ExitStack() as opened:
        if request.param == "threads":
            pretend(opened.enter_context(pytest.MonkeyPatch.context()).setattr)
        yield opened.enter_context(RankPool(2, request.param, timeout=30.0)).run


def _late(comm: Communicator) -> None:
    rank = comm.rank
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    with cupy.cuda.Device(rank), Fake().turned("delay_us", 20_000):
        stream = Fake().stream(rank)
        with cupy.cuda.ExternalStream(stream, rank):
            total = comm.all_reduce(over(FakeArray.of(values + 100 * rank, rank, stream)))
            assert isinstance(total, cupy.ndarray), type(total)
            assert total.data.device_id == rank
            np.testing.assert_array_equal(values_of(total), 2 * values + 100)


def test_all_reduce_waits_for_work_on_current_cupy_stream(run: Run) -> None:
    run(_late)
