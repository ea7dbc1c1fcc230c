"""Reports of tests on ranks: as of any test, and what pytest's options make of them."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace
from typing import Any

import pytest

from collective.testing.plugin import pytest_runtest_makereport
from tests.testing.conftest import Run

pytest_plugins = "pytester"


def test_failed_assertion_is_explained_and_names_the_rank(ranked: Run) -> None:
    result = ranked(
        """
        @pytest.mark.ranks(2)
        def test_it(comm):
            sums = {"one": 1, "rank": comm.rank}
            if comm.rank == 1:
                assert sums == {"one": 1, "rank": 0}
            comm.barrier()
        """,
        "--showlocals",
    )
    result.stdout.fnmatch_lines(
        [
            ">*assert sums == {*",
            "E*Differing items:*",
            "E*{'rank': 1} != {'rank': 0}*",
            "sums*= {'one': 1, 'rank': 1}",
            "FAILED test_it.py::test_it - rank 1: AssertionError*",
        ]
    )


def test_report_has_the_output_of_the_rank_that_failed_first(ranked: Run) -> None:
    result = ranked("""
        import logging

        @pytest.mark.ranks(2)
        def test_it(comm):
            print("printed by", comm.rank)
            logging.warning("logged by %d", comm.rank)
            os.system(f"echo echoed by {comm.rank} >&2")
            assert comm.rank != 1
            comm.barrier()
    """)
    result.stdout.fnmatch_lines(
        [
            "*Captured stdout call (rank 1)*",
            "printed by 1",
            "*Captured stderr call (rank 1)*",
            "*echoed by 1",
            "*Captured log call (rank 1)*",
            "*logged by 1",
        ]
    )
    result.stdout.no_fnmatch_line("*by 0*")


def test_report_of_a_passed_test_has_the_output_of_all_ranks(ranked: Run) -> None:
    result = ranked(
        """
        @pytest.mark.ranks(2)
        def test_it(comm):
            print("printed by", comm.rank)
        """,
        "-rP",
    )
    result.stdout.fnmatch_lines(["*(rank 0)*", "printed by 0", "*(rank 1)*", "printed by 1"])


def test_error_of_the_library_is_shown_at_the_line_of_the_test(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2)
        def test_it(comm):
            comm.all_reduce(np.ones(2 + comm.rank))
    """)
    result.stdout.fnmatch_lines([">*comm.all_reduce*", "test_it.py:7: MismatchError"])
    result.stdout.no_fnmatch_line("*path.py*")


@pytest.mark.parametrize("rank", ["comm.rank == 1", "True"])
def test_skip_on_a_rank_skips_the_test(ranked: Run, rank: str) -> None:
    result = ranked(
        f"""
        @pytest.mark.ranks(2)
        def test_it(comm):
            if {rank}:
                pytest.skip("not here")
            comm.barrier()
        """,
        "-rs",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines("SKIPPED*not here")


@pytest.mark.parametrize(
    "statement", ["pytest.importorskip('absent_module')", "pytest.mark.skipif(True, reason='x')"]
)
def test_module_that_is_skipped_starts_no_ranks(ranked: Run, statement: str) -> None:
    result = ranked(f"""
        pytestmark = [{statement}, pytest.mark.ranks(2)]

        def test_it(comm):
            assert False
    """)
    result.assert_outcomes(skipped=1)


def test_failure_counts_before_a_skip(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2)
        def test_it(comm, tmp_path):
            if comm.rank == 0:
                pytest.skip()
            assert False
    """)
    result.assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("mark", "statement", "outcome"),
    [
        ("xfail", "assert comm.rank == 0", "xfailed"),
        ("xfail(strict=True)", "assert comm.rank == 0", "xfailed"),
        ("xfail(raises=ValueError)", "if comm.rank: raise ValueError", "xfailed"),
        ("xfail(raises=ValueError)", "if comm.rank: raise KeyError", "failed"),
        ("xfail", "pass", "xpassed"),
        ("xfail(strict=True)", "pass", "failed"),
        ("usefixtures('comm')", "if comm.rank: pytest.xfail('so')", "xfailed"),
    ],
)
def test_expected_failure_of_one_rank_is_that_of_the_test(
    ranked: Run, mark: str, statement: str, outcome: str
) -> None:
    result = ranked(f"""
        @pytest.mark.{mark}
        @pytest.mark.ranks(2)
        def test_it(comm):
            {statement}
            comm.barrier()
    """)
    result.assert_outcomes(**{outcome: 1})


def test_warning_of_all_ranks_is_shown_once(ranked: Run) -> None:
    result = ranked(
        """
        import warnings

        @pytest.mark.ranks(3)
        def test_it(comm):
            warnings.warn("careful")
        """,
        "-Walways",
    )
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines("*UserWarning: careful")


def test_warning_of_a_class_inside_a_function_is_shown(ranked: Run) -> None:
    result = ranked(
        """
        import warnings

        @pytest.mark.ranks(2)
        def test_it(comm):
            class Strange(UserWarning):
                pass

            warnings.warn(Strange("careful"))
        """,
        "-Walways",
    )
    result.assert_outcomes(passed=1, warnings=1)


def test_filter_of_warnings_counts_on_ranks(ranked: Run) -> None:
    result = ranked(
        """
        import warnings

        @pytest.mark.ranks(2)
        def test_it(comm):
            warnings.warn("careful")
        """,
        "-Werror",
    )
    result.assert_outcomes(failed=1)


def test_fixtures_of_pytest_belong_to_each_rank(ranked: Run) -> None:
    result = ranked("""
        import logging

        @pytest.mark.ranks(2)
        def test_it(comm, capsys, caplog, monkeypatch):
            print(comm.rank)
            logging.warning("%d", comm.rank)
            monkeypatch.setenv("RANK_HERE", str(comm.rank))
            comm.barrier()
            assert capsys.readouterr().out == f"{comm.rank}\\n"
            assert caplog.messages == [os.environ["RANK_HERE"]] == [str(comm.rank)]
    """)
    result.assert_outcomes(passed=1)


TWO = """
    @pytest.mark.ranks(2)
    def test_bad(comm):
        assert comm.rank == 0

    @pytest.mark.ranks(2)
    def test_good(comm, record_property):
        record_property("colour", "green")
        time.sleep(0.1)
"""


def test_option_x_stops_after_the_first_failure(ranked: Run) -> None:
    ranked(TWO, "-x").assert_outcomes(failed=1)


def test_option_lf_runs_the_failed_test(ranked: Run) -> None:
    ranked(TWO)
    ranked(TWO, "--lf").assert_outcomes(failed=1)


def test_option_durations_has_the_time_of_the_slowest_rank(ranked: Run) -> None:
    result = ranked(TWO, "--durations=1")
    result.stdout.re_match_lines([r"0\.[1-9]\ds call +test_it\.py::test_good"])


def test_junit_report_has_one_case_for_each_test(ranked: Run, pytester: pytest.Pytester) -> None:
    ranked(TWO, "--junitxml=report.xml", "-ojunit_family=xunit1")
    bad, good = ElementTree.parse(pytester.path / "report.xml").iter("testcase")
    failure = bad.find("failure")
    assert failure is not None
    assert failure.attrib["message"].startswith("rank 1: ")
    assert [each.attrib for each in good.iter("property")] == [{"name": "colour", "value": "green"}]


def test_subtest_that_fails_on_a_rank_is_reported(ranked: Run) -> None:
    if not hasattr(pytest, "Subtests"):
        pytest.skip("this pytest has no subtests")
    result = ranked("""
        @pytest.mark.ranks(2)
        def test_it(comm, subtests):
            for number in range(3):
                with subtests.test(number=number):
                    assert (comm.rank, number) != (1, 2)
            comm.barrier()
    """)
    result.stdout.fnmatch_lines(["*number=*2*", "*assert (1, 2) != (1, 2)"])
    assert result.ret == 1


def test_debugger_opens_on_the_rank_that_failed_first(
    ranked: Run, pytester: pytest.Pytester
) -> None:
    ranked(
        """
        @pytest.mark.ranks(2, timeout=3)
        def test_it(comm):
            if comm.rank == 1:
                assert comm.size == 5
            comm.barrier()
        """,
        "--collect-only",
    )
    commands = b"p 'I am', comm.rank\nimport time; time.sleep(4)\np 'after', 'the timeout'\nc\n"
    result = pytester.run("python", "-m", "pytest", "--pdb", stdin=commands, timeout=60)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*('I am', 1)", "*('after', 'the timeout')"])
    result.stdout.no_fnmatch_line("*('I am', 0)*")


def test_workers_of_xdist_have_ranks_of_their_own(ranked: Run) -> None:
    result = ranked(
        """
        import warnings

        @pytest.mark.parametrize("n", range(6))
        @pytest.mark.ranks(2)
        def test_good(comm, n):
            warnings.warn("careful")
            assert comm.all_reduce(n) == 2 * n

        @pytest.mark.ranks(2)
        def test_bad(comm):
            assert comm.rank == 0

        def test_serial():
            pass
        """,
        "-n2",
        subprocess=True,
    )
    result.assert_outcomes(passed=7, failed=1, warnings=6)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed first*"])


def test_exceptions_that_are_each_others_cause_are_reported() -> None:
    one, other = ValueError("one"), TypeError("other")
    one.__cause__, other.__cause__ = other, one
    call: Any = SimpleNamespace(excinfo=SimpleNamespace(value=one))
    thread = threading.Thread(target=pytest_runtest_makereport, args=(call,), daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()
