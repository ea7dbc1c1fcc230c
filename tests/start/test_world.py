"""Place of this process under each launcher, and the store where its ranks meet.

The variables are from real launches with Intel MPI 2021.18, Open MPI 5.0.11, MPICH 5.0.2 and
torchrun of PyTorch 2.13. The variables of Slurm are from logs that users published, and those of
the launchers in OTHERS from their documentation and sources.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import ConfigError, RendezvousError
from collective.start import choice
from collective.start.config import load
from collective.start.launchers import Launched, detect, names_of_place
from collective.start.rendezvous import expand, from_environment
from collective.start.resolver import build
from collective.start.stores import FileStore, LateStore
from collective.start.tcp_store import TcpStore
from tests.support.interpreter import run
from tests.support.network_hosts import free_port

OURS = {
    "COLLECTIVE_RANK": "1",
    "COLLECTIVE_SIZE": "4",
    "COLLECTIVE_LOCAL_RANK": "1",
    "COLLECTIVE_LOCAL_SIZE": "4",
    "COLLECTIVE_STORE": "/tmp/collective-0/run-1",
}
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "44093",
    "OMP_NUM_THREADS": "1",
    "RANK": "1",
    "ROLE_NAME": "default",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "8e07e32b-7373-4e9d-b19a-6c2d68c7a511",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_VERSION": "5.0.11",
    "PMIX_NAMESPACE": "prterun-vm-3333@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
INTELMPI = {
    "HYDRA_LAUNCH_TYPE": "2",
    "I_MPI_HYDRA_TOPOLIB": "ipl2",
    "I_MPI_HYDRA_UUID": "fc0c0000-cda9-f264-c260-06004de81c3e",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "9",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
MPICH = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "vm",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
SRUN = {
    "SLURM_GTIDS": "4,5,6",
    "SLURM_JOB_ID": "134",
    "SLURM_JOBID": "134",
    "SLURM_LAUNCH_NODE_IPADDR": "172.31.82.82",
    "SLURM_LOCALID": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NPROCS": "7",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_TASK_PID": "29227",
}
SBATCH = {
    "SLURM_GTIDS": "0",
    "SLURM_JOBID": "200505",
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NAME": "test-multi-nodes",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_TASK_PID": "16360",
}
SALLOC = {
    "SLURM_JOB_ID": "200506",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "4",
}
# The shell of salloc as a step of its own (LaunchParameters=use_interactive_step).
SALLOC_STEP = {
    **SALLOC,
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}
ALL = {
    "collective": OURS,
    "torchrun": TORCHRUN,
    "openmpi": OPENMPI,
    "intelmpi": INTELMPI,
    "mpich": MPICH,
    "slurm": SRUN,
}

PET = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
KUBEFLOW = {
    "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2",
}  # fmt: skip
DEEPSPEED = {
    "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "RANK": "1",
    "MASTER_ADDR": "node1", "MASTER_PORT": "29500", "WORLD_SIZE": "2",
}  # fmt: skip
FLUX = {
    "FLUX_JOB_ID": "f2e73NP", "FLUX_JOB_NNODES": "1", "FLUX_JOB_SIZE": "2", "PMI_FD": "9",
    "FLUX_TASK_LOCAL_ID": "1", "FLUX_TASK_RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip
PALS = {
    "PALS_APID": "5", "PALS_LOCAL_RANKID": "1", "PALS_NODEID": "0", "PALS_RANKID": "1",
    "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PMI_RANK": "1", "PMI_SIZE": "2",
}  # fmt: skip


def four(prefix: str) -> dict[str, str]:
    names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"
    return dict(zip((prefix + name for name in names), "1212", strict=True))


GFORKER = {"PMI_FD": "3", "PMI_RANK": "1", "PMI_SIZE": "2"}
MVAPICH = {**four("MV2_COMM_WORLD_"), **GFORKER, "MPISPAWN_ID": "0"}
OTHERS = {
    "kubeflow": {**KUBEFLOW, **PET},
    "deepspeed": DEEPSPEED,
    "flux": FLUX,
    "pals": PALS,
    "mvapich": MVAPICH,
    "jsrun": {**four("JSM_NAMESPACE_"), "PMIX_NAMESPACE": "7", "PMIX_RANK": "1"},
    "horovod": {**four("HOROVOD_"), "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"},
}


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME")}
    # COLLECTIVE_SECRET=none silences the warning that start/test_sealed_store.py tests.
    monkeypatch.setattr(os, "environ", {**environ, "COLLECTIVE_SECRET": "none"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def world(environ: Mapping[str, str] | None = None, **arguments: object) -> World:
    os.environ.update(environ or {})
    config = load(arguments)
    return build(config, choice.choose(config))


# -- detection ---------------------------------------------------------------------------


def detected(environ: Mapping[str, str]) -> Launched:
    launched = detect(environ)
    assert launched is not None
    return launched


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("collective", (1, 4, 1, 4)),
        ("torchrun", (1, 2, 1, 2)),
        ("openmpi", (1, 2, 1, 2)),
        ("intelmpi", (1, 2, 1, 2)),
        ("mpich", (1, 2, 1, 2)),
        ("slurm", (6, 7, 2, 3)),
        ("kubeflow", (1, 2, 0, 1)),
        *((name, (1, 2, 1, 2)) for name in OTHERS if name != "kubeflow"),
    ],
)
def test_detect_reads_place_from_each_launcher(
    launcher: str, expected: tuple[int, int, int, int]
) -> None:
    launched = detected((ALL | OTHERS)[launcher])
    assert launched.launcher == launcher
    assert (launched.rank, launched.size, launched.local_rank, launched.local_size) == expected
    assert launched.job


@pytest.mark.parametrize("environ", [{}, SBATCH, SALLOC, SALLOC_STEP], ids=str)
def test_detect_without_launcher_returns_none(environ: dict[str, str]) -> None:
    assert detect(environ) is None


@pytest.mark.parametrize("step", ["extern", "batch", "4294967291"])
def test_detect_ignores_slurm_steps_not_from_srun(step: str) -> None:
    assert detect({**SRUN, "SLURM_STEP_ID": step}) is None


@pytest.mark.parametrize("inner", list(ALL))
def test_detect_prefers_inner_launcher(inner: str) -> None:
    order = list(ALL)
    environ: dict[str, str] = {}
    for outer in order[order.index(inner) :]:
        # Intel MPI and MPICH share variables, and neither is started inside the other.
        if {inner, outer} != {"intelmpi", "mpich"}:
            environ.update({**ALL[outer], **environ})
    launched = detected(environ)
    assert launched.launcher == inner


def test_detect_takes_srun_with_pmi_as_slurm() -> None:
    launched = detected({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7", "PMI_FD": "9"})
    assert (launched.launcher, launched.local_size) == ("slurm", 3)


def test_detect_takes_srun_on_cray_as_slurm() -> None:
    assert detected({**PALS, **SRUN}).launcher == "slurm"


@pytest.mark.parametrize("outer", ["flux", "pals", "mvapich"])
def test_detect_prefers_mpiexec_inside_another_launcher(outer: str) -> None:
    assert detected({**OTHERS[outer], **MPICH}).launcher == "mpich"


def test_detect_takes_empty_variables_as_unset() -> None:
    assert detect({"RANK": "", "WORLD_SIZE": " "}) is None
    assert detected({**OPENMPI, "RANK": "", "WORLD_SIZE": ""}).launcher == "openmpi"


def test_detect_takes_process_in_pod_as_the_only_one_there() -> None:
    in_pod = {**KUBEFLOW, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    launched = detected(in_pod)
    assert (launched.local_rank, launched.local_size, launched.hosts) == (0, 1, 2)
    # A program that sets RANK and WORLD_SIZE itself has several processes in one pod.
    launched = detected({**in_pod, "MASTER_ADDR": "localhost"})
    assert (launched.local_rank, launched.local_size) == (1, 2)


def test_detect_reads_local_size_of_flux_from_numbers_of_tasks_and_nodes() -> None:
    launched = detected({**FLUX, "FLUX_JOB_SIZE": "6", "FLUX_JOB_NNODES": "3"})
    assert (launched.local_size, launched.hosts) == (2, 3)


def test_detect_takes_only_process_of_unknown_process_manager_as_alone() -> None:
    launched = detected({"PMI_RANK": "0", "PMI_SIZE": "1"})
    assert (launched.size, launched.local_size) == (1, 1)


def test_detect_ignores_pmi_in_shell_of_interactive_step() -> None:
    assert detect({**SALLOC_STEP, **GFORKER, "PMIX_RANK": "0"}) is None


def test_detect_takes_mpiexec_in_batch_script_as_mpi() -> None:
    launched = detected({**SBATCH, **MPICH})
    assert launched.launcher == "mpich"


@pytest.mark.parametrize(
    ("counts", "node", "here"),
    [("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("2(x3)", "7", 2), ("5", "0", 5)],
)
def test_detect_reads_local_size_from_slurm_tasks_per_node(
    counts: str, node: str, here: int
) -> None:
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}
    launched = detected({**environ, "SLURM_PROCID": "1", "SLURM_LOCALID": "1"})
    assert launched.local_size == here


def test_detect_takes_rank_and_size_by_hand_as_one_host() -> None:
    for address in ({}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "::1"}):
        launched = detected({"RANK": "2", "WORLD_SIZE": "3", **address})
        assert (launched.local_rank, launched.local_size) == (2, 3)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({**TORCHRUN, "RANK": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1'"),
        ({**TORCHRUN, "RANK": ""}, "RANK is not set"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 with WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, "LOCAL_RANK"),
        ({"COLLECTIVE_RANK": "0"}, "COLLECTIVE_SIZE"),
        ({**OURS, "COLLECTIVE_RANK": "4"}, "COLLECTIVE_RANK=4 with COLLECTIVE_SIZE=4"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        (GFORKER, "MPI_LOCALRANKID"),
        (KUBEFLOW, "PyTorchJob"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "4"}, "torchrun"),
        ({**FLUX, "FLUX_JOB_SIZE": "3", "FLUX_JOB_NNODES": "2"}, "--tasks-per-node"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "a"}, "prun"),
        ({"ALPS_APP_PE": "1"}, "aprun"),
        (four("NEW_COMM_WORLD_"), "NEW_COMM_WORLD_RANK=1"),
        ({**MPICH, "PMI_SIZE": "two"}, "PMI_SIZE='two'"),
        ({**SRUN, "SLURM_LOCALID": "3"}, "SLURM_LOCALID=3"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4x2"}, "SLURM_STEP_TASKS_PER_NODE='4x2'"),
        ({**SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
    ],
)
def test_detect_with_contradictory_variables_names_variable(
    environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError, match="launcher ") as caught:
        detect(environ)
    assert named in str(caught.value)


# -- jobs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launcher", "changes"),
    [
        ("collective", {"COLLECTIVE_STORE": "/tmp/other"}),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "other"}),
        ("torchrun", {"TORCHELASTIC_RESTART_COUNT": "1"}),
        ("torchrun", {"MASTER_PORT": "1"}),
        ("openmpi", {"PMIX_NAMESPACE": "prterun-vm-3334@1"}),
        ("intelmpi", {"I_MPI_HYDRA_UUID": "other"}),
        ("slurm", {"SLURM_STEP_ID": "1"}),
        ("slurm", {"SLURM_JOB_ID": "135"}),
        ("deepspeed", {"MASTER_PORT": "1"}),
        ("flux", {"FLUX_JOB_ID": "other"}),
        ("pals", {"PALS_APID": "6"}),
        ("jsrun", {"PMIX_NAMESPACE": "8"}),
        ("horovod", {"HOROVOD_GLOO_RENDEZVOUS_PORT": "1"}),
    ],
)
def test_job_differs_between_launches(launcher: str, changes: dict[str, str]) -> None:
    environ = (ALL | OTHERS)[launcher]
    assert detected(environ).job != detected({**environ, **changes}).job


JOB = "import os; from collective.start.launchers import detect; print(detect(os.environ).job)"


def jobs(shell: str, script: str, environ: Mapping[str, str] = MPICH) -> list[str]:
    """Return the jobs detected by ranks of a shell's script, in which RANK stands for a rank."""
    done = run(
        shell, "-c", script.replace("RANK", f'"{sys.executable}" -c "{JOB}"'),
        env={**environ, "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_job_is_shared_by_ranks_of_one_parent() -> None:
    (a, b), (c, d) = (jobs("sh", "RANK; RANK; true") for _ in range(2))
    assert a == b
    assert c == d
    assert a != c


def test_job_is_shared_by_ranks_in_shells_below_process_manager(tmp_path: Path) -> None:
    # The kernel names a process after its program's file, so this shell has the manager's name.
    manager = tmp_path / "hydra_pmi_proxy"
    manager.symlink_to("/bin/sh")
    a, b = jobs(str(manager), "sh -c 'RANK; true'; sh -c 'RANK; true'; true")
    assert a == b


def test_detect_takes_processes_of_gforker_as_those_of_one_host(tmp_path: Path) -> None:
    manager = tmp_path / "mpiexec.gforker"
    manager.symlink_to("/bin/sh")
    a, b = jobs(str(manager), "sh -c 'RANK; true'; RANK; true", GFORKER)
    assert a == b


def test_place_has_one_name_more_for_each_launcher_that_tells_it() -> None:
    os.environ.update({**OURS, "RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29"})
    ours = names_of_place(1, 4, OURS["COLLECTIVE_STORE"], detected(os.environ))
    for name in OURS:
        del os.environ[name]
    launched = detected(os.environ)
    of_torch = names_of_place(1, 4, launched.job or "", launched)
    assert set(of_torch) < set(ours)
    assert ours[0] not in of_torch


@pytest.mark.parametrize("place", [(0, 4, "/a"), (1, 3, "/a"), (1, 4, "/b")], ids=str)
def test_place_given_by_arguments_has_one_name(place: tuple[int, int, str]) -> None:
    os.environ.update({**OURS, "COLLECTIVE_STORE": "/a"})
    launched = detected(os.environ)
    (name,) = names_of_place(*place, launched)
    assert name not in names_of_place(1, 4, "/a", launched)


# -- worlds ------------------------------------------------------------------------------


def test_world_of_one_rank_has_private_memory_store() -> None:
    alone = world()
    assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
    assert (alone.host, alone.launcher) == (socket.gethostname(), "none")
    assert list(Path(tempfile.gettempdir()).iterdir()) == []  # No file was created.
    alone.store.set("key", b"value")
    assert alone.store.get("key", Deadline(0.0)) == b"value"
    alone.store.delete("key")
    assert alone.store.try_get("key") is None
    assert alone.job != world().job


@pytest.mark.parametrize("launcher", ["torchrun", "openmpi", "intelmpi"])
def test_ranks_of_foreign_launcher_share_a_store(launcher: str) -> None:
    first, second = world(ALL[launcher]), world(ALL[launcher])
    assert first.launcher == launcher
    assert first.job == second.job
    first.store.set("key", b"value")
    assert second.store.get("key", Deadline(0.0)) == b"value"
    assert isinstance(first.store, FileStore)
    directory = first.store.directory
    assert directory.parent.name == f"collective-{os.geteuid()}"
    del first, second
    assert not directory.exists()


def test_ranks_of_collective_run_meet_at_its_store(tmp_path: Path) -> None:
    directory = tmp_path / "run-1"
    joined = world({**OURS, "COLLECTIVE_STORE": str(directory)})
    assert (joined.launcher, joined.job) == ("collective", str(directory))
    assert isinstance(joined.store, FileStore)
    assert joined.store.directory == directory


def test_store_argument_makes_world_by_hand(tmp_path: Path) -> None:
    joined = world(rank=1, size=2, store=tmp_path / "meet")
    assert (joined.launcher, joined.rank, joined.size, joined.local_size) == ("none", 1, 2, 2)
    assert joined.job == str(tmp_path / "meet")


def test_ranks_by_hand_without_store_raise_config_error() -> None:
    with pytest.raises(ConfigError, match=r"size 2 \(argument\).*run_ranks.*store=DIR"):
        world(rank=0, size=2)
    with pytest.raises(ConfigError, match=r"size 2 \(environment COLLECTIVE_SIZE\)"):
        world({"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "2"})


def test_arguments_equal_to_launcher_keep_its_job() -> None:
    joined = world(TORCHRUN, rank=1, size=2)
    assert (joined.launcher, joined.job) == ("torchrun", world(TORCHRUN).job)


def test_arguments_unlike_launcher_make_world_by_hand() -> None:
    alone = world(TORCHRUN, rank=0, size=1)
    assert (alone.launcher, alone.local_rank, alone.local_size) == ("none", 0, 1)
    with pytest.raises(ConfigError, match="store=DIR"):
        world(TORCHRUN, rank=0, size=3)


def test_store_of_several_hosts_is_needed_only_at_first_use(tmp_path: Path) -> None:
    far = world(SRUN)
    assert (far.size, far.local_size) == (7, 3)
    with pytest.raises(RendezvousError, match=r"7 ranks, 3 of them on this host.*MASTER_ADDR"):
        far.store.set("key", b"")
    world_with_store = world(SRUN, store=tmp_path / "shared")
    world_with_store.store.set("key", b"")
    assert world_with_store.job == far.job


def test_store_directory_writable_by_all_raises(tmp_path: Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(RendezvousError, match="0700"):
        world(rank=0, size=2, store=directory)


# -- ranks on several hosts --------------------------------------------------------------


def met(joined: World) -> TcpStore:
    """Return the store that a world opens when it is first used."""
    assert isinstance(joined.store, LateStore)
    joined.store.try_get("key")
    opened = joined.store._store
    assert isinstance(opened, TcpStore)
    return opened


def far(rank: int, **changes: str) -> dict[str, str]:
    """Return torchrun's variables for rank 0 or 1 of two ranks on two hosts."""
    here = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    return {**TORCHRUN, **here, "GROUP_WORLD_SIZE": "2", **changes}


def anew(environ: Mapping[str, str], **arguments: object) -> World:
    os.environ.clear()
    os.environ["COLLECTIVE_SECRET"] = "none"
    return world(environ, **arguments)


def test_ranks_meet_at_master_address_once_per_launch() -> None:
    change = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    first, second = anew(far(0, **change)), anew(far(1, **change))
    met(first).set("key", b"value")
    assert met(second).get("key", Deadline(30.0)) == b"value"
    # Restarted ranks are another launch, which must not read the store of the previous launch.
    again = anew(far(1, **change, TORCHELASTIC_RESTART_COUNT="1"), start_timeout=0.3)
    with pytest.raises(RendezvousError, match="the port belongs to another launch"):
        met(again)


def test_rank_0_of_torchrun_does_not_serve_the_store() -> None:
    pytest.importorskip("torch")
    late_world = anew(far(0, MASTER_PORT=str(free_port())), start_timeout=0.3)
    with pytest.raises(RendezvousError, match=r"no server answered.*torchrun's agent"):
        late_world.store.set("key", b"")


def test_launches_of_one_agent_do_not_share_keys() -> None:
    dist = pytest.importorskip("torch.distributed")
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    change = {"MASTER_PORT": str(served.port)}
    first, second = anew(far(0, **change)), anew(far(1, **change))
    first.store.set("key", b"value")
    assert second.store.get("key", Deadline(30.0)) == b"value"
    again = anew(far(1, **change, TORCHELASTIC_RESTART_COUNT="1"))
    assert again.store.try_get("key") is None
    assert not first.store.served_by_rank


def test_store_by_address_is_shared_and_names_the_job() -> None:
    settings = {
        "size": 2,
        "local_rank": 0,
        "local_size": 1,
        "store": f"tcp://127.0.0.1:{free_port()}",
    }
    first, second = anew({}, rank=0, **settings), anew({}, rank=1, **settings)
    assert first.job == second.job == settings["store"]
    met(first).set("key", b"value")
    assert met(second).get("key", Deadline(30.0)) == b"value"


@pytest.mark.parametrize("secret", ["", "of this test, and of nobody else"], ids=["none", "one"])
def test_ranks_with_different_or_missing_secret_do_not_meet(secret: str) -> None:
    settings = {"size": 2, "local_rank": 0, "local_size": 1, "start_timeout": 0.5}
    settings["store"] = f"tcp://127.0.0.1:{free_port()}"
    serves = anew({"COLLECTIVE_SECRET": secret} if secret else {}, rank=0, **settings)
    serves.store.set("key", b"value")
    comes = anew({} if secret else {"COLLECTIVE_SECRET": "another" * 3}, rank=1, **settings)
    with pytest.raises(RendezvousError, match="all ranks have the same secret, or none has one"):
        comes.store.try_get("key")


def test_ranks_by_hand_on_one_host_share_job_of_master_address() -> None:
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    near = anew(master, rank=1, size=2)
    assert near.job == anew(master, rank=0, size=2).job
    assert isinstance(near.store, FileStore)  # Ranks of one host need no port.
    assert near.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "arguments"),
    [
        ({"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, {"rank": 0, "size": 2}),
        ({}, {"rank": 0, "size": 2, "store": "tcp://node1:29500"}),
        ({"COLLECTIVE_RANK": "0", "COLLECTIVE_SIZE": "2", "COLLECTIVE_STORE": "tcp://node1:1"}, {}),
    ],
)
def test_ranks_by_hand_at_an_address_need_local_rank_and_size(
    environ: dict[str, str], arguments: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=r"local_rank, local_size: not set.*node1.*Set both"):
        anew(environ, **arguments)
    anew(environ, **arguments, local_rank=0, local_size=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"MASTER_PORT": "many"}, "MASTER_PORT='many'"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT='0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT='65536'"),
        ({"MASTER_PORT": ""}, "MASTER_ADDR=127.0.0.1 is set and MASTER_PORT is not"),
        ({"MASTER_ADDR": ""}, "MASTER_PORT=44093 is set and MASTER_ADDR is not"),
    ],
)
def test_incomplete_or_invalid_master_address_raises(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match="rendezvous: ") as caught:
        anew(far(0, **changes))
    assert reason in str(caught.value)


def test_rendezvous_under_slurm_takes_first_host_and_port_of_step() -> None:
    step = {**SRUN, "SLURM_STEP_NODELIST": "node[03-04]", "SLURM_JOB_NODELIST": "node[01-09]"}
    endpoint = from_environment(step, detect(step))
    assert endpoint is not None
    assert (endpoint.host, endpoint.origin) == ("node03", "the first host of SLURM_STEP_NODELIST")
    assert 15000 <= endpoint.port < 30000
    assert endpoint == from_environment(step, detect(step))
    other = {**step, "SLURM_STEP_ID": "1"}
    assert endpoint.port != getattr(from_environment(other, detect(other)), "port", None)
    # MASTER_ADDR and MASTER_PORT of the batch script take precedence, separately or together.
    with_address = {**step, "MASTER_ADDR": "10.0.0.1"}
    assert str(from_environment(with_address, detect(with_address))) == f"10.0.0.1:{endpoint.port}"
    both = {**with_address, "MASTER_ADDR": "fd00::1", "MASTER_PORT": "29500"}
    assert str(from_environment(both, detect(both))) == "[fd00::1]:29500"
    del step["SLURM_STEP_NODELIST"]
    assert getattr(from_environment(step, detect(step)), "host", None) == "node01"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7],x", ["node01", "node02", "node03", "node7", "x"]),
        ("a,b-1,c.example.org", ["a", "b-1", "c.example.org"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[099-101]-ib", ["n099-ib", "n100-ib", "n101-ib"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("a[1,3-4],b[2]", ["a1", "a3", "a4", "b2"]),
    ],
)
def test_expand_lists_hosts_of_slurm(text: str, hosts: list[str]) -> None:
    assert expand(text, "SLURM_STEP_NODELIST") == hosts


@pytest.mark.parametrize(
    "text",
    ["", "n[1-", "n[2-1]", "n[a-b]", "n[]", "a b", "n]1[", "n,-oProxyCommand=x", "-[1-2]", "n;x"],
)
def test_expand_of_invalid_host_list_raises(text: str) -> None:
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NODELIST=.*node\[01-03,7\]"):
        expand(text, "SLURM_STEP_NODELIST")


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "a;b", "$(a)"])
def test_master_address_that_is_no_host_raises(host: str) -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='.*'; it must be a name or an address"):
        from_environment({"MASTER_ADDR": host, "MASTER_PORT": "29500"}, None)


@pytest.mark.parametrize("host", ["node-1.site", "10.0.0.1", "fe80::1%eth0", "::1", "_a"])
def test_master_address_is_a_name_or_an_address(host: str) -> None:
    found = from_environment({"MASTER_ADDR": host, "MASTER_PORT": "29500"}, None)
    assert found is not None
    assert found.host == host


MPICH_FAR = {**MPICH, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}


def test_mpiexec_without_mpi4py_raises_with_both_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "installed", lambda package: False)
    late = anew(MPICH_FAR)
    with pytest.raises(RendezvousError, match=r"pip install .*\[mpi\].*MASTER_ADDR"):
        late.store.set("key", b"")


def test_mpiexec_without_mpi4py_meets_at_master_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choice, "installed", lambda package: False)
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # Under mpiexec the name of the job differs between hosts.
    first = anew({**MPICH_FAR, **master, "PMI_RANK": "0", "I_MPI_HYDRA_UUID": "a"})
    second = anew({**MPICH_FAR, **master, "I_MPI_HYDRA_UUID": "b"})
    met(first).set("key", b"value")
    assert met(second).get("key", Deadline(30.0)) == b"value"


# -- addresses, and settings of single transports ---------------------------------------------


def test_address_on_one_host_is_loopback_for_any_interface() -> None:
    assert anew(TORCHRUN, interface="eth9").address == "127.0.0.1"


def test_interface_that_does_not_exist_raises_config_error() -> None:
    with pytest.raises(ConfigError, match=r"interface: 'eth9'.* lo \(127\.0\.0\.1"):
        anew(far(0), interface="eth9")


def test_address_is_of_interface_or_toward_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = sys.modules["collective.start.resolver"]
    monkeypatch.setattr(module, "address_of", {"ib0": "10.2.0.4"}.__getitem__)
    monkeypatch.setattr(module, "own_address", lambda: "10.3.0.4")
    monkeypatch.setattr(module, "address_toward", lambda host, port: "10.1.0.4")
    assert anew(far(0), interface="ib0").address == "10.2.0.4"
    assert anew(far(0, MASTER_ADDR="node1")).address == "10.1.0.4"
    assert anew(MPICH_FAR).address == "10.3.0.4"  # no master
    # On the master itself its name may resolve to loopback, as on Debian.
    monkeypatch.setattr(module, "address_toward", lambda host, port: "127.0.0.1")
    assert anew(far(0, MASTER_ADDR="node1")).address == "10.3.0.4"
    assert anew(far(0)).address == "127.0.0.1"  # Agents on one machine use a loopback address.


def test_master_with_unresolvable_name_raises_at_first_store_use() -> None:
    late = anew(far(1, MASTER_ADDR="no-such-host.invalid"))
    assert late.address
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid.*does not resolve"):
        late.store.set("key", b"")


def test_options_contain_settings_of_single_transports() -> None:
    options = anew(MPICH_FAR, interface="lo", across="gloo", disable="shm_single_copy").options
    assert options == {
        "disable": "shm_single_copy",
        "interface": "lo",
        "across": "gloo",
    }
    assert anew({}).options == {"disable": "", "interface": "", "across": "tcp"}
