"""`collective profile`: real runs and printed reports."""

import json
import re
import sys
from pathlib import Path

import pytest

from collective.tools.cli.main import main
from collective.tools.profile.measure import Profile, StepTimes
from collective.tools.profile.report import as_json, show
from collective.tools.show import Console
from tests import warm

pytestmark = pytest.mark.whole

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
# A part of the data for each rank, work, and the results back on rank 0, as in programs of MPI.
LOOPS = {
    "scatter and gather": """
for step in range(8):
    part = comm.scatter(rows if comm.rank == 0 else None)
    time.sleep(0.004)
    comm.gather(part)
""",
    "equal buckets": """
for step in range(8):
    part = comm.scatter(rows if comm.rank == 0 else None)
    time.sleep(0.004)
    for bucket in buckets:
        comm.all_reduce(bucket, out=bucket)
    comm.gather(part)
""",
    "buckets of different sizes": """
for step in range(8):
    time.sleep(0.004)
    for end in (100, 200, 100, 400, 100):
        comm.all_reduce(rows[0, :end], out=rows[0, :end])
""",
    "a number of buckets that changes": """
for step in range(8):
    part = comm.scatter(rows if comm.rank == 0 else None)
    time.sleep(0.004)
    for bucket in buckets[step % 3 :]:
        comm.all_reduce(bucket, out=bucket)
    comm.gather_object("x" * step)
""",
    "one call": """
for step in range(8):
    time.sleep(0.004)
    comm.all_reduce(rows, out=rows)
""",
    "phases": """
comm.broadcast(rows)
for warm in range(3):
    comm.all_gather(rows)
for epoch in range(2):
    for step in range(5):
        part = comm.scatter(rows if comm.rank == 0 else None)
        time.sleep(0.02)
        for bucket in buckets:
            comm.all_reduce(bucket, out=bucket)
        comm.gather(part)
    for batch in range(4):
        time.sleep(0.001)
        comm.all_reduce(rows[0, :1], op="avg")
""",
    "phases of one call": """
comm.barrier()
for epoch in range(2):
    for step in range(5):
        time.sleep(0.02)
        comm.all_reduce(rows, out=rows)
    for batch in range(4):
        time.sleep(0.001)
        comm.all_reduce(rows[0, :1], op="avg")
""",
}
FOUND = {
    "scatter and gather": (7, ["scatter", "gather"]),
    "equal buckets": (7, ["scatter", "all_reduce", "gather"]),
    "buckets of different sizes": (7, ["all_reduce"]),
    "a number of buckets that changes": (7, ["scatter", "all_reduce", "gather"]),
    "one call": (7, ["all_reduce"]),
    "phases": (8, ["scatter", "all_reduce", "gather"]),
    "phases of one call": (8, ["all_reduce"]),
}
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


@pytest.fixture
def profiled(tmp_path, monkeypatch, capfd):
    """Return a function that profiles two thread ranks and returns code, output and JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*options, program=PROGRAM, mark="collective.profile.step()", end="pass"):
        Path("train.py").write_text(program.format(mark=mark, end=end))
        code = main(["profile", "-n", "2", "--backend", "threads", "--json", "found.json",
                     *options, "train.py"])  # fmt: skip
        return code, capfd.readouterr(), json.loads(Path("found.json").read_text())

    return run


def test_profile_command_runs_and_judges_a_program(profiled):
    code, output, report = profiled("--trace", "kept")
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
    ratio = steps["sync"] / steps["comp"]
    assert report["verdict"]["ratio"] == pytest.approx(ratio)
    assert report["verdict"]["pays"] == (ratio < 1)
    assert "T_sync / T_comp" in output.out
    assert ("2 ranks pay;" in output.out) == (ratio < 1)


def test_profile_command_returns_exit_code_and_still_reports(profiled):
    code, output, report = profiled(mark="break", end="raise SystemExit(7)")
    assert code == 7
    assert report["steps"] is None
    assert "collective.profile.step() once in each step" in output.out.replace("\n", " ")
    assert "ended with exit code 7" in output.out


@pytest.mark.parametrize("loop", LOOPS)
def test_profile_command_finds_steps_without_marks_by_whole_loop(profiled, loop):
    head = "import time\nimport numpy as np\nimport collective\ncomm = collective.init()\n"
    data = "rows = np.ones((comm.size, 1000))\nbuckets = [np.ones(1000) for _ in range(4)]\n"
    _, output, report = profiled(program=head + data + LOOPS[loop] + "comm.close()\n")
    count, operations = FOUND[loop]
    steps = report["steps"]
    assert steps is not None, output.out
    assert steps["count"] == count, steps["how"]
    assert re.findall(r"(\w+) at train\.py:\d+", steps["how"]) == operations
    assert steps["comp"] >= 0.004  # the time that the program sleeps in a step


def test_profile_command_takes_steps_of_ddp_from_optimizer(tmp_path, monkeypatch):
    """The buckets are equal calls, so the calls alone do not show how many make a step."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm.python())
    Path("train.py").write_text(TORCH)
    assert main(["profile", "-n", "2", "--backend", "shm", "--json", "found.json", "train.py"]) == 0
    steps = json.loads(Path("found.json").read_text())["steps"]
    assert (steps["how"], steps["count"]) == ("steps of the optimizer", 7)


# -- printed reports ----------------------------------------------------------------------------


def steps_of(**changes):
    times = {
        "how": "marks",
        "count": 9,
        "step": 0.012,
        "comp": 0.01,
        "sync": 0.002,
        "waiting": 0.0005,
        "background": 0.0,
        "hidden": 0.0,
        "comp_by_rank": [0.01, 0.01],
    }
    return StepTimes(**{**times, **changes})


@pytest.fixture
def shown(monkeypatch, capsys):
    """Return a function that returns a report as text."""
    monkeypatch.setenv("COLUMNS", "120")

    def text_of(result):
        show(Console(), result)
        json.dumps(as_json(result), allow_nan=False)
        return capsys.readouterr().out

    return text_of


def a_profile(**changes):
    about = {"rank": 0, "size": 4, "local_size": 4, "cores": 2, "backend": "nccl"}
    values = {"about": about, "ranks": 3, "seconds": 1.0, "operations": [], "steps": steps_of(),
             "clock_error": 2e-5}  # fmt: skip
    return Profile(**{**values, **changes})


def test_show_prints_limits_of_the_figures(shown):
    result = a_profile()
    result.about["enqueues"] = True
    text = " ".join(shown(result).split())
    assert "only enqueued" in text
    assert "clocks may be 20 µs apart" in text
    assert "1 of 4 ranks left no trace" in text
    assert "4 ranks share 2 core(s)" in text
    assert "No training steps found" in shown(a_profile(steps=None))


def test_show_of_steps_without_computing_never_pays(shown):
    text = shown(a_profile(ranks=4, steps=steps_of(comp=0.0)))
    assert "4 ranks do not pay" in text
