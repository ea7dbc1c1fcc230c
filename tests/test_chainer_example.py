"""The example in Chainer, with a Trainer and without, as its docstring says."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_examples import ROOT, run

if importlib.util.find_spec("chainer") is None:
    pytest.skip("chainer is not installed", allow_module_level=True)

# 320 digits in steps of 3 × 16.
SHORT = ("--epochs", "2", "--limit", "400")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlxtend")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # or its threads wait for each other


def figures(output: str) -> tuple[float, float]:
    """Return the accuracy, in percent, and the sum of the weights."""
    accuracy = re.search(r"test accuracy (\d+\.\d)%\n.*sum of all", output)
    weights = re.search(r"sum of all weights (-?\d+\.\d+)", output)
    assert accuracy is not None, output
    assert weights is not None, output
    return float(accuracy[1]), float(weights[1])


def test_trainer_and_loop_end_with_the_same_weights(tmp_path: Path) -> None:
    found = []
    for launch, options in (("shm", ()), ("threads", ("--no-trainer",))):
        done = run(launch, "mnist_chainer.py", *SHORT, "--out", str(tmp_path), *options)
        assert done.returncode == 0, done.stdout
        found.append(figures(done.stdout))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][0] > 30  # of ten kinds, after 14 steps
    log = json.loads((tmp_path / "log").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2]
    assert 100 * log[-1]["validation/main/accuracy"] == pytest.approx(found[0][0], abs=0.06)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    master, slave = os.openpty()
    command = [sys.executable, str(ROOT / "examples" / "mnist_chainer.py"), *SHORT]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # its end, on Linux
        while part := os.read(master, 1 << 16):
            shown += part
    os.close(master)
    assert process.wait(270) == 0, shown.decode(errors="replace")
    assert b"this epoch [" in shown
