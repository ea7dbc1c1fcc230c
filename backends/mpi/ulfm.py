"""Going on after a loss with MPI: Open MPI's fault tolerance (ULFM).

Open MPI started with ``mpiexec --with-ft ulfm`` keeps a job when a process of it dies, and reports
the loss. Its ``MPI_Comm_shrink`` waits for each process that lives, and ``MPI_Comm_create_group``
refuses a communicator that one has died in. ``MPI_Comm_create_from_group`` (MPI 4.1, section
7.4.2) takes a group and no communicator, so that nobody but its members takes part: a process that
was stopped, or excluded, is not waited for.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

__all__ = ["assembled", "is_on"]

# How often it is looked whether the others still come, while MPI makes the communicator.
_LOOK_S = 0.002


def is_on(module: Any, path: str) -> bool:
    """Tell whether this process goes on when another of its job dies.

    Args:
        module: ``mpi4py.MPI``, initialised.
        path: of the MPI library.
    """
    if not path or not hasattr(module.Intracomm, "Create_from_group"):
        return False
    try:
        # What it has made of --with-ft, its parameter files and the environment. There is no call
        # that tells.
        return ctypes.c_bool.in_dll(ctypes.CDLL(path), "ompi_ftmpi_enabled").value
    except (OSError, ValueError):  # another library
        return False


def assembled(
    module: Any, comm: Any, ranks: Sequence[int], tag: str, look: Callable[[], None]
) -> Any:
    """Return a new communicator of some ranks of ``comm``, broken or not; they all call it.

    All of them have to be alive: Open MPI 5.0.11 waits for ever for one that dies in here, and
    ends the process with a segmentation fault if it hears meanwhile that one had died before.

    Args:
        module: ``mpi4py.MPI``.
        comm: of which the ranks are.
        ranks: in their new order.
        tag: the same on all of them, and no other communicator's.
        look: called again and again; raises if they will not all come. Then the thread that is in
            MPI stays there.

    Raises:
        mpi4py.MPI.Exception: what MPI says.
    """
    if len(ranks) == 1:
        return module.COMM_SELF.Dup()  # the other refuses that after some losses
    everybody = comm.Get_group()
    members = everybody.Incl(list(ranks))
    everybody.Free()
    # What MPI has been told of deaths it takes note of before it begins, and not meanwhile.
    comm.Get_failed().Free()
    found: Future[Any] = Future()

    def make() -> None:
        try:
            found.set_result(
                module.Intracomm.Create_from_group(members, tag, errhandler=module.ERRORS_RETURN)
            )
        except BaseException as error:
            found.set_exception(error)

    over = threading.Event()
    found.add_done_callback(lambda _: over.set())
    # A daemon: it may never return.
    threading.Thread(target=make, name="collective-mpi-assemble", daemon=True).start()
    while not over.wait(_LOOK_S):
        look()
    members.Free()
    return found.result()
