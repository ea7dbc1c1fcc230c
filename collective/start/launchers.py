"""Readers of the variables by which launchers describe their processes.

Each launcher gives its processes their rank and size in environment variables. There is one
reader for each launcher. The readers are tried in a fixed order, so that a launch inside another
launch (``collective run`` inside ``sbatch``, ``torchrun`` inside ``srun``) counts as a launch by
the inner launcher.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from collective.errors import ConfigError
from collective.platform import ProcessStatus, process_status

from .network import is_loopback

#: Launchers whose processes are the ranks of an MPI world.
MPI_LAUNCHERS = ("openmpi", "mpich", "intelmpi", "mvapich", "pals")

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Launched:
    """Description of this process by its launcher.

    Attributes:
        launcher: ``collective``, ``torchrun``, ``deepspeed``, ``kubeflow``, ``openmpi``,
            ``intelmpi``, ``mpich``, ``mvapich``, ``jsrun``, ``horovod``, ``flux``, ``slurm`` or
            ``pals``.
        rank: number of this process among all, from 0.
        size: how many processes were launched.
        local_rank: number of this process on its host, from 0.
        local_size: how many processes were launched on this host.
        job: a name that all processes of this launch on this host derive alike. No other
            running launch has this name. None if the launcher gives none.
        hosts: number of hosts, if the launcher gives it to all processes alike; else None.
        places: rank, size and job by the variables of each launcher, this one and those of which
            this process has variables, too.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str | None
    hosts: int | None = None
    places: tuple[tuple[int, int, str | None], ...] = field(default=(), compare=False, repr=False)


class Allocation(NamedTuple):
    """Number of ranks to launch on this host, read from the environment before the launch.

    Attributes:
        ranks: number of ranks to start on this host.
        variable: environment variable that gives this number.
        hosts: number of hosts of the job.
    """

    ranks: int
    variable: str
    hosts: int


def allocation(environ: Environ) -> Allocation | None:
    """Return how many ranks a batch script, or the shell of an allocation, has to start here.

    This is Slurm's number of tasks on this host, if the job asked for tasks. Otherwise it is the
    default of torchrun's ``--nproc-per-node``. None if no variable gives a number.

    Args:
        environ: environment variables, such as ``os.environ``.

    Raises:
        ConfigError: Slurm's variables are incomplete or contradict each other.
    """
    environ = _not_empty(environ)
    # Without one of these, the tasks are cores, or another unit of Slurm's configuration.
    if "SLURM_JOB_ID" in environ and {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & set(environ):
        variables = _Environment("slurm", environ)
        here = _slurm_tasks_here(variables, "SLURM_TASKS_PER_NODE")
        nodes = variables.number("SLURM_JOB_NUM_NODES")
        return Allocation(here.number, here.variable, nodes.number)
    ranks_text = environ.get("PET_NPROC_PER_NODE", "").strip()
    if re.fullmatch(r"[1-9][0-9]*", ranks_text):  # not "auto" or "gpu", which torch resolves
        nodes_text = environ.get("PET_NNODES", "1").rpartition(":")[2].strip()
        return Allocation(
            int(ranks_text), "PET_NPROC_PER_NODE", int(nodes_text) if nodes_text.isdecimal() else 1
        )
    return None


def detect(environ: Environ) -> Launched | None:
    """Return the launcher's description of this process, or None if there was no launcher.

    Args:
        environ: environment variables, such as ``os.environ``. Empty variables count as unset.

    Raises:
        ConfigError: a launcher's variables are incomplete or contradict each other, or belong to
            a launcher that does not tell its processes their place.
    """
    environ = _not_empty(environ)
    first: Launched | None = None
    places = []
    for read in _READERS:
        # The first launcher decides. Another one's variables may be incomplete: they may be those
        # of an outer launch.
        with contextlib.suppress(ConfigError) if first else contextlib.nullcontext():
            launched = read(environ)
            if launched is not None:
                first = first or launched
                places.append((launched.rank, launched.size, launched.job))
    return first and replace(first, places=tuple(places))


def names_of_place(rank: int, size: int, where: str, launched: Launched | None) -> list[int]:
    """Return numbers that stand for a place among ranks, and that no other place has.

    The first number stands for the arguments. If ``where`` comes from a launcher, the others stand
    for the same place as other variables tell it, since a child may inherit only some of them.

    Args:
        rank, size: number of this process, and of processes.
        where: what these processes share: a store, an address, or the name of a launch.
        launched: the launcher's description of this process, or None.
    """
    same = [f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"]  # of torch and JAX
    if launched is not None:
        same += [job or "" for *place, job in launched.places if place == [rank, size]]
    places = [where, *same] if where in same else [where]
    texts = (f"{rank} {size} {_OF_PARENT.sub('', place)}" for place in places)
    digests = (hashlib.blake2b(text.encode(), digest_size=7).digest() for text in texts)
    return [int.from_bytes(digest, "little") for digest in digests]


def _not_empty(environ: Environ) -> dict[str, str]:
    return {name: value for name, value in environ.items() if value.strip()}


class _Number(NamedTuple):
    """A number from a launcher's variable, with the variable's name for error texts."""

    number: int
    variable: str


def _collective(environ: Environ) -> Launched | None:
    variables = _Environment("collective", environ)
    if not variables.any("COLLECTIVE_RANK", "COLLECTIVE_SIZE"):
        return None
    ranks = local = variables.numbers("COLLECTIVE_RANK", "COLLECTIVE_SIZE")
    if variables.any("COLLECTIVE_LOCAL_RANK", "COLLECTIVE_LOCAL_SIZE"):
        local = variables.numbers("COLLECTIVE_LOCAL_RANK", "COLLECTIVE_LOCAL_SIZE")
    job = environ.get("COLLECTIVE_STORE") or None
    if job and not job.startswith("tcp:"):
        job = os.path.abspath(os.path.expanduser(job))
    return variables.launched([*ranks, *local], job)


def _torchrun(environ: Environ) -> Launched | None:
    """Read the variables of torchrun and of the launchers that set the same ones.

    DeepSpeed's launcher names the number of local ranks ``LOCAL_SIZE``. Kubeflow's PyTorchJob sets
    no local variables, since each of its pods has one process.
    """
    deepspeed = "LOCAL_SIZE" in environ and "LOCAL_WORLD_SIZE" not in environ
    variables = _Environment("deepspeed" if deepspeed else "torchrun", environ)
    if not variables.any("RANK", "WORLD_SIZE"):
        return None
    ranks = local = variables.numbers("RANK", "WORLD_SIZE")
    address = environ.get("MASTER_ADDR", "")
    # A group is the set of processes of one agent. Only an agent counts the hosts.
    counts = "GROUP_WORLD_SIZE|CROSS_SIZE"
    hosts = variables.number(counts).number if variables.any(*counts.split("|")) else None
    # Programs that set RANK and WORLD_SIZE themselves often omit the two local variables.
    if variables.any("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        local = variables.numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE|LOCAL_SIZE")
    elif ranks[1].number > 1 and not is_loopback(address or "localhost"):
        variables.launcher = "kubeflow"
        local, hosts = _alone_in_pod(variables, address), ranks[1].number
    # An elastic agent restarts its processes within one run. Each restart is another job.
    run = environ.get("TORCHELASTIC_RUN_ID"), environ.get("TORCHELASTIC_RESTART_COUNT")
    endpoint = f"{address}:{environ['MASTER_PORT']}" if "MASTER_PORT" in environ else _process()
    return variables.launched([*ranks, *local], variables.job(*run, endpoint), hosts)


def _alone_in_pod(variables: _Environment, address: str) -> list[_Number]:
    """Return the local numbers of a process that is the only one in its pod of Kubernetes.

    Raises:
        ConfigError: the process may be one of several on its host.
    """
    processes = variables.environ.get("PET_NPROC_PER_NODE", "")
    if variables.any("KUBERNETES_SERVICE_HOST", "PET_NODE_RANK", "PET_NNODES") and not (
        processes.isdecimal() and int(processes) > 1
    ):
        return [_Number(0, "local rank in the pod"), _Number(1, "processes in the pod")]
    if processes.isdecimal():
        raise ConfigError(
            f"launcher kubeflow: PET_NPROC_PER_NODE={processes} processes in each pod, but "
            "LOCAL_RANK and LOCAL_WORLD_SIZE are not set. Start the script with torchrun, which "
            "reads the PET_ variables and starts the processes of a pod."
        )
    raise ConfigError(
        f"launcher torchrun: RANK and WORLD_SIZE are set, with MASTER_ADDR={address}, which may "
        "be another host, but LOCAL_RANK and LOCAL_WORLD_SIZE are not set. They are needed to "
        "know which ranks share a host. With one process on each host, as in the pods of "
        "Kubeflow's PyTorchJob, set LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1."
    )


def _hydra(environ: Environ) -> Launched | None:
    """Read the variables of Hydra, the process manager of MPICH and Intel MPI."""
    uuid = environ.get("I_MPI_HYDRA_UUID")
    variables = _Environment("intelmpi" if uuid else "mpich", environ)
    # Other process managers, such as srun --mpi=pmi2, set PMI_RANK and PMI_SIZE as well.
    if not variables.any("MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
        return None
    if not variables.any("PMI_RANK", "PMI_SIZE"):
        return None
    identity = variables.numbers("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return variables.launched(identity, variables.job(uuid or _process("hydra_pmi_proxy")))


def _flux(environ: Environ) -> Launched | None:
    variables = _Environment("flux", environ)
    if not variables.any("FLUX_TASK_RANK"):
        return None
    ranks = variables.numbers("FLUX_TASK_RANK", "FLUX_JOB_SIZE")
    local_rank, nodes = variables.numbers("FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
    # Flux does not tell the number of tasks on this node. It gives each node as many, if it can.
    size = ranks[1].number
    if nodes.number == 0 or size % nodes.number:
        raise ConfigError(
            f"launcher flux: FLUX_JOB_SIZE={size} tasks on FLUX_JOB_NNODES={nodes.number} nodes, "
            "which cannot each have as many. Flux does not tell how many tasks a node has. Start "
            "as many on each node: flux run --tasks-per-node=N."
        )
    here = _Number(size // nodes.number, "FLUX_JOB_SIZE / FLUX_JOB_NNODES")
    job_id = environ.get("FLUX_JOB_ID_PATH") or environ.get("FLUX_JOB_ID")
    launch = [job_id, environ.get("FLUX_URI")] if job_id else [_process("flux-shell")]
    return variables.launched([*ranks, local_rank, here], variables.job(*launch), nodes.number)


@dataclass(frozen=True)
class _Family:
    """Launcher that sets four variables for rank, size, local rank and local size.

    Attributes:
        launcher: name of the launcher.
        names: the four variables; ``A|B`` stands for the first of the two that is set.
        launch: variables that name the launch.
        managers: programs that start the ranks of a host, where no variable names the launch.
    """

    launcher: str
    names: tuple[str, str, str, str]
    launch: tuple[str, ...]
    managers: tuple[str, ...]

    def __call__(self, environ: Environ) -> Launched | None:
        """Read the variables; return None if there are none of this launcher."""
        variables = _Environment(self.launcher, environ)
        if not variables.any(*(name for name in self.names[:2] if not name.startswith("PMI_"))):
            return None
        launch = [environ[name] for name in self.launch if name in environ]
        job = variables.job(*(launch or [_process(*self.managers)]))
        return variables.launched(variables.numbers(*self.names), job)


def _four(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}RANK", f"{prefix}SIZE", f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"


_OPENMPI = _Family(
    "openmpi", _four("OMPI_COMM_WORLD_"), ("PMIX_NAMESPACE",),
    ("prterun", "prted", "orted", "mpirun"),
)  # fmt: skip
_MVAPICH = _Family("mvapich", _four("MV2_COMM_WORLD_"), (), ("mpispawn",))
_MVAPICH_3 = _Family("mvapich", _four("MVP_COMM_WORLD_"), (), ("mpispawn",))
_JSRUN = _Family("jsrun", _four("JSM_NAMESPACE_"), ("PMIX_NAMESPACE",), ("jsmd",))
_HOROVOD = _Family(
    "horovod", _four("HOROVOD_"),
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"), ("horovodrun",),
)  # fmt: skip
_PALS = _Family(
    "pals",
    (
        "PALS_RANKID", "PMI_SIZE|PALS_SIZE", "PALS_LOCAL_RANKID|PMI_LOCAL_RANK",
        "PALS_LOCAL_SIZE|PMI_LOCAL_SIZE",
    ),
    ("PALS_APID",), ("palsd",),
)  # fmt: skip


def _slurm(environ: Environ) -> Launched | None:
    # Inside a batch script and in the shell of salloc, SLURM_PROCID may be 0 and SLURM_NTASKS
    # the job's number of tasks, though only one process runs. Processes that srun has started
    # belong to a step. The shell of an interactive salloc is a step, too, but its number is one
    # of the reserved numbers just below 2**32.
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= 0xFFFFFFF0 or "SLURM_PROCID" not in environ:
        return None
    variables = _Environment("slurm", environ)
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    ranks = variables.numbers("SLURM_PROCID", size, "SLURM_LOCALID")
    here = _slurm_tasks_here(variables, "SLURM_STEP_TASKS_PER_NODE")
    nodes = "SLURM_STEP_NUM_NODES"
    hosts = variables.number(nodes).number if nodes in environ else None
    return variables.launched(
        [*ranks, here], variables.job(environ.get("SLURM_JOB_ID"), step), hosts
    )


def _unknown(environ: Environ) -> Launched | None:
    """Refuse the variables of launchers that do not tell a process its whole place.

    Without this reader, each of their processes would be the only rank of a world of its own.
    """
    if "SLURM_STEP_ID" in environ:
        return None  # the shell of an interactive salloc, which srun has started
    if {"PMI_RANK", "PMI_SIZE"} & environ.keys():
        variables = _Environment("mpich", environ)
        rank, size = variables.numbers("PMI_RANK", "PMI_SIZE")
        launch = _process("mpiexec.gforker")  # which starts all processes on this host
        if size.number == 1 or not _OF_PARENT.fullmatch(launch):
            return variables.launched([rank, size, rank, size], variables.job(launch))
        raise ConfigError(
            f"launcher mpich: PMI_RANK={rank.number} and PMI_SIZE={size.number} are set, but "
            "MPI_LOCALRANKID and MPI_LOCALNRANKS are not, which tell the ranks of this host. Use "
            "mpiexec.hydra or `collective run`. Or set both; on one host to the values of PMI_RANK "
            "and PMI_SIZE."
        )
    for name, value in environ.items():
        if name in _PARTIAL or re.fullmatch(r"[A-Z0-9_]+_COMM_WORLD_(RANK|SIZE)", name):
            raise ConfigError(
                f"launcher {_PARTIAL.get(name, 'unknown')}: {name}={value} shows that it started "
                "this process, but no variable that is known here tells rank, size, local rank "
                "and local size. Use mpiexec, srun, torchrun or `collective run`. Or set RANK, "
                "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in each process."
            )
    return None


# Variables of launchers that do not tell their processes how many there are on this host.
_PARTIAL = {"PMIX_RANK": "prun (PMIx)", "ALPS_APP_PE": "aprun", "MPT_LRANK": "mpiexec_mpt"}

_READERS: tuple[Callable[[Environ], Launched | None], ...] = (
    _collective,
    _torchrun,
    _OPENMPI,
    _hydra,
    _MVAPICH,
    _MVAPICH_3,
    _JSRUN,
    _HOROVOD,
    _flux,
    _slurm,
    _PALS,  # after srun, which sets variables of PALS with --mpi=cray_shasta
    _unknown,
)


class _Environment:
    """Variables of a launcher, and the errors about them."""

    def __init__(self, launcher: str, environ: Environ) -> None:
        self.launcher = launcher
        self.environ = environ

    def any(self, *names: str) -> bool:
        return any(name in self.environ for name in names)

    def number(self, names: str) -> _Number:
        """Return the number in a variable; ``A|B`` stands for the first of the two that is set."""
        name, *others = names.split("|")
        name = next((other for other in (name, *others) if other in self.environ), name)
        text = self.environ.get(name)
        if text is None:
            raise ConfigError(
                f"launcher {self.launcher}: {name} is not set, but other variables of this "
                "launcher are. Set it, or unset the others."
            )
        if not re.fullmatch(r"[0-9]+", text.strip()):
            raise ConfigError(
                f"launcher {self.launcher}: {name}={text!r}; it must be an integer >= 0."
            )
        return _Number(int(text), name)

    def numbers(self, *names: str) -> list[_Number]:
        return [self.number(name) for name in names]

    def job(self, *parts: str | None) -> str:
        return " ".join((self.launcher, str(os.geteuid()), *(part or "-" for part in parts)))

    def launched(
        self, identity: Sequence[_Number], job: str | None, hosts: int | None = None
    ) -> Launched:
        rank, size, local_rank, local_size = identity
        for low, high, allowed in (
            (rank, size, "below"),
            (local_rank, local_size, "below"),
            (local_size, size, "at most"),
        ):
            if low.number > high.number or (low.number == high.number and allowed == "below"):
                raise ConfigError(
                    f"launcher {self.launcher}: {low.variable}={low.number} with "
                    f"{high.variable}={high.number}; {low.variable} must be {allowed} "
                    f"{high.variable}."
                )
        numbers = rank.number, size.number, local_rank.number, local_size.number
        return Launched(self.launcher, *numbers, job, hosts)


def tasks_per_node(text: str, name: str) -> list[int]:
    """Return the numbers of a list such as ``4(x2),3``, one for each node.

    Args:
        text: the list.
        name: variable that holds the list, for the error text.

    Raises:
        ConfigError: the text is not such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part.strip())
        if match is None:
            raise ConfigError(
                f"launcher slurm: {name}={text!r}; it must be a list such as '4(x2),3', as "
                "Slurm sets it."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _slurm_tasks_here(variables: _Environment, name: str) -> _Number:
    """Return this node's entry of a list such as ``4(x2),3``."""
    text = variables.environ.get(name, "")
    counts = tasks_per_node(text, name)
    if len(set(counts)) == 1:
        return _Number(counts[0], name)
    node = variables.number("SLURM_NODEID").number
    if node >= len(counts):
        raise ConfigError(
            f"launcher slurm: SLURM_NODEID={node} with {name}={text!r}, which lists only "
            f"{len(counts)} nodes."
        )
    return _Number(counts[node], name)


def _process(*managers: str) -> str:
    """Return id and start time of the process that started all ranks of this host, as a name.

    This process is the nearest ancestor with one of the given program names, since a shell may
    stand between it and the rank. Without such an ancestor it is the parent, and the name says so.
    """
    parent = os.getppid()
    pid = parent
    while pid > 1 and (status := _status(pid)):
        if status.name in managers:
            return f"{pid} {status.started}"
        pid = status.parent
    status = _status(parent)
    return f"parent {parent} {status.started if status else ''}"


# Part of a launch's name that a rank and its children do not share.
_OF_PARENT = re.compile(r"\bparent [0-9]+ \S*$")


def _status(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if it has ended, or the system does not tell."""
    try:
        return process_status(pid)
    except OSError:
        return None
