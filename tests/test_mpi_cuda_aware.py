from __future__ import annotations

from collections.abc import Callable

from cuda_aware import CudaAware

from collective.testing import parametrize_with_checks
from tests.mpi_launches import launch_of, needs

Check = Callable[[], None]

@needs("mpich")
@parametrize_with_checks(CudaAware, sizes=(2,), mpiexec=launch_of("mpich"))
def test_mpich(check: Check) -> None:
    check()


@needs("openmpi")
@parametrize_with_checks(CudaAware, sizes=(2,), mpiexec=launch_of("openmpi"))
def test_openmpi(check: Check) -> None:
    check()
