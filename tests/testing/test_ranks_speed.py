"""How long tests on ranks take."""

from __future__ import annotations

import time

import pytest

from tests.testing.conftest import Run

pytest_plugins = "pytester"


@pytest.mark.whole
def test_two_hundred_tests_take_ten_seconds(ranked: Run) -> None:
    seconds = []
    for _ in range(3):  # other programs may have the cores
        begin = time.monotonic()
        result = ranked(
            """
            @pytest.mark.parametrize("n", range(200))
            @pytest.mark.ranks(2)
            def test_it(comm, n):
                assert comm.all_reduce(n) == 2 * n
            """,
            subprocess=True,
        )
        seconds.append(time.monotonic() - begin)
        result.assert_outcomes(passed=200)
        if seconds[-1] <= 10:
            return
    pytest.fail(f"200 tests took {seconds} s")


def test_tests_of_as_many_ranks_share_processes(ranked: Run, pytester: pytest.Pytester) -> None:
    result = ranked("""
        @pytest.mark.parametrize("n", range(20))
        @pytest.mark.ranks(2)
        def test_it(comm, n):
            with open(f"{comm.rank}", "a") as file:
                print(os.getpid(), file=file)
            assert n != 9 or comm.rank == 0
    """)
    result.assert_outcomes(passed=19, failed=1)
    pids = [(pytester.path / rank).read_text().split() for rank in "01"]
    assert [(len(each), len(set(each))) for each in pids] == [(20, 1), (20, 1)]
