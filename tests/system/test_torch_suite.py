"""The command that runs PyTorch's own tests over the backend, here a few of these tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.support.interpreter import ROOT, run_python

pytestmark = pytest.mark.whole

pytest.importorskip("torch.distributed")
pytest.importorskip("expecttest")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ROOT / "benchmarks" / "torch_suite.py"
    return run_python(command, *arguments, python=warm.python())


def test_torch_suite_passes_chosen_tests(tmp_path: Path) -> None:
    out = tmp_path / "outcomes.json"
    arguments = ["--backend", "collective", "-k", "test_all_to_all_single_equal_split", "--json"]
    done = run(*arguments, str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads(out.read_text())["outcomes"]["collective"]
    # Tests for GPUs are skipped; tests that torch has for MPI only are run.
    assert outcomes["test_all_to_all_single_equal_split"]["outcome"] == "passed"
    assert outcomes["test_all_to_all_single_equal_split_cuda"]["outcome"] == "skipped"
    assert "passed" in done.stdout


def test_torch_suite_reports_failing_test(tmp_path: Path) -> None:
    # torch refuses the call because of the backend's name.
    done = run("--backend", "collective", "-k", "test_monitored_barrier_gloo_subgroup*")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ValueError: monitored_barrier is only implemented for GLOO backend." in done.stdout


def test_torch_suite_refuses_pattern_without_tests() -> None:
    done = run("--backend", "gloo", "-k", "no_such_test")
    assert done.returncode == 2
    assert "no test has such a name" in done.stderr
