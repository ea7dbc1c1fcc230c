"""Marks of the pytest plugin: which tests run on ranks, on how many, and over what."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.interpreter import printed
from tests.testing.conftest import Run

pytest_plugins = "pytester"


def test_ranks_runs_the_test_on_that_many_ranks(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(3)
        def test_sum(comm):
            assert comm.all_reduce(1) == 3
    """)
    result.assert_outcomes(passed=1)


def test_ranks_that_are_processes_differ_from_pytests_own(ranked: Run) -> None:
    result = ranked("""
        PID = os.getpid()

        @pytest.mark.ranks(2)
        def test_pids(comm):
            assert len({PID, *comm.all_gather_object(os.getpid())}) == 3
    """)
    result.assert_outcomes(passed=1)


def test_list_of_numbers_runs_the_test_once_for_each(ranked: Run) -> None:
    result = ranked(
        """
        @pytest.mark.ranks([1, 3])
        def test_size(comm, request):
            assert request.node.name == f"test_size[ranks={comm.size}]"
        """
    )
    result.assert_outcomes(passed=2)


def test_ranks_combine_with_parameters(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.parametrize("x", [1, 2, 3])
        @pytest.mark.ranks([1, 2])
        def test_product(comm, x):
            assert comm.all_reduce(x) == x * comm.size
    """)
    result.assert_outcomes(passed=6)


def test_mark_of_a_class_counts_for_its_methods(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.ranks(2)
        class TestIt:
            def test_size(self, comm):
                assert comm.size == 2

            @pytest.mark.ranks(1)
            def test_alone(self, comm):
                assert comm.size == 1
    """)
    result.assert_outcomes(passed=2)


def test_tests_of_unittest_run_on_ranks(ranked: Run) -> None:
    result = ranked("""
        import unittest

        @pytest.mark.ranks(2)
        class TestIt(unittest.TestCase):
            def test_sum(self):
                self.assertEqual(collective.all_reduce(1), 2)
    """)
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("ranks([1, 2])", "several numbers of ranks"),
        ("ranks(2, transport='threads')", "TestCase cannot run on ranks that are threads"),
    ],
)
def test_tests_of_unittest_refuse_what_they_cannot(
    ranked: Run,
    mark: str,
    words: str,
) -> None:
    result = ranked(f"""
        import unittest

        @pytest.mark.{mark}
        class TestIt(unittest.TestCase):
            def test_it(self):
                pass
    """)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(f"*{words}*")


@pytest.mark.parametrize(
    "mark", ["ranks()", "ranks(0)", "ranks([])", "ranks('2')", "ranks(2, timeout=0)", "ranks(2, 3)"]
)
def test_wrong_mark_is_an_error_that_shows_a_right_one(ranked: Run, mark: str) -> None:
    result = ranked(f"""
        @pytest.mark.{mark}
        def test_it(comm):
            pass
    """)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*the mark ranks is wrong*Write ranks(numbers*")
    result.stdout.no_fnmatch_line("*_ranks()*")


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        pytest.param("mpi", "*RankPool(2, 'mpi')*", id="needs mpiexec"),
        pytest.param(
            "carrier-pigeon", "*BackendNotFoundError*carrier-pigeon*", id="does not exist"
        ),
    ],
)
def test_transport_that_cannot_be_used_is_an_error(ranked: Run, transport: str, words: str) -> None:
    result = ranked(f"""
        @pytest.mark.ranks(2, transport="{transport}")
        def test_it(comm):
            pass
    """)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(words)


@pytest.mark.parametrize("transport", ["threads", "tcp"])
def test_transport_of_the_mark_connects_the_ranks(ranked: Run, transport: str) -> None:
    result = ranked(f"""
        @pytest.mark.ranks(2, transport="{transport}")
        def test_it(comm):
            assert (comm.backend, comm.all_reduce(1)) == ("{transport}", 2)
    """)
    result.assert_outcomes(passed=1)


def test_marks_are_registered(ranked: Run) -> None:
    result = ranked(
        """
        @pytest.mark.ranks(2)
        @pytest.mark.parallel
        @pytest.mark.mpi
        def test_it():
            pass
        """,
        "--strict-markers",
        "--collect-only",
    )
    assert result.ret == 0


# -- marks of other plugins ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "ids"),
    [
        ("parallel", {"test_it: 3"}),
        ("parallel(2)", {"test_it: 2"}),
        ("parallel(nprocs=[1, 2])", {"test_it[nprocs=1]: 1", "test_it[nprocs=2]: 2"}),
        ("mpi(ranks=2, timeout=1, unit='m')", {"test_it: 2"}),
    ],
)
def test_mark_of_another_plugin_is_read(
    ranked: Run,
    pytester: pytest.Pytester,
    mark: str,
    ids: set[str],
) -> None:
    result = ranked(f"""
        @pytest.mark.{mark}
        def test_it(request):
            comm = collective.current()
            assert comm.all_reduce(1) == comm.size
            if comm.rank == 0:
                with open("ids", "a") as file:
                    print(request.node.name, comm.size, sep=": ", file=file)
    """)
    result.assert_outcomes(passed=len(ids))
    assert set((pytester.path / "ids").read_text().splitlines()) == ids


def test_mpi_ranks_is_the_parameter_that_the_other_plugin_gives(ranked: Run) -> None:
    result = ranked("""
        @pytest.mark.mpi(ranks=[1, 2])
        def test_it(mpi_ranks, request):
            assert collective.current().size == mpi_ranks
            assert request.node.name == f"test_it[{mpi_ranks}]"
    """)
    result.assert_outcomes(passed=2)


def test_mark_mpi_without_ranks_is_ignored(ranked: Run) -> None:
    result = ranked("""
        PID = os.getpid()

        @pytest.mark.mpi(min_size=1)
        def test_it():
            assert os.getpid() == PID
    """)
    result.assert_outcomes(passed=1)


@pytest.fixture
def other_plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a plugin with the mark ``parallel``."""
    folder = pytester.mkdir("other")
    (folder / "pytest_mpi.py").write_text(
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'parallel: of mine')\n"
    )
    monkeypatch.syspath_prepend(folder)


@pytest.mark.usefixtures("other_plugin")
def test_mark_is_left_to_its_own_plugin(ranked: Run) -> None:
    result = ranked(
        """
        PID = os.getpid()

        @pytest.mark.parallel
        def test_it():
            assert os.getpid() == PID
        """,
        "-p",
        "pytest_mpi",
    )
    result.assert_outcomes(passed=1)


@pytest.mark.usefixtures("other_plugin")
def test_marks_of_two_active_plugins_are_refused(ranked: Run) -> None:
    result = ranked(
        """
        @pytest.mark.parallel
        @pytest.mark.ranks(2)
        def test_it(comm):
            pass
        """,
        "-p",
        "pytest_mpi",
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*has the marks ranks and parallel*-p no:NAME*")


# -- runs without marks -----------------------------------------------------------------------


def test_run_without_marks_does_not_import_collective(
    pytester: pytest.Pytester, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    pytester.makepyfile(
        """
        import sys

        def test_it(request):
            assert request.config.pluginmanager.get_plugin("collective_pytest")
            assert "collective" not in sys.modules
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_plugin_alone_imports_no_package_but_pytest(site: Path) -> None:
    program = (
        "import pytest, sys; before = set(sys.modules); import collective_pytest; "
        "print(sorted(set(sys.modules) - before))"
    )
    assert printed("-c", program, PYTHONPATH=str(site)) == "['collective_pytest']\n"


def test_import_of_collective_imports_no_pytest() -> None:
    program = "import collective.testing, sys; print('pytest' in sys.modules)"
    assert printed("-c", program) == "False\n"


def test_fixture_of_ranks_in_an_unmarked_test_names_the_mark(ranked: Run) -> None:
    result = ranked("""
        def test_it(comm):
            pass
    """)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines("*Mark this test with @pytest.mark.ranks(2)*")
