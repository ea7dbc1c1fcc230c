"""Readers of the variables by which launchers describe their processes.

Each launcher gives its processes their rank and size in environment variables. There is one
reader for each launcher. The readers are tried in a fixed order, so that a launch inside another
launch (``collective run`` inside ``sbatch``, ``torchrun`` inside ``srun``) counts as a launch by
the inner launcher.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from collective.errors import ConfigError
from collective.platform import ProcessStatus, process_status

from .network import is_loopback

__all__ = ["MPI_LAUNCHERS", "Allocation", "Launched", "allocation", "detect", "tasks_per_node"]

#: Launchers whose processes are the ranks of an MPI world.
MPI_LAUNCHERS = ("openmpi", "mpich", "intelmpi")

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Launched:
    """Description of this process by its launcher.

    Attributes:
        launcher: ``collective``, ``torchrun``, ``openmpi``, ``intelmpi``, ``mpich`` or
            ``slurm``.
        rank: number of this process among all, from 0.
        size: how many processes were launched.
        local_rank: number of this process on its host, from 0.
        local_size: how many processes were launched on this host.
        job: a name that all processes of this launch on this host derive alike. No other
            running launch has this name. None if the launcher gives none.
        hosts: number of hosts, if the launcher gives it to all processes alike; else None.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str | None
    hosts: int | None = None


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
        environ: environment variables, such as ``os.environ``.

    Raises:
        ConfigError: a launcher's variables are incomplete or contradict each other.
    """
    for read in _READERS:
        launched = read(environ)
        if launched is not None:
            return launched
    return None


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
    variables = _Environment("torchrun", environ)
    if not variables.any("RANK", "WORLD_SIZE"):
        return None
    ranks = local = variables.numbers("RANK", "WORLD_SIZE")
    address = environ.get("MASTER_ADDR", "")
    # Programs that set RANK and WORLD_SIZE themselves often omit the two local variables.
    if variables.any("LOCAL_RANK", "LOCAL_WORLD_SIZE") or not is_loopback(address or "localhost"):
        local = variables.numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # An elastic agent restarts its processes within one run. Each restart is another job.
    run = environ.get("TORCHELASTIC_RUN_ID"), environ.get("TORCHELASTIC_RESTART_COUNT")
    endpoint = f"{address}:{environ['MASTER_PORT']}" if "MASTER_PORT" in environ else _process()
    # A group is the set of processes of one agent. Only an agent counts the hosts.
    hosts = variables.number("GROUP_WORLD_SIZE").number if "GROUP_WORLD_SIZE" in environ else None
    return variables.launched([*ranks, *local], variables.job(*run, endpoint), hosts)


def _openmpi(environ: Environ) -> Launched | None:
    variables = _Environment("openmpi", environ)
    if not variables.any("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        return None
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    launch = environ.get("PMIX_NAMESPACE") or _process("prterun", "prted", "orted", "mpirun")
    return variables.launched(variables.numbers(*names), variables.job(launch))


def _hydra(environ: Environ) -> Launched | None:
    """Read the variables of Hydra, the process manager of MPICH and Intel MPI."""
    uuid = environ.get("I_MPI_HYDRA_UUID")
    variables = _Environment("intelmpi" if uuid else "mpich", environ)
    if not variables.any("PMI_RANK", "PMI_SIZE"):
        return None
    if "SLURM_STEP_ID" in environ and not variables.any("MPI_LOCALRANKID", "MPI_LOCALNRANKS"):
        return None  # srun --mpi=pmi2 sets these two as well; _slurm() reads its other variables
    identity = variables.numbers("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return variables.launched(identity, variables.job(uuid or _process("hydra_pmi_proxy")))


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


_READERS: tuple[Callable[[Environ], Launched | None], ...] = (
    _collective,
    _torchrun,
    _openmpi,
    _hydra,
    _slurm,
)


class _Environment:
    """Variables of a launcher, and the errors about them."""

    def __init__(self, launcher: str, environ: Environ) -> None:
        self.launcher = launcher
        self.environ = environ

    def any(self, *names: str) -> bool:
        return any(name in self.environ for name in names)

    def number(self, name: str) -> _Number:
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
    stand between it and the rank. Without such an ancestor it is the parent.
    """
    parent = os.getppid()
    pid = parent
    while pid > 1 and (status := _status(pid)):
        if status.name in managers:
            return f"{pid} {status.started}"
        pid = status.parent
    status = _status(parent)
    return f"{parent} {status.started if status else ''}"


def _status(pid: int) -> ProcessStatus | None:
    """Return the status of a process; None if it has ended, or the system does not tell."""
    try:
        return process_status(pid)
    except OSError:
        return None
