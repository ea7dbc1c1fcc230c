"""Beginning and end of a communicator, and of the groups made from it.

A communicator and its groups form a tree. Breaking or closing a communicator also breaks or closes
all groups below it.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, TypeVar

from collective.contract.backend import Backend
from collective.contract.failure import Failure
from collective.contract.work import deliver
from collective.deadline import Deadline
from collective.errors import CommunicatorClosedError, PeerFailedError
from collective.generations.lineage import Lineage
from collective.request import Request

from .comm import Comm

__all__ = ["Closed", "abort", "close", "fail", "leave", "made_alike", "register", "succeed"]

C = TypeVar("C", bound=Comm)
# Every communicator of this process. A forked child must disable them all.
_alive: weakref.WeakSet[Any] = weakref.WeakSet()
# Error text for a communicator that the program itself has closed.
_CLOSED = "this communicator is closed. Make another with collective.init()."


class Closed:
    """Stand-in for the transport of a closed communicator: every use raises an error."""

    exchange = None

    def __init__(self, backend: Backend, why: str) -> None:
        self.name = backend.name
        self._why = why
        # In a forked child, keep the transport alive: closing it would also affect the parent.
        self._kept = backend if why is not _CLOSED else None

    def refuse_broken(self, where: object) -> NoReturn:
        """Raise ``CommunicatorClosedError`` with the reason why no call can be made."""
        raise CommunicatorClosedError(f"{where}: {self._why}")

    def plan(self, request: Request) -> NoReturn:
        """Raise the same error for a call that is only planned."""
        self.refuse_broken(request.operation)

    def __getattr__(self, attribute: str) -> NoReturn:
        raise CommunicatorClosedError(f"{attribute}: {self._why}")


# -- the beginning ------------------------------------------------------------------------


def register(comm: Comm) -> None:
    """Make ``comm`` refuse every call in children that this process forks."""
    _alive.add(comm)


def made_alike(
    comm: C, backend: Backend, local_rank: int, local_size: int, lineage: Lineage | None
) -> C:
    """Return a communicator over another transport, otherwise with the settings of ``comm``."""
    return type(comm)(
        backend,
        local_rank=local_rank,
        local_size=local_size,
        host=comm.host,
        timeout=comm.timeout,
        check=comm._path.check,
        lineage=lineage,
        open_to_others=comm._open,
    )


def succeed(comm: C, backend: Backend, lineage: Lineage, deadline: Deadline) -> C:
    """Return the communicator of the next generation, and close ``comm``.

    Args:
        comm: communicator of the last generation.
        backend: transport of the next generation.
        lineage: lineage of the next generation.
        deadline: deadline for the wait for background calls of ``comm``.
    """
    successor = made_alike(comm, backend, lineage.local_rank, lineage.local_size, lineage)
    members = [rank for rank in range(comm.size) if rank not in lineage.lost]
    comm._succession.hand_over(successor._succession, backend.name, successor.rank == 0)
    try:
        for listener in comm._path.listeners.all:
            listener.group(successor, members)
        if comm._succession.on_next is not None:
            comm._succession.on_next(successor)
    except BaseException as error:
        # The other ranks already have the next generation, and would wait in it for this rank.
        abort(successor, Failure.caused_by(successor.rank, error))
        raise
    close(comm, deadline)
    return successor


# -- the end ------------------------------------------------------------------------------


def close(comm: Comm, deadline: Deadline) -> None:
    """Close ``comm`` and the groups made of it; see ``Communicator.close``.

    Args:
        comm: the communicator.
        deadline: deadline for the wait for background calls.
    """
    path = comm._path
    if path.closed:
        return
    for child in list(comm._children):
        close(child, deadline)
    path.close(deadline)
    try:
        for listener in path.listeners.all:
            listener.close()
    finally:
        backend = path.backend
        path.backend = Closed(backend, _CLOSED)  # type: ignore[assignment]
        backend.close()
        comm._succession.close()


def abort(comm: Comm, failure: Failure) -> None:
    """Break ``comm`` and the groups made of it, for every rank."""
    for child in list(comm._children):
        abort(child, failure)
    comm._succession.keep_announcement()
    if not comm._path.closed:
        comm._path.backend.abort(failure)


def fail(comm: Comm, cause: BaseException | Failure) -> None:
    """Break ``comm``, and send the cause to the peers; see ``Communicator.fail``."""
    if isinstance(cause, PeerFailedError):
        return  # the peers already know of that failure
    failure = cause if isinstance(cause, Failure) else Failure.caused_by(comm.rank, cause)
    abort(comm, failure)


def leave(comm: Comm, deadline: Deadline | None) -> None:
    """Close the transports of ``comm`` and its groups; see ``Communicator.leave``."""
    for child in list(comm._children):
        leave(child, deadline)
    path = comm._path
    if not path.closed:
        if deadline is not None:
            deliver((path.lane, *path.lanes.values()), deadline)
        if path.drain is not None:
            path.drain()
        comm._succession.end_arrivals()
        path.backend.close()


# -- a fork -------------------------------------------------------------------------------


def _disown(comm: Comm) -> None:
    """Make ``comm`` refuse every call in a forked child, so that the child cannot reach peers."""
    path = comm._path
    if path.closed:
        return
    comm._foreign = (
        f"this process (pid {os.getpid()}) was forked from that of rank {comm.rank} of "
        f"{comm.size} (pid {os.getppid()}), which alone may use the communicator. Start "
        "processes with the method 'spawn', and give them ranks of their own: "
        "collective.init(rank=, size=, store=)."
    )
    path.shut()
    path.backend = Closed(path.backend, comm._foreign)  # type: ignore[assignment]


def _disown_all() -> None:
    for comm in list(_alive):
        _disown(comm)


os.register_at_fork(after_in_child=_disown_all)
