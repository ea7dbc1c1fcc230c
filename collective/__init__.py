"""Collective communication for Python, owned by no framework and no transport.

::

    import collective

    with collective.init() as comm:
        y = comm.all_reduce(x)          # x of any framework; y of the same
"""

from __future__ import annotations

from typing import Any

from collective.backend import ANY_SOURCE
from collective.communicator import Communicator, connect
from collective.errors import (
    AllocationError,
    BackendError,
    BackendNotFoundError,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    ConfigError,
    DeviceError,
    DtypeError,
    InvalidArgumentError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RankError,
    RendezvousError,
    ShapeError,
    UnsupportedError,
)
from collective.ops import ReduceOp, premul_sum, user_op
from collective.session import current, init
from collective.session import settings as config
from collective.work import Work

__version__ = "0.1.0"

# Calls of the current communicator, and what one asks it most.
_CALLS = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "dup",
    "empty",
    "gather",
    "gather_object",
    "group",
    "recv",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
    "sendrecv",
    "split",
    "split_by_host",
)

__all__ = [
    "ANY_SOURCE",
    "AllocationError",
    "BackendError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "CommunicatorAbortedError",
    "CommunicatorClosedError",
    "ConfigError",
    "DeviceError",
    "DtypeError",
    "InvalidArgumentError",
    "MismatchError",
    "PeerFailedError",
    "PeerLostError",
    "RankError",
    "ReduceOp",
    "RendezvousError",
    "ShapeError",
    "UnsupportedError",
    "Work",
    "config",
    "connect",
    "current",
    "init",
    "premul_sum",
    "rank",
    "size",
    "user_op",
    *_CALLS,
]


def rank() -> int:
    """Return this rank in the current communicator."""
    return current().rank


def size() -> int:
    """Return how many ranks the current communicator has."""
    return current().size


def __getattr__(name: str) -> Any:
    """Return the current communicator's call of that name."""
    if name in _CALLS:
        return getattr(current(), name)
    raise AttributeError(f"module 'collective' has no attribute {name!r}")
