"""The ``mpi`` transport passes the public suite, with two vendors' libraries."""

from __future__ import annotations

from collections.abc import Callable

from collective.testing import all_checks, parametrize_with_checks
from tests.support.conformance_parts import BY_PLACE, OF_TWO, SHRINKING, all_but
from tests.support.mpi_launches import launch_of, needs

Check = Callable[[], None]

# MPICH cannot call a thread back out of a blocking operation whose peer has died; a watchdog
# ends the process, which test_failures.py holds. Whether a rank that is killed after some
# milliseconds dies in the middle of one is chance, so it cannot be an expected failure either.
# Open MPI runs with --with-ft ulfm here, which returns an error from it.
_ENDS_PROCESSES = "check_killed_in_the_middle"
_MPICH = [name for name in all_checks() if name != _ENDS_PROCESSES]


@needs("mpich")
@parametrize_with_checks("mpi", sizes=(3,), checks=_MPICH, mpiexec=launch_of("mpich"))
def test_mpich(check: Check) -> None:
    check()


@needs("mpich")
@parametrize_with_checks("mpi", sizes=(2,), checks=OF_TWO, mpiexec=launch_of("mpich"))
def test_mpich_of_2(check: Check) -> None:
    check()


# What is ours is the same with both libraries, and what depends on the number of ranks is theirs.
# A rank that is killed costs a new start of all; test_openmpi_of_4 has those.
@needs("openmpi")
@parametrize_with_checks(
    "mpi",
    sizes=(2,),
    checks=all_but(*SHRINKING, *(name for name in all_checks() if "check_killed" in name)),
    mpiexec=launch_of("openmpi"),
)
def test_openmpi(check: Check) -> None:
    check()


# Each death costs a new start of all: test_failures.py has two at once, and rank 0 first.
_DEATHS = ("check_shrink", "check_shrink_when")


@needs("openmpi")
@parametrize_with_checks(
    "mpi",
    sizes=(3,),
    checks=[name for name in SHRINKING if name not in _DEATHS],
    mpiexec=launch_of("openmpi"),
)
def test_openmpi_goes_on(check: Check) -> None:
    check()


@needs("openmpi")
@parametrize_with_checks(
    "mpi", sizes=(4,), checks=[*BY_PLACE, _ENDS_PROCESSES], mpiexec=launch_of("openmpi")
)
def test_openmpi_of_4(check: Check) -> None:
    check()
