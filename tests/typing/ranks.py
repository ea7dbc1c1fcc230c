"""Types of what a function returns on the ranks of a test, as type checkers must see them."""

from typing import assert_type

from collective import Communicator
from collective.testing import RankPool, run_ranks


def total(comm: Communicator, count: int) -> int:
    return comm.all_reduce(count)


def results_have_the_function_s_type() -> None:
    assert_type(run_ranks(2, total, 3), list[int])
    with RankPool(2) as pool:
        assert_type(pool.run(total, 3), list[int])
        assert_type(pool.run(total, 3, timeout=5.0), list[int])


def arguments_may_have_keywords() -> None:
    assert_type(run_ranks(2, total, count=3), list[int])
    assert_type(run_ranks(2, total, 3, backend="shm", timeout=5.0), list[int])
    assert_type(run_ranks(2, lambda comm: comm.rank), list[int])
