"""mpi4py's own tests over this library: ``make test-in ENV=mpi4py`` runs them, and needs a network.

Its environment has a real mpi4py with MPICH, whose place the module of this library takes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("mpi4py") is None:
    pytest.skip("needs the environment of ENV=mpi4py", allow_module_level=True)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("backend", "ranks"), [("shm", "1,2,3,5"), ("tcp", "2,3"), ("hierarchical", "2,3")]
)
def test_share_of_mpi4pys_tests_passes(backend: str, ranks: str) -> None:
    program = Path(__file__).with_name("run.py")
    done = subprocess.run(
        [sys.executable, program, "-v", "--backend", backend, "--ranks", ranks],
        capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
