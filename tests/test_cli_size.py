"""How many ranks a launch has where no ``-n`` says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from collective.errors import ConfigError
from collective.tools.cli import size
from collective.tools.cli.main import main
from tests.launches import Launches, launches

__all__ = ["launches"]  # the fixture

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "4"}


@pytest.mark.parametrize(
    ("environ", "ranks", "reason"),
    [
        ({}, 2, "2 ranks; -n N"),
        ({**SLURM, "SLURM_NTASKS": "4"}, 4, "4 ranks, as SLURM_TASKS_PER_NODE says; -n N"),
        ({**SLURM, "SLURM_NTASKS_PER_NODE": "4"}, 4, "4 ranks, as SLURM_TASKS_PER_NODE says; "),
        (SLURM, 2, "2 ranks; -n N"),
        (
            {**SLURM, "SLURM_NTASKS": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1",
             "SLURM_TASKS_PER_NODE": "4,3"},
            3, "3 ranks, as SLURM_TASKS_PER_NODE says; on this host of 2 only; -n N",
        ),
        ({"PET_NPROC_PER_NODE": "8"}, 8, "8 ranks, as PET_NPROC_PER_NODE says; -n N"),
        ({"PET_NPROC_PER_NODE": "1", "PET_NNODES": "2:3"}, 1, "1 rank, as PET_NPROC_PER_NODE "
         "says; on this host of 3 only; -n N"),
        ({"PET_NPROC_PER_NODE": "gpu"}, 2, "2 ranks; -n N"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 2, "2 ranks; -n N"),
    ],
    ids=["nobody", "tasks", "tasks-per-node", "no-tasks", "second-host", "torchrun",
         "torchrun-hosts", "torchrun-gpus", "one-process"],
)  # fmt: skip
def test_the_number_is_the_jobs_or_two(environ: dict[str, str], ranks: int, reason: str) -> None:
    found, text = size.default(environ)
    assert found == ranks
    assert text.startswith(reason)


@pytest.mark.parametrize(
    ("environ", "who"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4"}, "process 1 of 4 that torchrun has started"),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
             "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            "process 2 of 3 that openmpi has started",
        ),
        ({"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "2"}, "process 0 of 2 that collective has"),
    ],
    ids=["torchrun", "mpiexec", "collective"],
)  # fmt: skip
def test_one_of_several_processes_starts_no_ranks_unasked(
    environ: dict[str, str], who: str
) -> None:
    with pytest.raises(ConfigError, match=who):
        size.default(environ)


def test_a_list_of_tasks_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE='four'; it must be a list such"):
        size.default({**SLURM, "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "four"})


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("options", "ranks", "error"),
    [
        ([], 2, "collective run: 2 ranks; -n N for another number\n"),
        (["-np", "3"], 3, ""),
        (["-n3"], 3, ""),
    ],
    ids=["default", "-np", "-n"],
)
def test_run_starts_so_many(launches: Launches, options: list[str], ranks: int, error: str) -> None:
    done = launches.run(*options, launches.script("print(size)"))
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {ranks}" for r in range(ranks)]
    assert (done.returncode, done.stderr) == (0, error)


def test_what_cannot_be_run_is_refused_before_a_number_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "absent.py"]) == 2
    assert capsys.readouterr().err == "collective run: script 'absent.py': no such file\n"
