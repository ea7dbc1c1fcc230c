"""The choice of tests that ``make test`` and ``make quick`` run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, run
from tests.support.selection import OMITTED, QUICK, SLOW

_EXAMPLE = """
import pytest
from collective.testing import parametrize_with_checks

@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
@pytest.mark.parametrize("transport, core", [("shm", "c"), ("shm", "off"), ("gloo", "off")])
def test_product(transport, core, dtype): ...

def test_single(): ...

CHECKS = ["check_barrier", "check_gather"]

@parametrize_with_checks("threads", sizes=(2, 3), checks=CHECKS)
def test_threads(check): ...

@parametrize_with_checks("threads", sizes=(2,), checks=CHECKS)
def test_others(check): ...

@parametrize_with_checks("threads", sizes=(4,), checks=CHECKS)
def test_threads_of_4_pass_suite(check): ...
"""


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the cases of each test of the example that --once chooses."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "test_example.py").write_text(_EXAMPLE)
    options = ["-p", "tests.conftest", "--once", "--collect-only", "--quiet", "-c", "/dev/null"]
    shown = run(sys.executable, "-m", "pytest", *options, "--rootdir", folder, cwd=folder).stdout
    cases: dict[str, list[str]] = {}
    for name, case in re.findall(r"::(\w+)(?:\[(.*)\])?$", shown, re.MULTILINE):
        cases.setdefault(name, []).append(case)
    return cases


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


def test_suites_with_further_numbers_of_ranks_are_omitted(chosen: dict[str, list[str]]) -> None:
    assert "test_threads_of_4_pass_suite" not in chosen


def test_lists_name_files() -> None:
    names = {*QUICK, *OMITTED, *SLOW}
    files = {
        name: ROOT / "tests" / f"{Path(name).parent}/test_{Path(name).name}.py" for name in names
    }
    assert [name for name, file in files.items() if not file.exists()] == []


def test_quick_tests_are_in_make_test() -> None:
    assert set(QUICK) & set(OMITTED) == set()
