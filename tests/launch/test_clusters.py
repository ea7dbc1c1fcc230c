"""The scripts of docs/clusters.md: a batch system or Kubernetes would run them as these tests do.

Hosts are network namespaces. ``srun`` is a stand-in on PATH with the variables of a recorded job.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_pages import BLOCKS
from tests.start.test_world import SRUN
from tests.support.network_hosts import Hosts, needs_hosts

pytestmark = pytest.mark.whole

EXPECTED = [f"rank {rank} of 4 on host{rank // 2}: 6" for rank in range(4)]

# Variables of the first host of a job of Slurm 23.11, which asked for two tasks on each of two.
SBATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "host[0-1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    needs_hosts()
    with Hosts(2, tmp_path) as made:
        yield made


def block(page: str, language: str, words: str) -> str:
    """Return the one block of a page in ``language`` that contains ``words``."""
    (found,) = [
        b.text for b in BLOCKS if (b.document, b.language) == (page, language) and words in b.text
    ]
    return found


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Write the page's program, and ``python`` and ``collective`` into a folder for PATH."""
    (tmp_path / "train.py").write_text(block("clusters.md", "python", "# train.py"))
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, options in (("python", ""), ("collective", "-m collective")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        (folder / name).chmod(0o700)
    return folder


def path_of(*folders: Path) -> str:
    """Return a PATH without scontrol, as in an image without Slurm's commands."""
    found = [*map(str, folders), *os.environ["PATH"].split(os.pathsep)]
    assert not [folder for folder in found if (Path(folder) / "scontrol").exists()]
    return os.pathsep.join(found)


def lines_of(text: str) -> list[str]:
    return sorted(re.sub(r"^\[\d\] ", "", line) for line in text.splitlines() if line)


def batch(hosts: Hosts, folder: Path, script: str, **variables: str) -> list[str]:
    """Run a batch script on the first host, as Slurm does; return its output, sorted."""
    (folder / "script.sh").write_text(script)
    path = path_of(folder, hosts.ssh())
    command = ["bash", str(folder / "script.sh")]
    job = hosts.start([(0, command, {**SBATCH, "PATH": path, **variables})])
    return lines_of(job.succeed())


def srun(hosts: Hosts, folder: Path) -> None:
    """Write ``srun``: four tasks on two hosts, with the variables of a recorded step.

    Slurm's own passes whole lines on. Here each task's output is kept until its end.
    """
    tasks = []
    for rank in range(4):
        own = {
            **SRUN,
            "SLURM_JOB_NODELIST": "host[0-1]",
            "SLURM_STEP_NODELIST": "host[0-1]",
            "SLURM_LOCALID": str(rank % 2),
            "SLURM_NODEID": str(rank // 2),
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        }
        host = hosts.hosts[rank // 2]
        words = [f"{name}={value}" for name, value in own.items()]
        entering = host.entering("env", *words, f"TMPDIR={host.directory}")
        output = folder / f"output{rank}"
        tasks.append(f'{shlex.join(entering)} "$@" > {output} & pids="$pids $!"\n')
    text = '#!/bin/sh\nwhile case "$1" in -*) ;; *) false ;; esac; do shift; done\n'
    text += "".join(tasks) + "for pid in $pids; do wait $pid || exit 1; done\n"
    text += f"cat {folder}/output*\n"
    (folder / "srun").write_text(text)
    (folder / "srun").chmod(0o700)


def test_srun_script_of_page_runs_on_two_hosts(hosts: Hosts, program: Path, tmp_path: Path) -> None:
    secret = tmp_path / "job.secret"
    secret.write_text("a secret of this test, and of no other\n")
    secret.chmod(0o600)
    srun(hosts, program)
    script = block("how-to/slurm.md", "sh", "srun --kill-on-bad-exit=0").replace("ib0", "eth0")
    assert batch(hosts, program, script, HOME=str(tmp_path)) == EXPECTED


def test_hosts_auto_script_of_page_runs_on_two_hosts(hosts: Hosts, program: Path) -> None:
    script = block(
        "how-to/slurm.md",
        "sh",
        "#SBATCH --nodes=2 --ntasks-per-node=2\n\ncollective run --hosts auto",
    )
    assert batch(hosts, program, script) == EXPECTED


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_hosts_auto_runs_in_jobs_of_pbs_and_lsf(
    hosts: Hosts, program: Path, tmp_path: Path, variable: str
) -> None:
    (tmp_path / "nodes").write_text("host0\nhost0\nhost1\nhost1\n")
    path = path_of(program, hosts.ssh())
    command = ["collective", "run", "--hosts", "auto", "train.py"]
    variables = {"PATH": path, variable: str(tmp_path / "nodes")}
    job = hosts.start([(0, ["env", *command], variables)])
    assert lines_of(job.succeed()) == EXPECTED


# -- Kubernetes -------------------------------------------------------------------------------


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the page's manifest")
    service, job = yaml.safe_load_all(block("clusters.md", "yaml", "kind: Job"))
    return service, job


def variables_of(container: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return a container's variables as Kubernetes sets them in the pod with this index."""
    found = {}
    for entry in container["env"]:
        if "value" in entry:
            value = entry["value"]
            assert isinstance(value, str)  # Kubernetes refuses numbers
        elif "fieldRef" in entry["valueFrom"]:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            value = str(index)
        else:
            assert entry["valueFrom"]["secretKeyRef"] == {"name": "train", "key": "secret"}
            value = "0123456789abcdef" * 4
        found[entry["name"]] = value
    return found


def test_pods_of_page_meet(hosts: Hosts, program: Path) -> None:
    service, job = documents()
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    name = job["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == len(hosts.hosts)
    assert service["metadata"]["name"] == spec["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    # The names that a pod of an indexed Job has through the service.
    hosts.name({f"{name}-{index}.{spec['subdomain']}": index for index in range(2)})
    commands = [
        (index, ["env", *container["command"]],
         {**variables_of(container, index), "PATH": path_of(program)})
        for index in range(2)
    ]  # fmt: skip
    text = hosts.start(commands).succeed()
    assert lines_of(text) == [f"rank {rank} of 2 on host{rank}: 1" for rank in range(2)]
