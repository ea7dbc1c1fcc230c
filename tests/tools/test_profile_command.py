"""`collective profile`: real runs, printed reports, predictions, and refused arguments."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from collective.algorithms.model import ALGORITHMS, LinkSpeed, Measured, coefficients
from collective.errors import ConfigError
from collective.testing import run_ranks
from collective.tools.cli.main import main
from collective.tools.profile import calibrate
from collective.tools.profile.calibrate import load, measure
from collective.tools.profile.measure import Profile, StepTimes
from collective.tools.profile.predict import predict, to_link
from collective.tools.profile.report import as_json, show
from tests import warm

PROGRAM = """
import time
import numpy as np
import collective
import collective.profile

with collective.init() as comm:
    x = np.ones(1000)
    for i in range(8):
        time.sleep(0.004)
        work = comm.all_reduce(x, out=x, op="max", async_op=True)
        time.sleep(0.002)
        work.wait()
        comm.all_gather(np.ones(2), counts=[2] * comm.size)
        {mark}
    {end}
"""
TORCH = """
import torch
from torch.nn.parallel import DistributedDataParallel
import collective.adapters.torch
torch.distributed.init_process_group("collective")
layers = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(3)])
model = DistributedDataParallel(layers, bucket_cap_mb=1e-4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(4, 30)).sum().backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
SIZES = [8**exponent for exponent in range(1, 8)]


@pytest.fixture
def profiled(tmp_path, monkeypatch, capfd):
    """Return a function that profiles two thread ranks and returns code, output and JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*options, mark="collective.profile.step()", end="pass"):
        Path("train.py").write_text(PROGRAM.format(mark=mark, end=end))
        code = main(["profile", "-n", "2", "--backend", "threads", "--json", "found.json",
                     *options, "train.py"])  # fmt: skip
        return code, capfd.readouterr(), json.loads(Path("found.json").read_text())

    return run


def test_profile_command_runs_and_judges_a_program(profiled):
    Path("bench.json").write_text(json.dumps({"results": [m._asdict() for m in figures()]}))
    code, output, report = profiled("--predict", "8,64", "--link", "10us,12GB/s", "--per-host", "4",
                                 "--from", "bench.json", "--trace", "kept")  # fmt: skip
    assert code == 0, output.err
    assert {path.name for path in Path("kept").iterdir()} == {"rank-00000.json", "rank-00001.json"}
    operations = {entry["name"]: entry for entry in report["operations"]}
    assert operations["all_reduce"]["calls"] == operations["all_gather"]["calls"] == 8
    assert operations["all_reduce"]["nbytes"] == 8 * 8000
    assert operations["all_gather"]["nbytes"] == 8 * 32
    assert 0 <= operations["all_reduce"]["hidden"] <= operations["all_reduce"]["background"]
    steps = report["steps"]
    assert steps["how"] == "marks of the program"
    assert steps["count"] == 7
    assert steps["comp"] >= 0.006  # the time that the program sleeps outside of calls
    assert steps["step"] >= steps["sync"] >= steps["waiting"] >= 0
    assert [*map(tuple, steps["calls"])] == [("all_gather", 32, 1), ("all_reduce", 8000, 1)]
    ratio = steps["sync"] / steps["comp"]
    assert report["verdict"]["ratio"] == pytest.approx(ratio)
    assert report["verdict"]["pays"] == (ratio < 1)
    assert "T_sync / T_comp" in output.out
    assert ("2 ranks pay;" in output.out) == (ratio < 1)
    best = report["prediction"]["fits"][0]
    assert best["algorithm"] == "ring"
    assert best["typical"] < 1e-6
    assert [entry[0]["ranks"] for entry in report["prediction"]["predictions"]] == [8, 64]
    assert "4 rank(s) a host" in output.out


def test_profile_command_returns_exit_code_and_still_reports(profiled):
    code, output, report = profiled(mark="pass", end="raise SystemExit(7)")
    assert code == 7
    assert report["steps"]["how"].startswith("the repeated all_reduce of 8,000 bytes")
    assert "ended with exit code 7" in output.out
    assert report["prediction"] is None


def _truth(op, nbytes, ranks):
    return coefficients(op, nbytes, ranks, ranks, "ring") @ [3e-6, 1e-10, 3e-6, 1e-10, 3e-11]


def test_prediction_without_steps_names_reason(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import collective\ncollective.init().barrier()\n")
    code = main(["profile", "-n", "2", "--backend", "threads", "--predict", "8", "--json",
                 "found.json", "train.py"])  # fmt: skip
    assert code == 2
    shown = capfd.readouterr()
    why = "profile --predict: nothing is predicted, since no training steps were found. Call "
    assert why in shown.err
    assert "2 rank(s) over threads" in shown.out
    found = json.loads(Path("found.json").read_text())
    assert (found["prediction"], found["prediction_error"][: len(why)]) == (None, why)


def test_timing_past_its_limit_raises_with_remedy(monkeypatch):
    monkeypatch.setattr(calibrate, "_RUN_S", 0.01)
    with pytest.raises(ConfigError, match=r"2 ranks took longer than 0\.01 s.*--from"):
        calibrate.run([2], "threads")


def test_profile_command_takes_steps_of_ddp_from_optimizer(tmp_path, monkeypatch):
    """The buckets are equal calls, so the calls alone do not show how many make a step."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm.python())
    Path("train.py").write_text(TORCH)
    assert main(["profile", "-n", "2", "--backend", "shm", "--json", "found.json", "train.py"]) == 0
    steps = json.loads(Path("found.json").read_text())["steps"]
    assert (steps["how"], steps["guessed"], steps["count"]) == ("steps of the optimizer", False, 7)
    assert steps["calls"] == [["all_reduce", 120, 3], ["all_reduce", 3600, 3]]


# -- predictions --------------------------------------------------------------------------------


def steps_of(**changes):
    times = {
        "how": "marks",
        "guessed": False,
        "count": 9,
        "step": 0.012,
        "comp": 0.01,
        "sync": 0.002,
        "waiting": 0.0005,
        "background": 0.0,
        "hidden": 0.0,
        "window": 0.0,
        "comp_by_rank": [0.01, 0.01],
        "calls": [("all_reduce", 1 << 20, 2), ("barrier", 0, 1), ("empty", 64, 1)],
    }
    return StepTimes(**{**times, **changes})


def figures():
    return [Measured(op, n, p, float(_truth(op, n, p)))
            for op in ("all_reduce", "all_gather") for p in (2, 4) for n in SIZES]  # fmt: skip


def test_predict_sums_the_parts_of_a_step():
    outlook = predict(steps_of(), 2, figures(), [64], LinkSpeed(1e-5, 1 / 12e9), 8)
    assert outlook.fits[0].algorithm == "ring"
    (prediction,) = [p for p in outlook.predictions[0] if p.algorithm == "ring"]
    far = 126 * (1e-5 + (1 << 20) / 64 / 12e9) + 63 / 64 * (1 << 20) * 3e-11
    barrier = 3 * 3e-6 + 3 * 1e-5
    assert prediction.moving == pytest.approx(2 * far + barrier, rel=1e-5)
    assert prediction.low == pytest.approx(prediction.high, rel=1e-5)
    here = 2 * float(_truth("all_reduce", 1 << 20, 2)) + 3e-6
    assert outlook.here == pytest.approx(here, rel=1e-5)
    assert outlook.excess == pytest.approx(0.0015 - here, rel=1e-4)
    assert prediction.sync == pytest.approx(0.0005 + outlook.excess + prediction.moving)
    assert prediction.speedup == pytest.approx(64 * 0.01 / (0.01 + prediction.sync))
    assert [p.moving for p in outlook.predictions[0]] == sorted(
        p.moving for p in outlook.predictions[0]
    )
    assert {p.algorithm for p in outlook.predictions[0]} == set(ALGORITHMS)


def test_predict_for_measured_ranks_equals_measurement():
    outlook = predict(steps_of(), 2, figures(), [1, 2])
    assert [p.sync for p in outlook.predictions[1]] == pytest.approx([0.002] * len(ALGORITHMS))
    assert outlook.predictions[0][0].sync == 0
    assert outlook.predictions[0][0].speedup == pytest.approx(1)


def test_predict_limits_hiding_to_time_of_computing():
    # At first 0.4 ms of 0.5 ms are hidden; the program computes for 2 ms.
    hiding = steps_of(sync=0.0001, waiting=0.0, background=0.0005, hidden=0.0004, window=0.002,
                      calls=[("all_reduce", 1 << 20, 1)])  # fmt: skip
    slow = LinkSpeed(1e-3, 1e-9)
    outlook = predict(hiding, 2, figures(), [2, 64], slow, 1)
    (prediction,) = [p for p in outlook.predictions[1] if p.algorithm == outlook.fits[0].algorithm]
    total = prediction.moving + outlook.excess
    assert prediction.sync == pytest.approx(total - min(0.8 * total, 0.002))
    assert outlook.predictions[1][0].moving > 0.01


@pytest.mark.parametrize(
    ("text", "alpha", "rate"),
    [("10us,12GB/s", 1e-5, 12e9), ("1.5 ms, 10 Gbit/s", 1.5e-3, 1.25e9), ("0s,1GiB/s", 0, 2**30)],
)
def test_to_link_reads_a_time_and_a_rate(text, alpha, rate):
    assert to_link(text) == pytest.approx((alpha, 1 / rate))


@pytest.mark.parametrize("text", ["", "10us", "12GB/s,10us", "-1us,1GB/s", "1us,0GB/s", "1us,1GB"])
def test_to_link_of_invalid_text_raises_value_error(text):
    with pytest.raises(ValueError, match=r"rate"):
        to_link(text)


# -- the transport's figures --------------------------------------------------------------------


def _measure(comm):
    return measure(comm, sizes=(8, 4096), seconds=0.002)


def test_measure_times_a_transport():
    first, second = run_ranks(2, _measure)
    assert first == second
    assert [(m.op, m.bytes, m.ranks) for m in first] == [
        ("all_reduce", 8, 2), ("all_gather", 16, 2),
        ("all_reduce", 4096, 2), ("all_gather", 4096, 2),
    ]  # fmt: skip
    assert all(0 < m.seconds < 20 for m in first)


def test_load_finds_measurements_in_nested_json(tmp_path):
    row = {"op": "all_reduce", "bytes": 8, "ranks": 2, "seconds": 1e-6, "dtype": "float32"}
    other = {**row, "backend": "gloo", "ranks": 4}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"machine": {}, "tables": [{"rows": [row, other]}, {"op": 1}]}))
    assert load(file) == [Measured("all_reduce", 8, 2, 1e-6), Measured("all_reduce", 8, 4, 1e-6)]
    assert load(file, "shm") == [Measured("all_reduce", 8, 2, 1e-6)]
    # Of rows of `collective bench` load() skips short calls measured back to back, wrong results,
    # and ordinary memory.
    rows = [{**row, "memory": "symmetric", "method": "latency", "backend": "shm", "wrong": 0}]
    rows += [{**rows[0], "memory": "ordinary"}, {**rows[0], "method": "bandwidth"}]
    rows += [{**rows[0], "wrong": 3}, {**rows[0], "op": "send_recv", "memory": ""}]
    file.write_text(json.dumps(rows))
    assert load(file) == [Measured("all_reduce", 8, 2, 1e-6), Measured("send", 8, 2, 1e-6)]
    file.write_text(json.dumps(rows[1:4]))  # rows of a transport without symmetric memory
    assert load(file) == [Measured("all_reduce", 8, 2, 1e-6)]
    file.write_text("{}")
    with pytest.raises(ConfigError, match="no measurements; it needs objects with the keys op, b"):
        load(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"bench\.json cannot be read as JSON"):
        load(file)


# -- printed reports ----------------------------------------------------------------------------


def shown(result, outlook=None, width=120):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(console, result, outlook)
    console.file.close()
    json.dumps(as_json(result, outlook), allow_nan=False)
    return console.export_text()


def a_profile(**changes):
    about = {"rank": 0, "size": 4, "local_size": 4, "cores": 2, "backend": "nccl"}
    values = {"about": about, "ranks": 3, "seconds": 1.0, "operations": [], "steps": steps_of(),
             "clock_error": 2e-5}  # fmt: skip
    return Profile(**{**values, **changes})


def test_show_prints_limits_of_the_figures():
    result = a_profile()
    result.about["enqueues"] = True
    text = " ".join(shown(result).split())
    assert "only enqueued" in text
    assert "clocks may be 20 µs apart" in text
    assert "1 of 4 ranks left no trace" in text
    assert "4 ranks share 2 core(s)" in text
    assert "No training steps found" in shown(a_profile(steps=None))


def test_show_of_steps_without_computing_never_pays():
    text = shown(a_profile(ranks=4, steps=steps_of(comp=0.0)))
    assert "4 ranks do not pay" in text


def test_show_prints_assumptions_of_predictions():
    outlook = predict(steps_of(), 2, figures(), [8, 16384])
    text = " ".join(shown(a_profile(), outlook).split())
    assert "16,384" in text
    assert "28 measurements with 2, 4 ranks on one host" in text
    assert "connected as those of this host: give --link" in text
    assert np.isfinite(outlook.predictions[1][0].sync)
