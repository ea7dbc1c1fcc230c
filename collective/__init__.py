"""Collective communication for Python, owned by no framework and no transport.

::

    import collective

    with collective.init() as comm:
        y = comm.all_reduce(x)          # x of any framework; y of the same
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from collective.communicator import Communicator, Status
from collective.contract.backend import ANY_SOURCE
from collective.contract.recorder import flight_recorder
from collective.contract.work import Work
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
    ExcludedError,
    GradientError,
    InvalidArgumentError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RankError,
    RendezvousError,
    ShapeError,
    StateLostError,
    UnsupportedError,
)
from collective.ops import ReduceOp, premul_sum, user_op
from collective.start.connecting import connect
from collective.start.session import current, init
from collective.start.session import settings as config

__version__ = "0.1.0"

_P = ParamSpec("_P")
_T = TypeVar("_T")

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
    "ExcludedError",
    "GradientError",
    "InvalidArgumentError",
    "MismatchError",
    "PeerFailedError",
    "PeerLostError",
    "RankError",
    "ReduceOp",
    "RendezvousError",
    "ShapeError",
    "StateLostError",
    "Status",
    "UnsupportedError",
    "Work",
    "adopt",
    "agree",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "config",
    "connect",
    "current",
    "dup",
    "empty",
    "flight_recorder",
    "gather",
    "gather_object",
    "group",
    "hook",
    "init",
    "plan",
    "premul_sum",
    "rank",
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
    "shrink",
    "size",
    "split",
    "split_by_host",
    "user_op",
]


def rank() -> int:
    """Return this rank in the current communicator."""
    return current().rank


def size() -> int:
    """Return how many ranks the current communicator has."""
    return current().size


def _of_current(method: Callable[Concatenate[Communicator, _P], _T]) -> Callable[_P, _T]:
    """Return the call ``method`` of whatever is the current communicator."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return method(current(), *args, **kwargs)

    return call


adopt = _of_current(Communicator.adopt)
agree = _of_current(Communicator.agree)
all_gather = _of_current(Communicator.all_gather)
all_gather_object = _of_current(Communicator.all_gather_object)
all_reduce = _of_current(Communicator.all_reduce)
all_to_all = _of_current(Communicator.all_to_all)
barrier = _of_current(Communicator.barrier)
broadcast = _of_current(Communicator.broadcast)
broadcast_object = _of_current(Communicator.broadcast_object)
dup = _of_current(Communicator.dup)
empty = _of_current(Communicator.empty)
gather = _of_current(Communicator.gather)
gather_object = _of_current(Communicator.gather_object)
group = _of_current(Communicator.group)
hook = _of_current(Communicator.hook)
plan = _of_current(Communicator.plan)
recv = _of_current(Communicator.recv)
recv_object = _of_current(Communicator.recv_object)
reduce = _of_current(Communicator.reduce)
reduce_scatter = _of_current(Communicator.reduce_scatter)
scan = _of_current(Communicator.scan)
scatter = _of_current(Communicator.scatter)
scatter_object = _of_current(Communicator.scatter_object)
send = _of_current(Communicator.send)
send_object = _of_current(Communicator.send_object)
sendrecv = _of_current(Communicator.sendrecv)
shrink = _of_current(Communicator.shrink)
split = _of_current(Communicator.split)
split_by_host = _of_current(Communicator.split_by_host)
