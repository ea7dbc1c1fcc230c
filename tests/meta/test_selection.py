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
@pytest.mark.parametrize("transport, library", [("mpi", "mpich"), ("mpi", "openmpi")])
def test_product(transport, library, dtype): ...

def test_single(): ...

CHECKS = ["check_barrier", "check_gather"]

@parametrize_with_checks("threads", sizes=(2,), checks=CHECKS)
def test_threads(check): ...

@parametrize_with_checks("gloo", sizes=(2,), checks=CHECKS)
def test_gloo(check): ...
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
        "mpi-mpich-int8",
        "mpi-mpich-int16",
        "mpi-mpich-int32",
        "mpi-openmpi-int8",
    ]
    assert len(chosen["test_single"]) == 1


def test_each_case_of_a_check_is_chosen_over_one_transport(chosen: dict[str, list[str]]) -> None:
    assert chosen["test_threads"] == [
        f"threads-2-check_{case}"
        for case in ("gather[root=0]", "gather[root=1]", "barrier[root=0]", "barrier[root=1]")
    ]


def test_each_check_is_chosen_over_each_transport(chosen: dict[str, list[str]]) -> None:
    assert chosen["test_gloo"] == ["gloo-2-check_gather[root=0]", "gloo-2-check_barrier[root=0]"]


def test_lists_name_files() -> None:
    names = {*QUICK, *OMITTED, *SLOW}
    files = {
        name: ROOT / "tests" / f"{Path(name).parent}/test_{Path(name).name}.py" for name in names
    }
    assert [name for name, file in files.items() if not file.exists()] == []


def test_quick_tests_are_in_make_test() -> None:
    assert set(QUICK) & set(OMITTED) == set()
