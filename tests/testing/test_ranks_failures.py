"""Tests on ranks that fail: what the report says, and that the next test passes."""

from __future__ import annotations

import select
import time
from pathlib import Path

import pytest

from collective.inner import platform
from tests.support.interpreter import ROOT, started
from tests.testing.conftest import Run

pytest_plugins = "pytester"

FAULTS = {
    "raises": ("raise ValueError('too hot')", ["*raise ValueError*", "*rank 1 of 2 failed first*"]),
    "hangs": (
        "time.sleep(99)",
        ["*rank 1 of 2: no result after 8 s*at *test_it.py:8, in test_fault: time.sleep(99)*"],
    ),
    "differs": (
        "comm.all_reduce(np.ones(3))",
        [
            "*MismatchError: *: the ranks made different calls*",
            "*rank 1: all_reduce(float64?3?, op=sum) at *test_it.py:8 in test_fault*",
        ],
    ),
    "returns": ("return", ["*PeerLostError*rank 1 has closed its communicator*"]),
    "is killed": ("os.kill(os.getpid(), 9)", ["rank 1 of 2: its process was killed by signal 9"]),
    "exits": ("sys.exit(3)", ["*sys.exit(3)*", "test_it.py:8: SystemExit"]),
    # As after init(), which replaces sys.exit.
    "exits and tells": (
        "from collective.inner import session; session.tell_at_exit(comm); sys.exit(3)",
        ["*sys.exit(3)*", "test_it.py:8: SystemExit"],
    ),
    "exits at once": ("os._exit(3)", ["rank 1 of 2: its process exited with code 3"]),
    "closes all files": ("os.closerange(3, 1000); time.sleep(99)", ["rank 1 of 2: *"]),
    "starves": (
        "comm.recv_object(0)",
        ["*CollectiveTimeoutError*"],
    ),
}
# Faults that only the deadline ends.
_WAIT = ("hangs", "closes all files", "starves")


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_rank_is_named_and_harms_no_other_test(ranked: Run, fault: str) -> None:
    statement, lines = FAULTS[fault]
    result = ranked(f"""
        @pytest.mark.ranks(2, timeout={8 if fault in _WAIT else 60})
        def test_fault(comm):
            if comm.rank == 1:
                {statement}
            comm.barrier()

        @pytest.mark.ranks(2)
        def test_next(comm):
            assert comm.all_reduce(1) == 2
    """)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(lines)


def test_line_of_each_other_rank_says_how_it_ended(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(3, timeout=60)
        def test_fault(comm):
            if comm.rank == 0:
                return
            assert comm.rank == 2
            comm.recv_object(1)
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*rank 1 of 3 failed first*", "rank 0: passed", "rank 2: PeerFailedError: *rank 1 failed*"]
    )


def test_child_that_a_test_forks_runs_no_other_test(ranked: Run, pytester: pytest.Pytester) -> None:
    result = ranked("""
        @pytest.mark.ranks(2)
        def test_fork(comm):
            child = os.fork()
            if child:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
                comm.barrier()

        @pytest.mark.ranks(2)
        def test_next(comm):
            with open(f"{comm.rank}", "a") as file:
                print(os.getpid(), file=file)
    """)
    result.assert_outcomes(passed=2)
    assert [len((pytester.path / rank).read_text().split()) for rank in "01"] == [1, 1]


def test_setup_that_fails_on_one_rank_is_an_error_of_the_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.fixture
        def half(comm):
            assert comm.rank == 0
            comm.barrier()

        @pytest.mark.ranks(2)
        def test_it(half):
            pass
    """)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ERROR at setup of test_it*", "*rank 1 of 2 failed first*"])


def test_teardown_that_fails_on_one_rank_is_an_error_of_the_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.fixture
        def half(comm):
            yield
            assert comm.rank == 0

        @pytest.mark.ranks(2)
        def test_it(half):
            pass
    """)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_it*", "*rank 1 of 2 failed first*"])


def test_thread_that_hangs_is_named_and_harms_no_other_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2, transport="threads", timeout=5)
        def test_hang(comm):
            if comm.rank == 1:
                time.sleep(99)

        @pytest.mark.ranks(2, transport="threads")
        def test_next(comm):
            assert comm.all_reduce(1) == 2
    """)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*rank 1: no result after 5 s*", "*rank 1 of 2 failed first*"])


def test_thread_that_exits_the_process_is_named_and_harms_no_other_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2, transport="threads")
        def test_exit(comm):
            os._exit(3)

        @pytest.mark.ranks(2, transport="threads")
        def test_next(comm):
            assert comm.all_reduce(1) == 2
    """)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*process exited with code 3*"])


def test_communicator_of_init_is_broken_by_a_failure_too(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2, timeout=50)
        def test_it():
            comm = collective.init()
            assert comm.rank == 0
            comm.barrier()
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed first*", "rank 0: PeerFailedError*"])


def test_exit_of_pytest_on_a_rank_ends_the_run(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2)
        def test_it(comm):
            pytest.exit("enough")

        def test_next():
            pass
    """)
    result.assert_outcomes()
    result.stdout.fnmatch_lines("*Exit: enough*")


def test_ranks_end_with_a_pytest_that_is_killed(
    ranked: Run, pytester: pytest.Pytester, site: Path
) -> None:
    ranked(
        """
        @pytest.mark.ranks(2)
        def test_it(comm):
            with open(f"{comm.rank}.pid", "w") as file:
                file.write(f"{os.getpid()}\\n")
            time.sleep(99)
        """,
        "--collect-only",
    )
    files = [pytester.path / "0.pid", pytester.path / "1.pid"]
    with started("-m", "pytest", cwd=pytester.path, PYTHONPATH=f"{site}:{ROOT}") as process:
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            assert process.poll() is None
            time.sleep(0.01)
        ranks = [platform.EndOfProcess(int(file.read_text())) for file in files]
        process.kill()
    for rank in ranks:
        assert select.select([rank.descriptor], [], [], 20)[0]
        rank.close()
