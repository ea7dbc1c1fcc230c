"""Fixtures in tests on ranks."""

from __future__ import annotations

import importlib.util

import pytest

from tests.testing.conftest import Run

pytest_plugins = "pytester"


def _require_torch() -> None:
    """Skip the test without PyTorch, which this process must not import: see :func:`ranked`."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch")


def test_module_level_calls_use_the_communicator_of_the_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2)
        def test_it():
            assert collective.all_reduce(1) == 2
    """)
    result.assert_outcomes(passed=1)


def test_init_connects_the_ranks_of_the_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.parametrize("again", [1, 2])
        @pytest.mark.ranks(2)
        def test_it(again):
            with collective.init() as comm:
                assert comm.all_reduce(again) == 2 * again
    """)
    result.assert_outcomes(passed=2)


def test_communicator_is_closed_after_its_test(ranked: Run) -> None:
    result = ranked("""
        kept = []

        @pytest.mark.parametrize("n", [1, 2])
        @pytest.mark.ranks(2)
        def test_it(comm, n):
            assert [each.closed for each in kept] == [True] * (n - 1)
            kept.append(comm)
    """)
    result.assert_outcomes(passed=2)


def test_ranks_share_the_temporary_directory_of_their_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.parametrize("n", [1, 2])
        @pytest.mark.ranks(2)
        def test_it(comm, n, tmp_path):
            (tmp_path / str(comm.rank)).touch()
            comm.barrier()
            assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    """)
    result.assert_outcomes(passed=2)


def test_wide_fixture_is_made_once_in_each_rank(ranked: Run, pytester: pytest.Pytester) -> None:
    result = ranked("""
        def log(*words):
            with open("log", "a") as file:
                print(*words, file=file)

        @pytest.fixture(scope="module")
        def wide():
            log("begin")
            yield os.getpid()
            log("end")

        @pytest.mark.parametrize("n", range(3))
        @pytest.mark.ranks(2)
        def test_it(comm, wide, n):
            assert wide == os.getpid()
            log("test")

        def test_here(wide):
            log("here")
    """)
    result.assert_outcomes(passed=4)
    lines = (pytester.path / "log").read_text().split()
    assert lines[-3:] == ["begin", "here", "end"]
    assert sorted(lines[:-3]) == 2 * ["begin"] + 2 * ["end"] + 6 * ["test"]


def test_failing_end_of_wide_fixture_is_reported_when_pytest_stops_early(ranked: Run) -> None:
    result = ranked(
        """
        @pytest.fixture(scope="module")
        def wide():
            yield
            assert not "the end"

        @pytest.mark.ranks(2)
        def test_bad(comm, wide):
            assert comm.rank

        @pytest.mark.ranks(2)
        def test_next(comm, wide):
            pass
        """,
        "-x",
    )
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_bad*", '*assert not "the end"*'])


def test_fixtures_of_earlier_tests_here_end_before_the_next_module(
    ranked: Run, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_a="""
        import pytest

        @pytest.fixture(scope="module")
        def wide():
            yield
            open("ended", "w").close()

        def test_here(wide):
            pass

        @pytest.mark.ranks(2)
        def test_there(comm):
            pass
        """
    )
    result = ranked("""
        def test_here():
            assert os.path.exists("ended")
    """)
    result.assert_outcomes(passed=3)


def test_threads_share_fixtures(ranked: Run) -> None:
    result = ranked("""
        @pytest.fixture
        def shared():
            return []

        @pytest.mark.ranks(3, transport="threads")
        def test_it(comm, shared):
            shared.append(comm.rank)
            comm.barrier()
            assert sorted(shared) == [0, 1, 2]
    """)
    result.assert_outcomes(passed=1)


def test_fixture_that_uses_the_communicator_of_a_thread_is_refused(ranked: Run) -> None:
    result = ranked("""
        @pytest.fixture
        def model(comm):
            return comm.broadcast_object(1)

        @pytest.mark.ranks(2, transport="threads")
        def test_it(model):
            pass
    """)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*comm.broadcast_object: ranks that are threads share*'shm'*")


def test_world_of_mpi4py_has_the_ranks_of_each_test(ranked: Run) -> None:
    result = ranked(
        """
        import numpy as np

        @pytest.mark.ranks([2, 3])
        def test_it(mpi_comm):
            from mpi4py import MPI
            assert mpi_comm is MPI.COMM_WORLD
            assert mpi_comm.allgather(mpi_comm.rank) == list(range(mpi_comm.size))
            halves = mpi_comm.Split(mpi_comm.rank % 2)
            assert halves.size == len(range(mpi_comm.rank % 2, mpi_comm.size, 2))

        @pytest.mark.mpi(ranks=2)
        def test_comm(comm):
            x = np.full(3, comm.Get_rank() + 1.0)
            comm.Allreduce(x.copy(), x)
            assert x.tolist() == [3.0] * 3
        """,
        subprocess=True,
    )
    result.assert_outcomes(passed=3)


def test_torch_group_is_a_new_default_group_for_each_test(ranked: Run) -> None:
    _require_torch()
    result = ranked(
        """
        import torch
        import torch.distributed as dist

        @pytest.mark.parametrize("n", [1, 2])
        @pytest.mark.ranks(2)
        def test_it(torch_group, comm, n):
            x = torch.ones(3) * n
            dist.all_reduce(x)
            assert (x.tolist(), torch_group.size()) == ([2.0 * n] * 3, 2)
        """,
        subprocess=True,
    )
    result.assert_outcomes(passed=2)


def test_torch_group_that_fails_harms_no_other_test(ranked: Run) -> None:
    _require_torch()
    result = ranked(
        """
        import torch
        import torch.distributed as dist

        @pytest.mark.ranks(2, timeout=20)
        def test_bad(torch_group):
            assert dist.get_rank() == 0
            dist.barrier()

        @pytest.mark.ranks(2)
        def test_good(torch_group):
            dist.barrier()
        """,
        subprocess=True,
    )
    result.assert_outcomes(failed=1, passed=1)


def test_torch_group_that_a_test_leaves_open_harms_no_other_test(ranked: Run) -> None:
    _require_torch()
    result = ranked(
        """
        import collective.adapters.torch
        import torch.distributed as dist

        @pytest.mark.parametrize("n", [1, 2])
        @pytest.mark.ranks(2)
        def test_it(comm, n, tmp_path):
            dist.init_process_group(
                "collective", init_method=f"file://{tmp_path}/x", rank=comm.rank, world_size=2
            )
            dist.barrier()
        """,
        subprocess=True,
    )
    result.assert_outcomes(passed=2)


def test_torch_group_of_threads_is_refused(ranked: Run) -> None:
    _require_torch()
    result = ranked(
        """
        @pytest.mark.ranks(2, transport="threads")
        def test_it(torch_group):
            pass
        """,
        subprocess=True,
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*a process has one default group*")
