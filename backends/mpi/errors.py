"""MPI's errors as ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collective.contract.failure import Failure
from collective.errors import BackendError

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel

__all__ = ["explained"]

# Classes of errors for which a peer may be to blame: its end, or what came of it.
_OF_PEERS = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED", "ERR_OTHER",
             "ERR_INTERN", "ERR_UNKNOWN", "ERR_IN_STATUS", "ERR_PENDING")  # fmt: skip


def explained(module: Any, channel: Channel, where: object, error: Any) -> Exception:
    """Return what to raise, ``from error``: who is to blame, else what MPI says.

    Args:
        module: ``mpi4py.MPI``.
        channel: of the communicator, which is broken by this.
        where: the operation.
        error: an ``MPI.Exception``.
    """
    number = error.Get_error_class()
    name = _class_name(module, number)
    description = f"{name}: {error.Get_error_string()} [rank {channel.rank}]"
    if name.removeprefix("MPI_") in _OF_PEERS:
        found = channel.explain(where, error)
        if not isinstance(found, BackendError):
            return found
    else:
        channel.abort(Failure("aborted", channel.rank, f"{where}: {description}"))
    return BackendError(f"{where}: {description}", "mpi", number)


def _class_name(module: Any, number: int) -> str:
    """Return the name of an error class, such as ``MPI_ERR_TRUNCATE``."""
    for name in dir(module):
        if name.startswith("ERR_") and getattr(module, name) == number:
            return f"MPI_{name}"
    return f"error class {number}"
