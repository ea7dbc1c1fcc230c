"""The choice of tests that ``make test`` and ``make quick`` run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, run
from tests.support.selection import SLOW

_EXAMPLE = """
import pytest
from collective.testing import parametrize_with_checks
from tests.support.selection import in_quick, in_whole

@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@pytest.mark.parametrize("transport, core", [("shm", "c"), ("shm", "off"), in_whole("gloo", "off")])
def test_product(transport, core, dtype): ...

def test_single(): ...

CHECKS = ["check_barrier", "check_gather"]

@parametrize_with_checks("threads", sizes=(2, 3), checks=CHECKS)
def test_threads(check): ...

@parametrize_with_checks("threads", sizes=(2,), checks=CHECKS)
def test_others(check): ...

@pytest.mark.whole
@parametrize_with_checks("threads", sizes=(4,), checks=CHECKS)
def test_threads_of_4(check): ...

@pytest.mark.parametrize("transport", [in_quick("shm"), "threads", in_whole("gloo")])
def test_transport(transport): ...
"""

_PROGRAM = "import pytest\npytestmark = [pytest.mark.whole]\nraise SystemExit('imported')\n"


def cases(folder: Path, option: str) -> dict[str, list[str]]:
    """Return the cases of each test of the example that a run with ``option`` selects."""
    (folder / "test_example.py").write_text(_EXAMPLE)
    (folder / "test_program.py").write_text(_PROGRAM)
    options = ["-p", "tests.conftest", option, "--collect-only", "--quiet", "-c", "/dev/null"]
    shown = run(sys.executable, "-m", "pytest", *options, "--rootdir", folder, cwd=folder).stdout
    selected: dict[str, list[str]] = {}
    for name, case in re.findall(r"::(\w+)(?:\[(.*)\])?$", shown, re.MULTILINE):
        selected.setdefault(name, []).append(case)
    return selected


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the cases of each test of the example that --once chooses."""
    return cases(tmp_path_factory.mktemp("example"), "--once")


def test_each_value_of_a_parameter_is_chosen_once(chosen: dict[str, list[str]]) -> None:
    assert chosen["test_product"] == [
        "shm-c-int8",
        "shm-c-int16",
        "shm-c-int32",
        "shm-off-int8",
    ]
    assert len(chosen["test_single"]) == 1


def test_each_case_of_a_check_is_chosen_with_one_number_of_ranks(
    chosen: dict[str, list[str]],
) -> None:
    assert chosen["test_threads"] == [
        f"threads-3-check_{check}[root={root}]"
        for check in ("gather", "barrier")
        for root in range(3)
    ]


def test_each_check_is_chosen_for_each_test(chosen: dict[str, list[str]]) -> None:
    assert chosen["test_others"] == [
        "threads-2-check_gather[root=0]",
        "threads-2-check_barrier[root=0]",
    ]


def test_tests_and_cases_that_are_marked_whole_are_omitted(chosen: dict[str, list[str]]) -> None:
    assert "test_threads_of_4" not in chosen
    assert chosen["test_transport"] == ["shm", "threads"]


def test_file_that_is_marked_whole_is_not_imported(chosen: dict[str, list[str]]) -> None:
    assert chosen  # The import of the file would have ended the run.


def test_quick_runs_what_is_marked_quick(tmp_path: Path) -> None:
    assert cases(tmp_path, "--quick") == {"test_transport": ["shm"]}


def test_list_names_files() -> None:
    files = {
        name: ROOT / "tests" / f"{Path(name).parent}/test_{Path(name).name}.py" for name in SLOW
    }
    assert [name for name, file in files.items() if not file.exists()] == []
