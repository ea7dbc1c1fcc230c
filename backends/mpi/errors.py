"""MPI's errors as ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collective.errors import BackendError

if TYPE_CHECKING:
    from collective.backends.monitor import Channel

__all__ = ["explained"]


def explained(module: Any, channel: Channel, where: object, error: Any) -> Exception:
    """Return what to raise, ``from error``: who is to blame, else what MPI says.

    Args:
        module: ``mpi4py.MPI``.
        channel: of the communicator, which is broken by this.
        where: the operation.
        error: an ``MPI.Exception``.
    """
    found = channel.explain(where, error)
    if not isinstance(found, BackendError):
        return found
    number = error.Get_error_class()
    told = f"{class_name(module, number)}: {error.Get_error_string()}"
    return BackendError(f"{where}: {told} [rank {channel.rank}]", "mpi", number)


def class_name(module: Any, number: int) -> str:
    """Return the name of an error class, such as ``MPI_ERR_TRUNCATE``."""
    for name in dir(module):
        if name.startswith("ERR_") and getattr(module, name) == number:
            return f"MPI_{name}"
    return f"MPI error class {number}"
