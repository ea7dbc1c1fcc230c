"""What a run executes, and the environment variables of its ranks."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collective.inner import platform


@dataclass(frozen=True)
class Run:
    """Program that ``collective run`` executes, and the rules for lost ranks.

    Attributes:
        program: arguments of the Python interpreter: a script, ``-m`` and a module, or ``-c``
            and a text, followed by the arguments of the program.
        size: number of ranks, at least 1.
        settings: environment variables for all ranks, such as ``COLLECTIVE_BACKEND``.
        min_ranks: number of ranks that must survive for the run to continue after a loss; by
            default all.
        max_restarts: how often all ranks are started again, each time from scratch, after fewer
            than ``min_ranks`` have survived.
        replace: if true, a new process is started for each lost rank and joins the others, while
            at least ``min_ranks`` survive. Not with MPI.
        verbose: if true, all tracebacks are shown whole, as the ranks write them. By default,
            equal tracebacks are shown once, and without the frames of this package.
        bind: if true, each rank runs on cores of its own, on a host that has enough of them.
    """

    program: Sequence[str]
    size: int
    settings: Mapping[str, str]
    min_ranks: int | None = None
    max_restarts: int = 0
    replace: bool = False
    verbose: bool = False
    bind: bool = False

    @property
    def command(self) -> list[str]:
        """Command that each rank executes."""
        return [sys.executable, "-u", *self.program]

    @property
    def least(self) -> int:
        """Number of ranks that must survive."""
        return self.min_ranks or self.size

    def environments(
        self, common: Mapping[str, str], places: Sequence[tuple[int, int, int]]
    ) -> list[dict[str, str]]:
        """Return the environment variables of each rank.

        Args:
            common: variables of all ranks, without the settings of the run.
            places: for each rank its number among those of its host, how many these are, and the
                number of cores to compute with.
        """
        common = {**common, **self.settings}
        return [{**common, **_rank_variables(rank, *place)} for rank, place in enumerate(places)]


def shared_variables(
    run: Run, store: str, address: str, port: int, restart: int, store_server: str = "rank"
) -> dict[str, str]:
    """Return the variables that are the same for all ranks of an attempt, with a new secret.

    Args:
        run: what the ranks execute.
        store: where the ranks meet.
        address, port: where rank 0 of a program of torch.distributed listens.
        restart: how often the ranks were started before.
        store_server: which process serves a store at an address: ``"rank"`` 0 or the
            ``"launcher"``.
    """
    launch = {
        "restart": restart, "grow": "on" if run.replace else "off", "store_server": store_server
    }  # fmt: skip
    return {
        "COLLECTIVE_SIZE": str(run.size),
        "COLLECTIVE_STORE": store,
        # A new secret for each launch. It replaces a secret in the launcher's environment. Other
        # processes of this user can read it in /proc, but it is never on a command line.
        "COLLECTIVE_SECRET": secrets.token_hex(32),
        "COLLECTIVE_LAUNCH": ",".join(f"{name}={value}" for name, value in launch.items()),
        # Variables for programs written for torch.distributed.
        "WORLD_SIZE": str(run.size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "PYTHONPATH": python_path(),
        **_terminal_variables(run.size),
    }


def _rank_variables(rank: int, local_rank: int, local_size: int, cores: int) -> dict[str, str]:
    """Return the variables of one rank.

    Args:
        rank: number of the rank.
        local_rank: number of the rank among those of its host.
        local_size: number of ranks on its host.
        cores: number of cores to compute with.
    """
    variables = {
        "COLLECTIVE_RANK": str(rank),
        "COLLECTIVE_LOCAL_RANK": str(local_rank),
        "COLLECTIVE_LOCAL_SIZE": str(local_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores)),
    }
    if os.isatty(1):
        # Only rank 0 may draw moving progress bars: several ranks would fight for the last line.
        variables["TTY_INTERACTIVE"] = "1" if rank == 0 else "0"
    return variables


def _terminal_variables(size: int) -> dict[str, str]:
    """Return variables that describe the launcher's terminal to the ranks, which write to pipes.

    TTY_COMPATIBLE and TTY_INTERACTIVE are for rich; many programs read COLUMNS.
    """
    if not os.isatty(1):
        return {}
    width = os.get_terminal_size(1).columns or 80  # some pseudo-terminals report 0
    prefix = len(f"[{size - 1}] ")
    return {
        "COLUMNS": str(max(20, width - prefix)),
        "TTY_COMPATIBLE": os.environ.get("TTY_COMPATIBLE", "1"),
    }


def python_path() -> str:
    """Return a PYTHONPATH with which the ranks import the package that is running now."""
    before = os.environ.get("PYTHONPATH", "")
    home = str(Path(__file__).resolve().parent.parent.parent)
    # Last, so that other folders of a source tree (tests, docs) do not hide the user's modules.
    paths = [path for path in before.split(os.pathsep) if path]
    installed = Path(home).name in ("site-packages", "dist-packages")
    return before if installed or home in paths else os.pathsep.join([*paths, home])


def restart_with(**variables: str) -> None:
    """Run this program again with environment variables that libraries read once, if any is new.

    This is for programs that have already imported such a library. If the program runs again, the
    function does not return.
    """
    new = {name: value for name, value in variables.items() if name not in os.environ}
    if new:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **new})


def cores_for_each(size: int, cores: int | None = None) -> int:
    """Return how many threads each of ``size`` ranks should compute with.

    Ranks that each start one thread for every core slow each other down by far. torchrun sets 1,
    which leaves cores idle if there are fewer ranks than cores.
    """
    return max(1, (platform.usable_cores() if cores is None else cores) // size)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that ranks on other hosts get, too."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_HOST and not name.startswith(_OF_HOST_PREFIXES)
    }


# Variables that describe this host, or this session on it.
_OF_HOST = frozenset(
    "_ DISPLAY HOME HOST HOSTNAME KRB5CCNAME LOGNAME MAIL OLDPWD PWD SHELL SHLVL SSH_AGENT_PID "
    "TEMP TERM_SESSION_ID TMP TMPDIR USER WAYLAND_DISPLAY XAUTHORITY".split()
)
_OF_HOST_PREFIXES = (
    "DBUS_", "SSH_", "XDG_", "SLURMD_", "SLURM_GTIDS", "SLURM_LAUNCH_NODE", "SLURM_LOCALID",
    "SLURM_NODEID", "SLURM_PROCID", "SLURM_STEP", "SLURM_TASK_PID", "SLURM_TOPOLOGY", "PMI",
)  # fmt: skip
