"""Each supported Python of this machine compiles and imports the package from its sources.

``tests/pythons/run.py`` runs many more tests, on all supported Pythons: see ``run.py``.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

from tests.pythons.interpreters import FOLDER, ROOT, VERSIONS, find

# An environment of ``tests/pythons/run.py`` has NumPy; other Pythons may have it.
_COMPILE = """
import pathlib, sys, warnings
warnings.simplefilter("error")
for name in sys.stdin.read().splitlines():
    compile(pathlib.Path(name).read_bytes(), name, "exec", dont_inherit=True)
"""
_HAS_NUMPY = "import importlib.util, sys; sys.exit(importlib.util.find_spec('numpy') is None)"
_TOTAL = """
from collective.testing import run_ranks
def total(comm):
    return comm.all_reduce([comm.rank + 1.0])[0]
assert [float(sum) for sum in run_ranks(2, total)] == [3.0, 3.0]
"""


@functools.cache
def interpreter(version: str) -> Path | None:
    """Return the Python of a version, with NumPy if there is an environment."""
    environment = FOLDER / version / "bin" / "python"
    return environment if environment.exists() else find(version)


@pytest.fixture(params=VERSIONS)
def python(request: pytest.FixtureRequest) -> Path:
    """Return one Python of this machine; skip the test if it is not here, or is alone."""
    found = interpreter(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} on this machine; `tests/pythons/run.py` unpacks it")
    if sum(interpreter(version) is not None for version in VERSIONS) == 1:
        pytest.skip("there is only one Python on this machine: that of the other tests")
    return found


def _run(python: Path, program: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    # Other Pythons must not import this Python's packages.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [python, "-c", program],
        input=stdin, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.whole
def test_python_compiles_all_modules_without_warning(python: Path) -> None:
    folders = ("collective", "backends", "adapters", "examples", "benchmarks")
    files = [str(file) for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    done = _run(python, _COMPILE, "\n".join(files))
    assert done.returncode == 0, done.stderr


def test_python_with_numpy_runs_two_ranks_without_warning(python: Path) -> None:
    if _run(python, _HAS_NUMPY).returncode:
        pytest.skip(f"{python} has no NumPy, which the package needs")
    done = _run(python, f"import warnings; warnings.simplefilter('error')\n{_TOTAL}")
    assert (done.returncode, done.stderr) == (0, "")
