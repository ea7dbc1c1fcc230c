"""Ray Train over our process group; ``make test-in ENV=ray`` installs Ray and runs this."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed; `make test-in ENV=ray` does that", allow_module_level=True)

from tests.support.interpreter import run_python

PROGRAM = Path(__file__).with_name("training.py")


@pytest.mark.parametrize(("version", "module"), [("0", "ray.train.torch"), ("1", "ray.train.v2")])
def test_ray_train_runs_over_our_process_group(version: str, module: str) -> None:
    done = run_python(PROGRAM, timeout=250.0, RAY_TRAIN_V2_ENABLED=version)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"^{re.escape(module)}\S* (\{{.*\}})$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    assert json.loads(found[1]) == {
        "backend": "collective",
        "transport": "shm",
        "model": "DistributedDataParallel",
        "equal": True,
    }
