"""The examples of training that goes on: ranks are killed for real, rank 0 too."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.interpreter import ROOT, run_python
from tests.mpi_launches import mpirun, needs

pytest.importorskip("mlxtend")


def run(backend: str, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "collective", "run", "-n", "4", "--min-ranks", "2", "--backend", backend]
    options = ["--steps", "9", "--batch", "16", "--kill", "3@2", "--kill", "0@5", *arguments]
    return run_python(
        *launch, ROOT / "examples" / example, *options, python=warm.python(),
        OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
    )  # fmt: skip


@pytest.mark.parametrize("example", ["elastic.py", "elastic_chainer.py"])
def test_the_rest_goes_on_with_the_same_weights_on_every_transport(
    example: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    if "chainer" in example and importlib.util.find_spec("chainer") is None:
        pytest.skip("chainer is not installed")
    found = []
    picture = tmp_path / "loss.png"
    other = ["--trainer"] if "chainer" in example else []  # which makes no other weights
    for backend, options in (("shm", ["--picture", str(picture)]), ("threads", other)):
        done = run(backend, example, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2: lost rank 3;" in done.stdout
        assert "step 5: lost rank 0;" in done.stdout
        assert "9 steps, the last with 2 ranks" in done.stdout
        assert "collective run: 2 of 4 ranks were lost:" in done.stderr
        weights = re.search(r"weights are the same on all of them: (\w{16})", done.stdout)
        assert weights is not None, done.stdout
        found.append(weights[1])
    assert found[0] == found[1]
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs("openmpi")
def test_the_rest_goes_on_over_open_mpi_and_with_it_between_hosts() -> None:
    chainer = importlib.util.find_spec("chainer")
    if chainer is None or chainer.origin is None:
        pytest.skip("chainer is not installed")
    examples, packages = ROOT / "examples", Path(chainer.origin).parent.parent
    program = f"""
import runpy, sys
sys.argv[1:] = "--steps 6 --batch 16 --kill 2@3".split()
runpy.run_path({str(examples / "elastic_chainer.py")!r}, run_name="__main__")
"""
    found = set()
    for backend in ("mpi", "hierarchical"):
        done = mpirun(
            "openmpi", 3, program, arguments=("--with-ft", "ulfm"), check=False,
            PYTHONPATH=os.pathsep.join(map(str, (ROOT, examples, packages))),
            COLLECTIVE_BACKEND=backend, COLLECTIVE_ACROSS="mpi", COLLECTIVE_MIN_RANKS="2",
            OPENBLAS_NUM_THREADS="1",
        )  # fmt: skip
        assert "step 3: lost rank 2;" in done.stdout, done.stdout
        assert "6 steps, the last with 2 ranks" in done.stdout
        found.update(re.findall(r"weights are the same on all of them: (\w{16})", done.stdout))
    assert len(found) == 1
