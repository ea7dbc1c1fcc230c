"""World whose ranks are the ranks of an MPI communicator."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from typing import Any

from collective.backends.mpi.library import mpiexec, start
from collective.backends.mpi.store import MpiStore
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import BackendUnavailableError

from .launchers import Launched, detect


def world_of(comm: Any, *, timeout: float = 60.0) -> World:
    """Return the world whose ranks are the ranks of ``comm``; they meet over MPI itself.

    Collective: every rank of ``comm`` calls it.

    Args:
        comm: an ``mpi4py.MPI.Comm`` (no intercommunicator), which is duplicated; None for
            ``MPI_COMM_WORLD``. MPI is initialised if the program has not done so.
        timeout: seconds in which all ranks have to arrive.

    Raises:
        BackendUnavailableError: the way in which the program has initialised MPI makes it
            unusable, or MPI connects fewer processes than the launcher started.
        RendezvousError: not all ranks arrived within ``timeout`` seconds.
    """
    deadline = Deadline(timeout)
    module = start(deadline)
    argument = comm
    comm = module.COMM_WORLD if comm is None else comm
    launched = launched_with(comm)
    store = MpiStore(comm, deadline)
    if comm.Get_rank() == 0:
        store.set("job", f"mpi {secrets.token_hex(16)}".encode())
    job = store.get("job", deadline).decode()
    host = comm.Split_type(module.COMM_TYPE_SHARED)
    local_rank, local_size = host.Get_rank(), host.Get_size()
    host.Free()
    return World(
        rank=comm.Get_rank(),
        size=comm.Get_size(),
        local_rank=local_rank,
        local_size=local_size,
        host=socket.gethostname(),
        launcher=launched.launcher if launched else "none",
        job=job,
        store=store,
        comm=argument,
    )


def launched_with(comm: Any) -> Launched | None:
    """Return the launcher's description of this process, after a check of MPI's world size.

    Args:
        comm: an ``mpi4py.MPI.Comm``. For ``MPI_COMM_SELF`` there is no check, since the launcher
            may have started other processes.

    Raises:
        BackendUnavailableError: the launcher does not belong to the MPI library, so MPI connects
            fewer processes than the launcher started.
    """
    launched = detect(os.environ)
    module = sys.modules["mpi4py.MPI"]
    size = module.COMM_WORLD.Get_size()
    if launched is not None and size < launched.size and comm != module.COMM_SELF:
        raise BackendUnavailableError(
            f"mpi: MPI's world has size {size}, but the launcher {launched.launcher!r} started "
            f"{launched.size} processes; MPI would not connect them [rank {launched.rank} of "
            f"{launched.size}]. Omit comm= (mpi_comm= of create_communicator) to use the "
            f"launcher's ranks, or start the program with {mpiexec()} -n {launched.size}."
        )
    return launched
