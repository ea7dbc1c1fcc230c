"""The examples of pipelines, of training that continues after losses, and of Chainer."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.support.interpreter import run_python
from tests.support.mpi_launches import mpirun, needs
from tests.system.test_examples import ROOT, SHORT, run

pytestmark = pytest.mark.whole

for _needed in ("mlxtend", "matplotlib"):
    pytest.importorskip(_needed)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one thread of OpenMP and OpenBLAS, or threads of several ranks wait for each other."""
    for library in ("OMP", "OPENBLAS"):
        monkeypatch.setenv(f"{library}_NUM_THREADS", "1")


# -- pipelines ---------------------------------------------------------------------------------

FRAMEWORKS = {"pipeline.py": "torch", "pipeline_chainer.py": "chainer"}
SMALL = ("--limit", "400", "--epochs", "2", "--batch", "64", "--width", "48")


def check_pipeline(done: subprocess.CompletedProcess[str], stages: int, picture: Path) -> None:
    assert done.returncode == 0, done.stdout
    assert re.search(r"gradients +equal to one process", done.stdout), done.stdout
    assert f"{stages} stage(s), 8 micro-batches, gpipe" in done.stdout
    share = r"(\d+\.\d)% "
    measured, replayed, least = (
        float(re.search(share + what, done.stdout)[1])
        for what in ("measured", "replayed", "at the least")
    )
    assert least == pytest.approx(100 * (stages - 1) / (8 + stages - 1), abs=0.05)
    # The bounds do not depend on speed: no rank computes for longer than the whole time.
    assert 0 <= replayed < 100
    assert 0 <= measured < 100
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("example", FRAMEWORKS)
def test_pipeline_equals_one_process(example: str, tmp_path: Path) -> None:
    pytest.importorskip("collective.adapters." + FRAMEWORKS[example])
    picture = tmp_path / "picture.png"
    options = ("--schedule", "gpipe", "--output", str(picture))
    check_pipeline(run("shm", example, *SMALL, *options), 3, picture)


def test_compare_treats_nan_as_different(capsys: pytest.CaptureFixture[str]) -> None:
    specification = importlib.util.spec_from_file_location(
        "pipeline_report", ROOT / "examples" / "pipeline_report.py"
    )
    report = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(report)
    expected = {"first": np.ones(2), "second": np.ones(2)}
    computed = {**expected, "second": np.array([1.0, np.nan])}
    assert report.compare([computed], [expected], 1) == 1
    assert report.compare([expected], [expected], 1) == 0
    assert "NOT equal" in capsys.readouterr().out


def test_pipeline_reports_difference_from_one_process(tmp_path: Path) -> None:
    pytest.importorskip("collective.adapters.chainer")
    # The same program, but the gradients of each batch are added to the previous gradients.
    text = (ROOT / "examples" / "pipeline_chainer.py").read_text()
    text, changes = re.subn(r"pipe\.stage\.cleargrads\(\)", "pipe", text)
    assert changes == 1
    for name in ("digits.py", "pipeline_report.py"):
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    (tmp_path / "broken.py").write_text(text)
    done = run("one rank", str(tmp_path / "broken.py"), *SMALL, "--output", str(tmp_path / "p.png"))
    assert done.returncode == 1, done.stdout
    assert "NOT equal to one process" in done.stdout


# -- training that continues: ranks are really killed, including rank 0 -------------------------


def elastic(backend: str, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "collective", "run", "-n", "4", "--min-ranks", "2", "--backend", backend]
    options = ["--steps", "9", "--batch", "16", "--kill", "3@2", "--kill", "0@5", *arguments]
    return run_python(*launch, ROOT / "examples" / example, *options, python=warm.python())


@pytest.mark.parametrize("example", ["elastic.py", "elastic_chainer.py"])
def test_elastic_gives_same_weights_on_every_transport(example: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if "chainer" in example and importlib.util.find_spec("chainer") is None:
        pytest.skip("chainer is not installed")
    digests = []
    picture = tmp_path / "loss.png"
    other = ["--trainer"] if "chainer" in example else []  # The Trainer gives the same weights.
    for backend, options in (("shm", ["--picture", str(picture)]), ("threads", other)):
        done = elastic(backend, example, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2: lost rank 3;" in done.stdout
        assert "step 5: lost rank 0;" in done.stdout
        assert "9 steps, the last with 2 ranks" in done.stdout
        assert "collective run: 2 of 4 ranks were lost:" in done.stderr
        weights = re.search(r"weights are the same on all of them: (\w{16})", done.stdout)
        assert weights is not None, done.stdout
        digests.append(weights[1])
    assert digests[0] == digests[1]
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs("openmpi")
def test_elastic_continues_over_open_mpi_and_between_hosts() -> None:
    chainer = importlib.util.find_spec("chainer")
    if chainer is None or chainer.origin is None:
        pytest.skip("chainer is not installed")
    examples, packages = ROOT / "examples", Path(chainer.origin).parent.parent
    program = f"""
import runpy, sys
sys.argv[1:] = "--steps 6 --batch 16 --kill 2@3".split()
runpy.run_path({str(examples / "elastic_chainer.py")!r}, run_name="__main__")
"""
    digests = set()
    for backend in ("mpi", "hierarchical"):
        done = mpirun(
            "openmpi", 3, program, arguments=("--with-ft", "ulfm"), check=False,
            PYTHONPATH=os.pathsep.join(map(str, (ROOT, examples, packages))),
            COLLECTIVE_BACKEND=backend, COLLECTIVE_ACROSS="mpi", COLLECTIVE_MIN_RANKS="2",
        )  # fmt: skip
        assert "step 3: lost rank 2;" in done.stdout, done.stdout
        assert "6 steps, the last with 2 ranks" in done.stdout
        digests.update(re.findall(r"weights are the same on all of them: (\w{16})", done.stdout))
    assert len(digests) == 1


# -- Chainer, with a Trainer and without -------------------------------------------------------


def figures(output: str) -> tuple[float, float]:
    """Return the accuracy, in percent, and the sum of the weights."""
    accuracy = re.search(r"test accuracy (\d+\.\d)%\n.*sum of all", output)
    weights = re.search(r"sum of all weights (-?\d+\.\d+)", output)
    assert accuracy is not None, output
    assert weights is not None, output
    return float(accuracy[1]), float(weights[1])


def test_trainer_and_loop_give_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("collective.adapters.chainer.arrays")
    results = []
    for launch, options in (("shm", ()), ("threads", ("--no-trainer",))):
        done = run(launch, "mnist_chainer.py", *SHORT, "--out", str(tmp_path), *options)
        assert done.returncode == 0, done.stdout
        results.append(figures(done.stdout))
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert results[0][0] > 30  # 10 classes, after 14 steps
    log = json.loads((tmp_path / "log").read_text())
    assert [entry["epoch"] for entry in log] == [1, 2]
    assert 100 * log[-1]["validation/main/accuracy"] == pytest.approx(results[0][0], abs=0.06)


def test_trainer_shows_progress_bar_on_terminal(tmp_path: Path) -> None:
    pytest.importorskip("collective.adapters.chainer.arrays")
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
    with contextlib.suppress(OSError):  # On Linux the end of the program raises OSError here.
        while part := os.read(master, 1 << 16):
            shown += part
    os.close(master)
    assert process.wait(270) == 0, shown.decode(errors="replace")
    assert b"this epoch [" in shown
