"""One unchanged script under every launcher and over every transport between processes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import warm
from tests.start.test_choice import slurm
from tests.support import interpreter
from tests.support.interpreter import ROOT
from tests.support.mpi_launches import VENDORS, launch_of, needs
from tests.support.network_hosts import free_port

pytestmark = pytest.mark.whole

SCRIPT = str(ROOT / "examples" / "hello.py")
DEADLINE_S = 90.0
SIZE = 2


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete the variables of a launcher that runs the tests themselves."""
    for name in list(os.environ):
        if re.match(r"COLLECTIVE_|SLURM_|OMPI_|PMI|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_", name):
            monkeypatch.delenv(name)


def run(command: Sequence[str], backend: str, **variables: str) -> str:
    done = interpreter.run(
        *command, env=environment(backend), merged=True, timeout=DEADLINE_S, **variables
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def environment(backend: str) -> dict[str, str]:
    chosen = {"COLLECTIVE_BACKEND": backend} if backend != "auto" else {}
    # More OpenMP threads would only compete with other tests for cores.
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **chosen}


def check(printed: str, backend: str, size: int = SIZE) -> None:
    total = float(sum(range(1, size + 1)))
    for rank in range(size):
        line = rf"rank {rank} of {size} on {backend}: .*-> \[{total:g}\. {total:g}\. {total:g}\.\]"
        assert re.search(line, printed), printed


def needs_package_of(backend: str) -> None:
    if backend == "gloo":
        pytest.importorskip("torch")


BACKENDS = pytest.mark.parametrize(("backend", "name"), [("auto", "shm"), ("gloo", "gloo")])


@pytest.mark.parametrize(("backend", "name"), [("auto", "threads"), ("gloo", "gloo")])
def test_hello_runs_under_plain_python(backend: str, name: str) -> None:
    needs_package_of(backend)
    check(run([warm.python(), SCRIPT], backend), name, 1)


@BACKENDS
def test_hello_runs_under_collective_run(backend: str, name: str) -> None:
    needs_package_of(backend)
    command = [warm.python(), "-m", "collective", "run", "-n", str(SIZE), SCRIPT]
    check(run(command, backend), name)


@BACKENDS
def test_hello_runs_under_torchrun(backend: str, name: str) -> None:
    pytest.importorskip("torch")
    command = [warm.python(), "-m", "torch.distributed.run", f"--nproc-per-node={SIZE}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", SCRIPT]
    check(run(command, backend), name)


@BACKENDS
def test_hello_runs_under_slurm(backend: str, name: str) -> None:
    needs_package_of(backend)
    # The process id makes the job unique among concurrent runs of these tests.
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": socket.gethostname()}

    def task(rank: int) -> str:
        variables = slurm(rank, SIZE, rank, 0, str(SIZE), 1)
        return run([warm.python(), SCRIPT], backend, **variables, **job)

    with ThreadPoolExecutor(SIZE) as pool:
        check("".join(pool.map(task, range(SIZE))), name)


@pytest.mark.parametrize(("backend", "name"), [("auto", "shm"), ("mpi", "mpi")])
@pytest.mark.parametrize("vendor", [pytest.param(each, marks=needs(each)) for each in VENDORS])
def test_hello_runs_under_mpiexec(vendor: str, backend: str, name: str) -> None:
    launch = launch_of(vendor)
    command = [*launch.command(SIZE), launch.python, SCRIPT]
    check(run(command, backend), name)


@pytest.mark.parametrize("vendor", [pytest.param(each, marks=needs(each)) for each in VENDORS])
def test_collective_run_calls_mpiexec_for_mpi(vendor: str) -> None:
    launch = launch_of(vendor)
    command = [launch.python, "-m", "collective", "run", "-n", str(SIZE), "--backend", "mpi"]
    printed = run([*command, SCRIPT], "auto")
    check(printed, "mpi")
    assert re.search(r"^collective run: .*mpiexec .*-n 2 .*hello\.py$", printed, re.MULTILINE)


@needs("mpich")
def test_backend_mpi_without_mpiexec_raises_with_remedy(tmp_path: Path) -> None:
    """The variables are set by hand, as under a launcher that does not know MPI."""
    hand = {"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "2", "COLLECTIVE_STORE": str(tmp_path / "s")}
    done = interpreter.run_python(
        SCRIPT, python=launch_of("mpich").python, timeout=DEADLINE_S,
        env={**environment("mpi"), **hand, "COLLECTIVE_START_TIMEOUT": "5"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "mpiexec -n 2" in done.stderr
