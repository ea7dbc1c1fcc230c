"""``collective bench``, the command."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from collective.install import hint
from collective.testing.frameworks import framework as framework_of
from tests import warm
from tests.support.interpreter import run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the bench reads /proc")

COMMAND = ["-m", "collective", "bench"]
QUICK = ["--quick", "--backend", "shm"]
OPERATIONS = "all_reduce,barrier"


def run(*arguments: object, code: int = 0) -> str:
    done = run_python(*COMMAND, *arguments, python=warm.python())
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run; that all operations compute right is tested elsewhere."""
    folder = tmp_path_factory.mktemp("bench")
    run("--quick", "--op", OPERATIONS, "--sizes", "4K", "--backend", "shm,mpi/nosuch", "-n", "1,2",
        "--vs", "memcpy", "--json", folder / "run.json", "--csv", folder / "run.csv")  # fmt: skip
    return folder


def test_all_that_is_asked_is_measured_by_both_methods(everything: Path) -> None:
    found = json.loads((everything / "run.json").read_text())
    seen = {(r["op"], r["backend"], r["memory"], r["method"]) for r in found["records"]}
    both, sides = ("latency", "bandwidth"), [("shm", "symmetric"), ("shm", "ordinary")]
    assert seen == {
        *(("all_reduce", *side, m) for side in [*sides, ("memcpy", "ordinary")] for m in both),
        ("barrier", "shm", "", "latency"),
    }
    assert {record["ranks"] for record in found["records"]} == {1, 2}
    for record in found["records"]:
        assert record["wrong"] == 0
        assert 0 < record["low"] <= record["high"]
        assert (
            (record["busbw"] is None) == (record["method"] == "latency") != (record["p99"] is None)
        )
    assert {(gap["side"], gap["operation"]) for gap in found["gaps"]} == {
        ("mpi/nosuch", operation) for operation in OPERATIONS.split(",")
    }
    with open(everything / "run.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["seconds"] for row in rows] == [str(r["seconds"]) for r in found["records"]]


def test_an_earlier_run_is_shown_and_drawn(everything: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = everything / "run.png"
    shown = run("--from", everything / "run.json", "--plot", picture, "--markdown")
    assert "**all_reduce, float32, 2 ranks: bandwidth**" in shown
    assert "no environment of nosuch" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tensors_of_a_dtype_that_numpy_lacks() -> None:
    pytest.importorskip("torch")
    shown = run(*QUICK, "--framework", "torch", "--dtype", "bfloat16", "--sizes", "1K",
                "--latency", "--memory", "symmetric", "--markdown")  # fmt: skip
    assert "**all_reduce, bfloat16, 2 ranks: latency**" in shown
    assert "| 1 KiB | shm symmetric torch |" in shown
    assert "bandwidth**" not in shown


@pytest.mark.parametrize("framework", ["torch", "chainer"])
def test_training_steps(framework: str, tmp_path: Path) -> None:
    if framework_of(framework).unavailable():
        pytest.skip(f"{framework} is not there")
    file = tmp_path / "run.json"
    run(*QUICK, "--train", "--models", "lenet", "--framework", framework, "--json", file)
    (found,) = json.loads(file.read_text())["trainings"]
    assert (found["model"], found["framework"], found["side"]) == ("lenet", framework, "shm")
    assert found["differing"] == 0
    assert min(found[part] for part in ("step", "compute", "sync", "alone")) > 0
    assert found["speedup"] == pytest.approx(2 * found["alone"] / found["step"])


def test_a_plot_without_matplotlib_names_the_command_that_installs_it() -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None; from collective.tools.cli.main import main; "
        "sys.exit(main(['bench', '--plot', 'x.png']))"
    )
    done = run_python("-c", program)
    assert done.returncode == 2
    assert hint("bench") in done.stderr


def test_a_contestant_that_does_not_start_is_told_with_what_it_said(tmp_path: Path) -> None:
    broken = tmp_path / "bin"
    broken.mkdir()
    (broken / "python").write_text("")
    (broken / "mpiexec").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such host >&2\nexit 3\n'
    )
    (broken / "mpiexec").chmod(0o755)
    shown = run(*QUICK, "--vs", "mpi4py/mine", "--mpi-env", f"mine={tmp_path}", "--sizes", "4",
                "--latency")  # fmt: skip
    assert "0 of 2 ranks have started: no such host" in shown


def test_what_cannot_be_written_after_all_costs_no_figures(tmp_path: Path) -> None:
    shown = run(*QUICK, "--sizes", "4", "--latency", "--json", "/dev/full", code=2)
    assert "all_reduce, float32, 2 ranks: latency" in shown
    assert "collective: --json /dev/full: No space left on device.\n" in shown
