"""The public conformance suite on the ``mpi`` transport, with the libraries of two vendors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collective.testing import all_checks, parametrize_with_checks
from tests.support.conformance_parts import BY_PLACE, OF_TWO, SHRINKING, all_but
from tests.support.mpi_launches import launch_of, needs

Check = Callable[[], None]

# MPICH cannot interrupt a thread in a blocking operation whose peer has died, so a watchdog ends
# the process; test_failures.py tests that. It is chance whether a rank that is killed after some
# milliseconds dies in the middle of an operation, so the check cannot be an expected failure
# either. Open MPI runs with --with-ft ulfm here, so its operation returns an error.
_ENDS_PROCESSES = "check_killed_in_the_middle"
_MPICH = [name for name in all_checks() if name != _ENDS_PROCESSES]


@needs("mpich")
@parametrize_with_checks("mpi", sizes=(3,), checks=_MPICH, mpiexec=launch_of("mpich"))
def test_mpich_passes_suite(check: Check) -> None:
    check()


@pytest.mark.whole
@needs("mpich")
@parametrize_with_checks("mpi", sizes=(2,), checks=OF_TWO, mpiexec=launch_of("mpich"))
def test_mpich_of_2_passes_suite(check: Check) -> None:
    check()


# Our own code is the same with both libraries; only the libraries' code depends on the number of
# ranks. The checks that kill a rank need a new start of all ranks; the test of four ranks runs
# these checks.
@pytest.mark.whole
@needs("openmpi")
@parametrize_with_checks(
    "mpi",
    sizes=(2,),
    checks=all_but(*SHRINKING, *(name for name in all_checks() if "check_killed" in name)),
    mpiexec=launch_of("openmpi"),
)
def test_openmpi_passes_suite(check: Check) -> None:
    check()


# Each death needs a new start of all ranks. test_failures.py tests two deaths at once, and the
# death of rank 0.
_DEATHS = ("check_shrink", "check_shrink_when")


@pytest.mark.whole
@needs("openmpi")
@parametrize_with_checks(
    "mpi",
    sizes=(3,),
    checks=[name for name in SHRINKING if name not in _DEATHS],
    mpiexec=launch_of("openmpi"),
)
def test_openmpi_passes_shrink_checks(check: Check) -> None:
    check()


@pytest.mark.whole
@needs("openmpi")
@parametrize_with_checks(
    "mpi", sizes=(4,), checks=[*BY_PLACE, _ENDS_PROCESSES], mpiexec=launch_of("openmpi")
)
def test_openmpi_of_4_passes_suite(check: Check) -> None:
    check()
