"""The benchmark commands: they run, check their results, and write the files that they announce."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.support.interpreter import ROOT, printed

BENCHMARKS = ROOT / "benchmarks"
PEERS = Path(os.environ.get("BENCH_PEERS", ROOT / ".mpi"))

pytestmark = [
    pytest.mark.whole,
]


def run(command: str, *arguments: object) -> str:
    return printed(BENCHMARKS / command, *arguments, python=warm.python())


def measured(tmp_path: Path, command: str, *arguments: object) -> tuple[str, Any]:
    """Return the output of a command, and the measurements that it writes to a file."""
    file = tmp_path / f"{command}.json"
    shown = run(f"{command}.py", *arguments, "--json", file)
    return shown, json.loads(file.read_text())


def shown_again(tmp_path: Path, command: str) -> str:
    """Return the output of a command that shows its earlier measurements."""
    return run(f"{command}.py", "--from", tmp_path / f"{command}.json")


def needs(vendor: str) -> None:
    if not (PEERS / vendor / "bin" / "mpiexec").exists():
        pytest.skip(f"needs {PEERS.name}/{vendor}, which make test installs")


def mpich_alone(folder: Path) -> Path:
    """Return a folder of MPI libraries that contains only MPICH."""
    needs("mpich")
    libraries = folder / "mpi"
    libraries.mkdir()
    (libraries / "mpich").symlink_to(PEERS / "mpich")
    return libraries


def line(shown: str, what: str) -> str:
    """Return the line of a table that begins with ``what``, without its frame."""
    lines = [line.strip("│ ") for line in shown.splitlines()]
    return next(line for line in lines if line.startswith(what))


def test_elastic_measures_going_on_after_a_loss(tmp_path: Path) -> None:
    shown, results = measured(tmp_path, "elastic", "--quick", "--backends", "shm")
    assert "shm, rank 0 of 3" in shown
    assert "shm, one more than 2" in shown
    assert [len(seconds) for seconds in results["elastic"].values()] == [3] * 3


def of_targets(tmp_path: Path, *options: str, **found: Any) -> str:
    """Return the output of ``targets.py`` for an earlier run with the results ``found``."""
    machine = {"date": "today", "cpu": "one", "cores": 2, "others": 0.0}
    nothing: dict[str, Any] = {
        "records": [], "gaps": [], "versions": {}, "missing": {}, "interrupted": False,
        "machine": machine,
    }  # fmt: skip
    file = tmp_path / "run.json"
    file.write_text(json.dumps(nothing | found))
    return run("targets.py", "--from", file, *options)


def timed(backend: str, op: str, nbytes: int, turns: list[float], **other: Any) -> dict[str, Any]:
    seconds = sorted(turns)[len(turns) // 2]
    return {
        "operation": op, "contestant": backend, "memory": "ordinary", "framework": None,
        "dtype": "float32", "ranks": 2, "nbytes": nbytes, "method": "bandwidth",
        "seconds": seconds, "p90": None, "p99": None, "low": min(turns), "high": max(turns),
        "algbw": 1.0, "busbw": 1.0, "calls": 1, "wrong": 0, "turns": turns, **other,
    }  # fmt: skip


def test_targets_compares_neighbouring_turns_with_fastest_mpi(tmp_path: Path) -> None:
    records = [
        # The whole machine is slow in the second turn, only one MPI library in the third turn.
        timed("shm", "gather", 64, [1e-6, 10e-6, 1e-6]),
        timed("mpi4py/mpich", "gather", 64, [1.2e-6, 12e-6, 12e-6]),
        timed("mpi4py/openmpi", "gather", 64, [90e-6] * 3),
    ]
    shown = of_targets(tmp_path, records=records, added={})
    (row,) = [one for one in shown.splitlines() if "mpich" in one]
    assert row.split() == ["gather", "64", "B", "1", "12", "mpich", "1.20", "1", "1.5", "kept"]


def test_targets_judges_row_by_worst_size(tmp_path: Path) -> None:
    records = [
        timed(side, "gather", nbytes, [seconds])
        for nbytes, of_mpi in ((64, 2e-6), (1 << 20, 0.9e-6))
        for side, seconds in (("shm", 1e-6), ("mpi4py/mpich", of_mpi))
    ]
    shown = of_targets(tmp_path, records=records, added={})
    summary = shown[shown.index("to reach") :]
    assert re.search(r"gather .* 0.9 × MPI \(1 MiB\) +missed", summary), summary
    assert re.search(r"scatter .* not measured", summary), summary


@pytest.mark.parametrize(
    ("what", "value", "verdict"),
    [("mpi", 0.9, "kept"), ("nccl", 2.1, "missed"), ("ddp", 1.9, "kept, and the aim"),
     ("chainer", 0.4, "missed")],
)  # fmt: skip
def test_targets_judges_added_values_by_their_bounds(
    tmp_path: Path, what: str, value: float, verdict: str
) -> None:
    shown = of_targets(tmp_path, added={what: {"here": value}})
    begins = {"ddp": "a DDP step", "chainer": "a step in Chainer"}.get(what, what)
    assert line(shown, begins).endswith(verdict)
    assert f"{value:g}" in line(shown, begins)


def test_targets_judges_16_bits_by_float32_and_any_peer(tmp_path: Path) -> None:
    tensors = {"framework": "torch"}
    records = [
        timed("shm", "all_reduce", 1 << 20, [1e-5], **tensors),
        timed("shm", "all_reduce", 1 << 20, [1.2e-5], **tensors, dtype="bfloat16"),
        timed("torch", "all_reduce", 1 << 20, [9e-4], dtype="bfloat16"),
        timed("shm", "all_reduce", 1 << 20, [1.5e-5], **tensors, dtype="float16"),
    ]
    shown = of_targets(tmp_path, records=records, added={})
    assert line(shown, "all_reduce of bfloat16").endswith("kept, and the aim")
    assert line(shown, "all_reduce of float16").endswith("missed")


def test_targets_measures_two_and_four_ranks_and_added_values(tmp_path: Path) -> None:
    few = ("--rows", "barrier", "mpi", "ddp", "--quick", "--against", "mpich")
    shown, results = measured(tmp_path, "targets", *few, "--mpi-envs", mpich_alone(tmp_path))
    assert {*results["added"], *results["missing"]} == {"mpi", "ddp"}
    assert "mpi" in results["added"]
    assert "ddp" in results["added"] or "torch" in results["missing"]["ddp"]
    records = results["records"]
    sides = {("shm", ranks) for ranks in (2, 4)} | {("mpi4py/mpich", ranks) for ranks in (2, 4)}
    assert {(record["contestant"], record["ranks"]) for record in records} == sides
    assert all(len(record["turns"]) == 5 and record["wrong"] == 0 for record in records)
    assert line(shown, "barrier, 4 ranks")


@pytest.mark.parametrize(
    "flags", [[], ["--operation", "gather", "--cpu"], ["--operation", "send_recv"]]
)
def test_native_compares_core_with_its_absence(tmp_path: Path, flags: list[str]) -> None:
    _, results = measured(tmp_path, "native", *flags, "--sizes", "16", "512K", "--turns", 2)
    calls = results["calls"]
    assert [call["nbytes"] for call in calls] == [16, 512 << 10]
    for side in ("core", "without"):
        assert all(len(call[side]) == 2 and min(call[side]) > 0 for call in calls)
    assert "512 KiB" in shown_again(tmp_path, "native")


def test_chainer_training_measures_all_sides(tmp_path: Path) -> None:
    if importlib.util.find_spec("chainer") is None:
        pytest.skip("chainer is not installed")
    few = ("--quick", "--width", 64, "--mpi-envs", mpich_alone(tmp_path))
    shown, results = measured(tmp_path, "chainer_training", *few)
    (times,) = results["syncing"].values()
    sides = {"no syncing", "a reduction alone", "ours", "drop-in", "naive", "flat (host)"}
    assert set(times) == sides
    for side in sides:
        assert min(times[side]) > 0
        assert line(shown, side)
    assert "promised 0.2" in shown


@pytest.mark.parametrize("engine", ["gloo", "mpich", "openmpi"])
def test_overhead_compares_with_calls_of_engine(tmp_path: Path, engine: str) -> None:
    pytest.importorskip("torch") if engine == "gloo" else needs(engine)
    few = ("--quick", "--operations", "all_reduce", "send_recv", "--sizes", 8, "1M")
    shown, run_ = measured(tmp_path, "overhead", engine, *few)
    results = run_["engines"][engine]
    calls = {(r["operation"], r["nbytes"]) for r in results["records"]}
    assert calls == {(o, n) for o in ("all_reduce", "send_recv") for n in (8, 1 << 20)}
    for record in results["records"]:
        assert min(record[side] for side in ("raw", "ours", "ratio")) > 0
    assert results["version"] in shown
    assert line(shown, "send_recv")
