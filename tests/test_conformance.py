"""Every transport of this repository passes the public suite."""

from __future__ import annotations

from collections.abc import Callable

from collective.testing import parametrize_with_checks
from tests.loopback import Loopback, Rendezvous

# One rank sends nothing, which one transport shows for all; what default algorithms do with more
# ranks than three is shown by test_algorithms.py.
ALONE, SIZES, DEFAULTS = (1,), (2, 3, 4), (2, 3)
# More ranks than cores: what depends on the number of ranks and not on the kind of array.
PART = (
    "check_all_gather",
    "check_all_reduce_in_place",
    "check_all_reduce_large",
    "check_all_to_all",
    "check_any_source",
    "check_async",
    "check_barrier",
    "check_dup",
    "check_empty",
    "check_groups_side_by_side",
    "check_killed_in_the_middle",
    "check_mismatch",
    "check_order_rank",
    "check_reduce_large",
    "check_reduce_scatter_counts",
    "check_repeated",
    "check_scan",
    "check_sendrecv",
    "check_split",
    "check_tags",
    "check_user_op_order",
)

Check = Callable[[], None]


@parametrize_with_checks("threads", sizes=ALONE + SIZES)
def test_threads(check: Check) -> None:
    check()


@parametrize_with_checks("threads", sizes=(8,), checks=PART)
def test_threads_of_8(check: Check) -> None:
    check()


@parametrize_with_checks("shm", sizes=SIZES)
def test_shm(check: Check) -> None:
    check()


@parametrize_with_checks("shm", sizes=(8,), checks=PART)
def test_shm_of_8(check: Check) -> None:
    check()


@parametrize_with_checks(Loopback, sizes=DEFAULTS)
def test_loopback(check: Check) -> None:
    check()


@parametrize_with_checks(Loopback, sizes=(8,), checks=PART)
def test_loopback_of_8(check: Check) -> None:
    check()


@parametrize_with_checks(Rendezvous, sizes=(2, 3), checks=PART)
def test_sends_that_wait(check: Check) -> None:
    check()
