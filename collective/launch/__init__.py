"""Start and stop of ranks on this host, for ``collective run``.

There are three generations of processes. The user starts the launcher, whose exit code counts.
The launcher forks the supervisor (:mod:`collective.launch.supervisor`). The supervisor starts the
ranks, for MPI through mpiexec (:mod:`collective.launch.mpi`). Launcher and supervisor watch each
other, so if one of them is killed, the other cleans up. If the supervisor dies, the kernel kills
the ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from collective.contract.secret import parse
from collective.generations.arrivals import Arrivals
from collective.platform import held_port
from collective.start.connecting import failing, tell_ended
from collective.start.resolver import of_run
from collective.start.rundir import join, leave
from collective.start.stores import FileStore, seal

from .attempts import run_attempts
from .mpi import MpiSupervisor
from .mpiexec import Mpiexec
from .supervisor import Replacing, Supervisor
from .variables import cores_for_each, rank_variables, restart_with, shared_variables
from .watching import watch_over

__all__ = ["cores_for_each", "launch", "restart_with"]


def launch(
    program: Sequence[str],
    size: int,
    settings: Mapping[str, str],
    *,
    mpi: bool = False,
    min_ranks: int | None = None,
    max_restarts: int = 0,
    replace: bool = False,
    verbose: bool = False,
) -> int:
    """Run a program as ``size`` ranks and wait until all have ended.

    This function forks, handles signals, and ends every child of the process. So call it from the
    main thread of a process that has no other work.

    Args:
        program: arguments of the Python interpreter: a script, or ``-m`` and a module, followed
            by the arguments of the program.
        size: number of ranks, at least 1.
        settings: environment variables for all ranks, such as ``COLLECTIVE_BACKEND``.
        mpi: if true, the ranks are an MPI world. Then mpiexec starts them, and its command is
            printed.
        min_ranks: number of ranks that must survive for the run to continue after a loss; by
            default all.
        max_restarts: how often all ranks are started again, each time from scratch, after fewer
            than ``min_ranks`` have survived.
        replace: if true, a new process is started for each lost rank and joins the others, while
            at least ``min_ranks`` survive. Not with ``mpi``.
        verbose: if true, all tracebacks are shown whole, as the ranks write them. By default,
            equal tracebacks are shown once, and without the frames of this package.

    Returns:
        0 if the run succeeded, also if it lost ranks but ``min_ranks`` survived. Otherwise the
        exit code of the rank that failed first, where 128 + n stands for a death by signal n. If
        signal n ended the launcher itself, 128 + n.

    Raises:
        RendezvousError: there is no private directory where the ranks could meet.
        BackendUnavailableError: with ``mpi``, there is no mpiexec.
        UnsupportedError: with ``mpi`` and ``min_ranks`` below ``size``, mpiexec ends all ranks
            when one dies.
    """
    command = [sys.executable, "-u", *program]
    spare = size - (min_ranks or size)
    if mpi and spare:
        Mpiexec().require_shrinking()
    start = Mpiexec().command(size, lasting=spare > 0) if mpi else []
    if start:
        print(f"collective run: {shlex.join([*start, *command])}", file=sys.stderr)
    store, hold = join(f"run-{secrets.token_hex(8)}")

    @contextlib.contextmanager
    def attempt(number: int, control: int) -> Iterator[Supervisor]:
        # Each attempt has a directory of its own, so that it finds no keys of an earlier attempt.
        directory = store / f"start-{number}"
        directory.mkdir(mode=0o700)
        # The port is held to the end of the attempt. A process that replaces rank 0 serves there
        # again.
        with held_port() as port:
            shared = shared_variables(size, str(directory), "127.0.0.1", port, number)
            shared = {**os.environ, **shared, **settings}
            if replace:
                shared["COLLECTIVE_GROW"] = "on"
            environments = [{**shared, **rank_variables(rank, rank, size)} for rank in range(size)]
            met_in = seal(FileStore(directory), of_run(parse(shared["COLLECTIVE_SECRET"])))

            def tell(ended: Mapping[int, str]) -> None:
                tell_ended(met_in, ended, [0] * size, size - spare)

            if start:
                yield MpiSupervisor(
                    control, start, command, environments, directory, spare, verbose, tell
                )
                return
            admitted = Arrivals(met_in, "").admitted
            replacing = Replacing(environments, admitted) if replace else None
            yield Supervisor(
                control, command, environments, spare, replacing, verbose, tell,
                partial(failing, met_in),
            )  # fmt: skip

    try:
        return watch_over(
            partial(run_attempts, attempt, size, max_restarts), partial(leave, store, hold)
        )
    finally:
        leave(store, hold)
