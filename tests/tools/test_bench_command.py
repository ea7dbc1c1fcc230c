"""The command ``collective bench``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import warm
from tests.support.interpreter import run_python

pytestmark = [
    pytest.mark.whole,
]

COMMAND = ["-m", "collective", "bench"]
QUICK = ["--quick", "--backend", "shm"]
OPERATIONS = "all_reduce,barrier"


def run(*arguments: object, code: int = 0) -> str:
    done = run_python(*COMMAND, *arguments, python=warm.python())
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run. Other tests check the results of all operations."""
    folder = tmp_path_factory.mktemp("bench")
    run("--quick", "--op", OPERATIONS, "--sizes", "4K", "--backend", "shm,mpi/nosuch", "-n", "1,2",
        "--vs", "memcpy", "--json", folder / "run.json")  # fmt: skip
    return folder


def test_bench_measures_all_requests_by_both_methods(everything: Path) -> None:
    results = json.loads((everything / "run.json").read_text())
    seen = {(r["operation"], r["contestant"], r["memory"], r["method"]) for r in results["records"]}
    both, sides = ("latency", "bandwidth"), [("shm", "symmetric"), ("shm", "ordinary")]
    assert seen == {
        *(("all_reduce", *side, m) for side in [*sides, ("memcpy", "ordinary")] for m in both),
        ("barrier", "shm", "", "latency"),
    }
    assert {record["ranks"] for record in results["records"]} == {1, 2}
    for record in results["records"]:
        assert record["wrong"] == 0
        assert 0 < record["low"] <= record["high"]
        assert (
            (record["busbw"] is None) == (record["method"] == "latency") != (record["p99"] is None)
        )
    assert {(gap["side"], gap["operation"]) for gap in results["gaps"]} == {
        ("mpi/nosuch", operation) for operation in OPERATIONS.split(",")
    }


def test_bench_shows_an_earlier_run(everything: Path) -> None:
    shown = run("--from", everything / "run.json")
    assert "all_reduce, float32, 2 ranks: bandwidth" in shown
    assert "no environment of nosuch" in shown


def test_bench_measures_tensors_of_bfloat16() -> None:
    pytest.importorskip("torch")
    shown = run(*QUICK, "--framework", "torch", "--dtype", "bfloat16", "--sizes", "1K",
                "--latency", "--memory", "symmetric")  # fmt: skip
    assert "all_reduce, bfloat16, 2 ranks: latency" in shown
    assert re.search(r"^1 KiB +shm symmetric torch ", shown, re.MULTILINE)
    assert "bandwidth" not in shown


def test_bench_reports_output_of_contestant_that_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "mpich" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").write_text("")
    (broken / "mpiexec").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such host >&2\nexit 3\n'
    )
    (broken / "mpiexec").chmod(0o755)
    shown = run(*QUICK, "--vs", "mpi4py/mpich", "--mpi-envs", tmp_path, "--sizes", "4",
                "--latency")  # fmt: skip
    assert "0 of 2 ranks have started: no such host" in shown


def test_bench_prints_figures_even_if_json_cannot_be_written(tmp_path: Path) -> None:
    shown = run(*QUICK, "--sizes", "4", "--latency", "--json", "/dev/full", code=2)
    assert "all_reduce, float32, 2 ranks: latency" in shown
    assert "collective: --json /dev/full: No space left on device.\n" in shown
