"""The world of the ranks of an MPI communicator."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

from collective.backends.mpi.library import mpiexec, start
from collective.backends.mpi.store import MpiStore
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import BackendUnavailableError

from .launchers import Launched, detect

__all__ = ["launched_with", "world_of"]


def world_of(
    comm: Any,
    *,
    timeout: float = 60.0,
    options: Mapping[str, str] | None = None,
    address: str = "127.0.0.1",
) -> World:
    """Return the world whose ranks are those of ``comm``, where they meet over MPI itself.

    Collective: every rank of ``comm`` calls it.

    Args:
        comm: an ``mpi4py.MPI.Comm`` (no intercommunicator), which is duplicated; None for
            ``MPI_COMM_WORLD``, initialising MPI if the program has not.
        timeout: seconds until the other ranks have to have come.
        options: as in :class:`World`.
        address: as in :class:`World`.

    Raises:
        BackendUnavailableError: MPI is not usable as the program has initialised it, or
            connects fewer processes than the launcher started.
        RendezvousError: not all ranks came within ``timeout`` seconds.
    """
    deadline = Deadline(timeout)
    module = start(deadline)
    given = comm
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
        options=dict(options or {}),
        address=address,
        comm=given,
    )


def launched_with(comm: Any) -> Launched | None:
    """Return what the launcher says of this process, if MPI connects all that it started.

    Args:
        comm: an ``mpi4py.MPI.Comm``. ``MPI_COMM_SELF`` may be one process of many.

    Raises:
        BackendUnavailableError: the launcher is not that of the MPI library, so that each of
            its processes would take itself for all.
    """
    launched = detect(os.environ)
    module = sys.modules["mpi4py.MPI"]
    size = module.COMM_WORLD.Get_size()
    if launched is not None and size < launched.size and comm != module.COMM_SELF:
        raise BackendUnavailableError(
            f"mpi: MPI's world is of {size}, and the launcher {launched.launcher!r} started "
            f"{launched.size} processes; they would not be connected [rank {launched.rank} of "
            f"{launched.size}]. Leave out comm= (mpi_comm= of create_communicator), and the ranks "
            f"are the launcher's; or start the program with {mpiexec()} -n {launched.size}."
        )
    return launched
