"""Start and stop of ranks on this host, for ``collective run``.

There are three generations of processes. The user starts the launcher, whose exit code counts
(:mod:`collective.launch.launcher`). The launcher forks the supervisor
(:mod:`collective.launch.supervisor`). The supervisor starts the ranks, for MPI through mpiexec
(:mod:`collective.launch.mpi`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import sys
from collections.abc import Iterator
from functools import partial

from collective.contract.process import RankProcess
from collective.control.secret import parse
from collective.inner import FileStore, platform
from collective.platform.topology import processors
from collective.start.resolver import of_run
from collective.start.rundir import join, leave
from collective.start.stores import seal

from .agent import LocalHost
from .launcher import run_attempts, watch_over
from .mpi import MpiSupervisor
from .mpiexec import Mpiexec
from .supervisor import MeetingStore, Place, Supervisor, bind
from .variables import Run, cores_for_each, restart_with, shared_variables

__all__ = ["Run", "cores_for_each", "launch", "restart_with"]


def launch(run: Run, *, mpi: bool = False) -> int:
    """Run a program as ranks on this host and wait until all have ended.

    This function forks, handles signals, and ends every child of the process. So call it from the
    main thread of a process that has no other work.

    Args:
        run: the program, and the rules for lost ranks.
        mpi: if true, the ranks are an MPI world. Then mpiexec starts them, and its command is
            printed.

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
    lasting = run.least < run.size
    if mpi and lasting:
        Mpiexec().require_shrinking()
    start = Mpiexec().command(run.size, lasting=lasting) if mpi else []
    if start:
        print(f"collective run: {shlex.join([*start, *run.command])}", file=sys.stderr)
    own = RankProcess.own()
    store, hold = join(f"run-{secrets.token_hex(8)}")

    @contextlib.contextmanager
    def attempt(number: int, control: int) -> Iterator[Supervisor]:
        # Each attempt has a directory of its own, so that it finds no keys of an earlier attempt.
        directory = store / f"start-{number}"
        directory.mkdir(mode=0o700)
        # The port is held to the end of the attempt. A process that replaces rank 0 serves there
        # again.
        with platform.held_port() as port:
            shared = shared_variables(run, str(directory), "127.0.0.1", port, number)
            met_in = seal(FileStore(directory), of_run(parse(shared["COLLECTIVE_SECRET"])))
            meeting = MeetingStore(met_in, [0] * run.size, run.least)
            host = LocalHost("", run.size, own.host if own else "", local=True)
            host.processors = processors(usable=True)
            bind(run, [host], number)
            places = [Place(host, rank, run.size) for rank in range(run.size)]
            environments = run.environments(
                {**os.environ, **shared}, [place.seat() for place in places]
            )
            if start:
                yield MpiSupervisor(control, run, environments, meeting, host, start, directory)
            else:
                yield Supervisor(control, run, environments, meeting, [host], places)

    try:
        return watch_over(partial(run_attempts, attempt, run), partial(leave, store, hold))
    finally:
        leave(store, hold)
