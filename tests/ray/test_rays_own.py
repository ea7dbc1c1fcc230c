"""Ray's own tests of its collective calls, over our backend.

Ray's wheels do not have these tests. ``RAY_TESTS`` is their folder in a checkout of Ray::

    make test-in ENV=ray RAY_TESTS=~/ray/python/ray/util/collective/tests

The tests run from a copy, in which the backend's name is changed. The fixtures of
``rays_fixtures.py`` replace Ray's own ones. They start Ray and its actors once for all tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.interpreter import run

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make test-in ENV=ray` does that", allow_module_level=True)

TESTS = os.environ.get("RAY_TESTS", "")
if not TESTS:
    pytest.skip("RAY_TESTS does not name the folder of Ray's own tests", allow_module_level=True)

FIXTURES = Path(__file__).with_name("rays_fixtures.py")
# It imports a module `python.ray`, and calls a method that has no `self`.
NOT_RUNNABLE = "test_gloo_group_isolation.py"
# They expect the array of rank 1, though another rank broadcasts. They fail with Ray's Gloo, too.
WRONG = [
    "raytests/distributed_cpu_tests/test_distributed_broadcast.py::"
    f"test_broadcast_torch_numpy[{src_rank}-"
    for src_rank in (2, 5, 6, 7)
]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("folder", ["single_node_cpu_tests", "distributed_cpu_tests"])
def test_own_tests_of_ray_pass(folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "raytests"
    shutil.copytree(Path(TESTS, folder).expanduser(), copy / folder)
    shutil.copy(Path(TESTS, "cpu_util.py").expanduser(), copy)
    for file in copy.rglob("*.py"):
        text = file.read_text().replace("ray.util.collective.tests", "raytests")
        file.write_text(re.sub(r"\bBackend\.(GLOO|NCCL)\b", '"collective"', text))
    (copy / folder / NOT_RUNNABLE).unlink(missing_ok=True)
    shutil.copy(FIXTURES, copy / "conftest.py")
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull)
    done = run(
        *command, f"--rootdir={tmp_path}", *(f"--deselect={name}" for name in WRONG), copy / folder,
        cwd=tmp_path, merged=True, timeout=7000.0, RAYTESTS=str(tmp_path),
    )  # fmt: skip
    print(folder, done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
