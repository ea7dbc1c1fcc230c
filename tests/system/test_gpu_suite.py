"""The tests for machines with a GPU, exercised without a GPU, over the ABI fake.

Only a GPU can show what those tests say about NCCL and GPUs. This module checks that they run, that
they pass over a correct library, and that ``make test-gpu`` reports truthfully without a GPU.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from collective import cuda
from tests.support.interpreter import ROOT, run_python
from tests.support.nccl_processes import needs_compiler

pytestmark = pytest.mark.whole

RUN = ROOT / "tests" / "gpu" / "run.py"
# Some checks of each kind: in place or not, staged, asynchronous, messages, memory, a mismatch, a
# death.
CHECKS = """
    check_all_reduce check_all_gather check_reductions_of_layouts check_order_rank check_scan
    check_async check_async_many check_sendrecv check_send_recv_layouts check_empty_views
    check_empty_mixed check_mismatch_names_ranks check_left_peer check_split
""".split()
# These checks suffice to see that NCCL gets the option, which exists since NCCL 2.30.
SHARING = "multirank and (check_scan or check_split or check_sendrecv)"

no_gpu = pytest.mark.skipif(cuda.device_count() > 0, reason="there is a GPU")


@pytest.mark.parametrize(
    ("asked", "why"),
    [({}, "make test-gpu runs them"), ({"GPU_TESTS_RANKS": "2"}, "needs a GPU")],
    ids=["by pytest alone", "by make test-gpu"],
)
@no_gpu
def test_gpu_tests_are_skipped_without_a_gpu(asked: dict[str, str], why: str) -> None:
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", **asked)
    assert done.returncode == 5, done.stdout + done.stderr  # pytest collected no tests.
    assert done.stdout.count(why) == 2


def make_test_gpu(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return run_python(RUN, *words, **environ)


def test_make_test_gpu_without_a_gpu_reports_that_nothing_was_tested(tmp_path: Path) -> None:
    nowhere = {"COLLECTIVE_CUDA_LIBRARY": str(tmp_path / "libcuda.so.1")}
    done = make_test_gpu(nowhere, "--folder", str(tmp_path))
    assert done.returncode == 0
    assert "there is no GPU here" in done.stdout
    assert "Nothing was tested" in done.stdout
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_make_test_gpu_with_driver_and_no_gpu_reports_it(tmp_path: Path) -> None:
    from tests import fakes

    done = make_test_gpu(fakes.environment(devices=0), "--folder", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "the driver sees none" in done.stdout or "error 100" in done.stdout


@no_gpu
@needs_compiler
def test_make_test_gpu_without_framework_fails(tmp_path: Path) -> None:
    from tests import fakes

    done = make_test_gpu(fakes.environment(), "--folder", str(tmp_path))
    assert done.returncode == 1
    assert "nothing was tested" in done.stderr
    assert "PyTorch with CUDA" in done.stderr


@needs_compiler
def test_make_test_gpu_passes_on_fake_and_writes_summary(tmp_path: Path) -> None:
    from tests import fakes

    chosen = f"test_gpu_streams or (hostid and ({' or '.join(CHECKS)})) or ({SHARING})"
    environ = {**fakes.environment(23003, devices=1, log=0), "GPU_TESTS_SLOW_S": "0.05"}
    words = ["--fake", "--folder", str(tmp_path), "--pytest", f"-k '{chosen}'"]
    done = make_test_gpu(environ, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "gpu-summary.md").read_text()
    for row in (
        r"\| adapters, .*\| nothing was tested \|",
        r"\| streams, .*\| passed \| 8 \| 0 \| 2 \|",
        r"\| conformance suite \| passed \| [45]\d \| 0 \| 0 \|",
        r"all_reduce\(x, out=x\) +DeviceArray +sync ",
        r"\| CUDA of the driver \| \d+\.\d+ \|",
    ):
        assert re.search(row, summary), summary
