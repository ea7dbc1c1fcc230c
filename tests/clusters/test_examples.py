"""The examples for submitit and Dask; ``make test-in ENV=clusters`` installs both and runs this."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.interpreter import ROOT, run_python

DEADLINE_S = 200.0


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-in ENV=clusters` does that")


def printed_by(example: str, *arguments: object, folder: Path) -> list[str]:
    """Run an example in ``folder``; return the lines that it prints."""
    done = run_python(ROOT / "examples" / example, *arguments, cwd=folder, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_tasks_of_submitit_are_ranks(tmp_path: Path) -> None:
    needs("submitit")
    lines = printed_by("with_submitit.py", "--tasks", 3, folder=tmp_path)
    assert lines == [f"rank {rank} of 3: 60.0" for rank in range(3)]


def test_workers_of_dask_are_ranks(tmp_path: Path) -> None:
    needs("distributed")
    lines = printed_by("with_dask.py", folder=tmp_path)
    assert lines == [f"rank {rank} of 2 over shm: 1" for rank in range(2)]
