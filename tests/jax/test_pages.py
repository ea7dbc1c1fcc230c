"""Programs and calls on the pages about JAX: they print or return what is shown there."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from collective.testing import run_ranks
from tests.docs.test_coming_from import Row, named, our_side, rows
from tests.support.interpreter import ROOT, run_python

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX is not installed; `make test-in ENV=jax` does that", allow_module_level=True)

DEADLINE_S = 250.0


@pytest.mark.parametrize("page", ["jax.md", "jax-in-jit.md", "jax-plugin.md", "tutorials/jax.md"])
def test_program_of_page_prints_output_shown(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    program, shown = blocks[:2]
    (name,) = re.findall(r"\A# (\w+\.py)$", program, re.MULTILINE)
    (tmp_path / name).write_text(program)
    commands = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", shown, re.MULTILINE)
    ran = 0
    for command, output in commands:
        words = shlex.split(command)
        words = {"python": words[1:], "collective": ["-m", *words]}[words[0]]
        done = run_python(*words, cwd=tmp_path, timeout=DEADLINE_S, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(done.stdout.splitlines()) == sorted(output.splitlines())
        ran += 1
    assert ran


@pytest.fixture(scope="module")
def returned() -> list[list[Any]]:
    """Return each rank's results of our calls in the table for users of mpi4jax."""
    return run_ranks(2, our_side, "mpi4jax", backend="shm", timeout=DEADLINE_S)


@pytest.mark.parametrize("row", rows("mpi4jax"), ids=named)
def test_call_in_place_of_mpi4jax_returns_value_in_table(
    row: Row, returned: list[list[Any]]
) -> None:
    nth = rows("mpi4jax").index(row)
    assert [results[nth] for results in returned] == list(row.gives)
