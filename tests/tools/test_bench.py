"""The parts of ``collective bench``: operations, checks of results, turns and statistics."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.errors import BackendNotFoundError
from collective.launch.mpiexec import Mpiexec
from collective.testing import run_ranks
from collective.testing.frameworks import encoded
from collective.tools.bench import operations
from collective.tools.bench.arena import Arena, ArenaError
from collective.tools.bench.contestants import Contestant, environments, named
from collective.tools.bench.figures import show
from collective.tools.bench.libraries import Ours
from collective.tools.bench.measure import Gap, Pace, Record, Task, compare
from collective.tools.bench.operations import ALL, DTYPES, OPERATIONS, count_wrong, value_of
from collective.tools.bench.run import Results
from collective.tools.bench.worker import StartLine, Worker

# -- operations and their checks --------------------------------------------------------


def worker(comm: Any, folder: Path) -> Worker:
    if comm.rank == 0:
        StartLine.create(folder / "startline", comm.size)
    comm.barrier()
    return Worker(Ours(comm), folder)


def wrong(comm: Any, folder: Path, dtype: str, nbytes: int, names: tuple[str, ...]) -> list[int]:
    counts, bench_worker = [], worker(comm, folder)
    for name in names:
        bench_worker.prepare("side", name, nbytes, "ordinary", dtype)
        bench_worker.attempt("side")
        counts.append(bench_worker.check("side")["wrong"])
    return counts


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("nbytes", [1, 4096])
def test_operations_give_results_that_the_check_accepts(
    tmp_path: Path, size: int, nbytes: int
) -> None:
    for counts in run_ranks(size, wrong, tmp_path, "float32", nbytes, OPERATIONS):
        assert counts == [0] * len(OPERATIONS)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_reductions_are_exact_in_every_dtype(tmp_path: Path, dtype: str) -> None:
    names = ("all_reduce", "scan", "reduce_scatter")
    assert run_ranks(4, wrong, tmp_path, dtype, 8192, names) == [[0, 0, 0]] * 4


def faulty(comm: Any, folder: Path) -> list[int]:
    """Count wrong elements for operations that omit a rank, swap blocks, or do nothing."""
    counts, bench_worker = [], worker(comm, folder)

    def last_left_out(x: Any, out: Any) -> None:
        x[:] = 0 if comm.rank == comm.size - 1 else x
        comm.all_reduce(x, out=x)

    def swapped(x: Any, out: Any) -> None:
        comm.all_reduce(x, out=x)
        half = x.size // 2
        x[:] = np.concatenate([x[half:], x[:half]])

    for fault in (last_left_out, swapped, lambda x, out: None):
        bench_worker.prepare("side", "all_reduce", 1 << 16, "ordinary")
        prepared = bench_worker._prepared["side"]
        prepared.call = lambda fault=fault, x=prepared.x: fault(x, x)
        counts.append(bench_worker.check("side")["wrong"])
    return counts


def test_check_finds_faults(tmp_path: Path) -> None:
    for counts in run_ranks(2, faulty, tmp_path):
        assert all(count > 1000 for count in counts), counts


def test_start_line_counts_ranks_absent_from_a_barrier(tmp_path: Path) -> None:
    StartLine.create(tmp_path / "startline", 2)
    first, second = (StartLine(tmp_path / "startline", rank, 2) for rank in range(2))
    first.step()
    assert first.absent() == 1
    second.step()
    assert first.absent() == second.absent() == 0


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_value_of_differs_between_neighbours_blocks_and_ranks(dtype: str, size: int) -> None:
    value, i = value_of(dtype, size), np.arange(1 << 12)
    own = value(0, i)
    assert np.count_nonzero(own == value(size - 1, i)) == 0
    for shift in (1, 64, 256, 1024):
        assert np.count_nonzero(own == value(0, i + shift)) < i.size / 4
    total = sum(value(rank, i) for rank in range(size))
    if dtype == "bfloat16":
        bits = encoded(total, dtype).astype(np.uint32) << 16
        assert np.array_equal(bits.view(np.float32), total)
    else:
        assert np.array_equal(encoded(total, dtype).real.astype(np.int64), total)


def test_operations_have_bus_factors_of_nccl_tests_and_lengths() -> None:
    # nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n, (n-1)/n, 1.
    four = {name: ALL[name].busbw(4) for name in OPERATIONS}
    assert four["all_reduce"] == 1.5
    for name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        assert four[name] == 0.75
    for name in ("broadcast", "reduce", "send_recv", "sendrecv"):
        assert four[name] == 1
    assert operations.lengths("all_gather", 1000, 4, 3) == (84, 252, 84)
    assert operations.lengths("scatter", 1000, 4, 3) == (252, 84, 84)
    assert operations.lengths("all_reduce", 1000, 4, 3) == (250, None, 84)
    assert operations.lengths("barrier", 0, 4, 3)[:2] == (None, None)


def test_count_wrong_counts_elements() -> None:
    value = value_of("int32", 2)
    i = np.arange(600_000)  # more than one block
    result = encoded(value(0, i) + value(1, i), "int32")
    assert count_wrong("all_reduce", "int32", 0, 2, 0, result) == 0
    result[[0, 300_000, 599_999]] += 1
    assert count_wrong("all_reduce", "int32", 0, 2, 0, result) == 3


# -- turns and statistics -----------------------------------------------------------------


class Scripted:
    """An arena of two ranks whose contestants take their times from a table."""

    def __init__(self, times: dict[str, float]) -> None:
        self.contestants = [Contestant(name, 2) for name in times]
        self.failed: dict[str, ArenaError] = {}
        self.asked: list[tuple[str, str]] = []
        self._times = times
        self._refuses: set[str] = set()

    def ask(self, name: str, do: str, **request: Any) -> list[dict[str, Any]] | str:
        self.asked.append((name, do))
        if name == "breaks" and do == "measure":
            raise ArenaError(name, "measure: rank 1 has ended")
        if name == "refuses" and do == "attempt":
            return "it has none"
        if do == "measure":
            count = request["iterations"] if request["each"] else 1
            fast, slow = self._times[name] / 2, self._times[name]
            return [{"seconds": [fast] * count}, {"seconds": [slow] * count}]
        return [{"nbytes": 1 << 20, "wrong": rank} for rank in range(2)]


def measured(
    arena: Scripted, operation: str = "all_reduce", nbytes: int = 1 << 20
) -> list[Record | Gap]:
    task = Task(operation, nbytes)
    return list(compare(arena, task, Pace(3, 0.01)))  # type: ignore[arg-type]


def test_compare_alternates_turns_and_takes_slowest_rank() -> None:
    arena = Scripted({"gloo": 4e-3, "torch": 8e-3})
    results = measured(arena)
    turns = [name for name, do in arena.asked if do == "measure"]
    # For each of the two methods, each contestant has one calibration and three turns.
    assert turns == ["gloo", "torch"] * 8
    records = {(r.contestant, r.method): r for r in results if isinstance(r, Record)}
    assert len(records) == len(results) == 4
    gloo = records["gloo", "bandwidth"]
    assert gloo.seconds == gloo.low == gloo.high == 4e-3
    assert gloo.algbw == (1 << 20) / 4e-3 == gloo.busbw  # 2(n-1)/n is 1 for two ranks
    assert gloo.p90 is gloo.p99 is None
    latency = records["torch", "latency"]
    assert latency.seconds == latency.p90 == latency.p99 == 8e-3
    assert latency.algbw is latency.busbw is None
    assert all(record.wrong == 1 for record in records.values())


def test_compare_halves_round_trip_but_not_copy() -> None:
    results = measured(Scripted({"gloo": 4e-3, "memcpy": 4e-3}), "send_recv")
    seconds = {r.contestant: r.seconds for r in results if isinstance(r, Record)}
    assert seconds == {"gloo": 2e-3, "memcpy": 4e-3}


def test_compare_makes_gap_for_contestant_that_refuses_or_breaks() -> None:
    arena = Scripted({"refuses": 1.0, "breaks": 1.0, "gloo": 4e-3})
    results = measured(arena)
    gaps = {gap.side: gap for gap in results if isinstance(gap, Gap)}
    assert (gaps["refuses"].reason, gaps["refuses"].failed) == ("it has none", False)
    assert (gaps["breaks"].reason, gaps["breaks"].failed) == ("measure: rank 1 has ended", True)
    assert {r.contestant for r in results if isinstance(r, Record)} == {"gloo"}
    assert [call for call in arena.asked if call[0] == "breaks"][-1] == ("breaks", "measure")


def test_compare_skips_task_larger_than_memory() -> None:
    arena = Scripted({"gloo": 1.0})
    results = list(compare(arena, Task("scan", 1 << 60), Pace(3, 0.01)))  # type: ignore[arg-type]
    assert [type(result) for result in results] == [Gap]
    assert "no memory" in results[0].reason  # type: ignore[union-attr]
    assert arena.asked == []


def test_results_show_ratios_and_reasons_and_survive_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = Results()
    results.add(measured(Scripted({"gloo": 4e-3, "torch": 8e-3, "refuses": 1.0})))
    results.machine = {"cores": 2}
    show(results.records, results.gaps)
    shown = capsys.readouterr().out
    latency, bandwidth = shown.split("all_reduce, float32, 2 ranks: bandwidth")
    assert "1 MiB gloo 4000 4000 4000 1 2.00" in " ".join(latency.split())
    assert "busbw" not in latency
    assert "p99" not in bandwidth
    assert "it has none" in bandwidth
    measurement = "all_reduce, float32, 1 MiB, 2 ranks: 1 elements are wrong"
    assert results.failures == [f"gloo, {measurement}", f"torch, {measurement}"]
    assert Results.from_json(asdict(results)) == results


def test_show_prints_reason_missing_at_all_sizes_once(capsys: pytest.CaptureFixture[str]) -> None:
    results = Results()
    for nbytes in (4, 1024):
        gap = Gap("all_reduce", nbytes, "float32", 2, "mpi", "no mpiexec")
        results.add([gap, *measured(Scripted({"gloo": 4e-3}), nbytes=nbytes)])
    results.add([Gap("all_reduce", 4, "float32", 2, "torch", "too small")])
    show(results.records, results.gaps)
    latency, _ = capsys.readouterr().out.split("bandwidth\n")
    assert latency.count("no mpiexec") == latency.count("too small") == 1
    assert "all mpi – " in " ".join(latency.split())


# -- real jobs ------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena([Contestant("shm", 2), Contestant("memcpy", 2)]) as open_arena:
        yield open_arena


def test_arena_loses_only_contestant_of_killed_rank(arena: Arena) -> None:
    processes = arena._running["memcpy"].starter._processes
    os.kill(processes[1].pid, signal.SIGKILL)
    results = list(compare(arena, Task("all_reduce", 4096), Pace(1, 0.01)))
    gaps = [result for result in results if isinstance(result, Gap)]
    assert [(gap.side, gap.failed) for gap in gaps] == [("memcpy", True)]
    assert re.search("rank 1 has ended", gaps[0].reason)
    assert {r.side for r in results if isinstance(r, Record)} == {"shm ordinary"}
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(ArenaError, match="has ended"):
        arena.ask("memcpy", "attempt", side="memcpy")


def test_named_separates_able_and_missing_contestants() -> None:
    pythons = {"openmpi": Path("/a/bin/python"), "mpich": Path("/b/bin/python")}
    able, missing = named(["shm", "mpi", "mpi4py/mpich", "mpi/impi-rt"], pythons, 2)
    assert [contestant.name for contestant in able] == ["shm", "mpi/openmpi", "mpi4py/mpich"]
    assert [str(side) for side in able[0].sides()] == ["shm symmetric", "shm ordinary"]
    assert able[2].python == Path("/b/bin/python")
    assert "impi-rt" in missing["mpi/impi-rt"]
    assert "pip install" in named(["mpi"], {}, 2)[1]["mpi"]
    with pytest.raises(BackendNotFoundError):
        named(["smh"], {}, 2)


def test_contestant_command_has_path_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mpiexec, "command", lambda mpiexec, size: ["mpiexec"])
    ((command, _),) = Contestant("mpi4py", 2, Path("python")).commands(Path("folder"), "address")
    *_, paths, _, _, _ = command  # The paths come before the library, the folder and the address.
    assert Path(paths.split(os.pathsep)[1], "collective", "tools", "bench", "worker.py").exists()


def test_environments_finds_libraries_with_mpiexec_in_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for vendor, programs in {"mpich": ["python", "mpiexec"], "openmpi": ["python"]}.items():
        (tmp_path / vendor / "bin").mkdir(parents=True)
        for name in programs:
            (tmp_path / vendor / "bin" / name).touch()
    assert environments(tmp_path) == {"mpich": tmp_path / "mpich" / "bin" / "python"}
    assert environments(None) == {}


def test_environments_ignores_mpi4py_without_mpiexec(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert environments(tmp_path) == {}
    (tmp_path / "mpiexec").write_text("#!/bin/sh\necho 4.0\n")
    (tmp_path / "mpiexec").chmod(0o755)
    assert list(environments(tmp_path)) == [""]
