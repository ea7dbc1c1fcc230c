"""Collective communication for Python, independent of frameworks and transports.

::

    import collective

    with collective.init() as comm:
        y = comm.all_reduce(x)          # x: an array of any framework; y: of the same framework
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from collective.install import refuse_other_systems, refuse_subinterpreter

try:
    refuse_other_systems()
    importlib.import_module("numpy")
except ImportError:
    refuse_subinterpreter()
    raise

from collective.communicator import NULL, Communicator, Grid, Status
from collective.communicator.foreign_names import remedy_of
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
    CorruptionError,
    DeviceError,
    DtypeError,
    ExcludedError,
    GradientError,
    InvalidArgumentError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    RankError,
    RanksJoinError,
    RendezvousError,
    ShapeError,
    StateLostError,
    UnsupportedError,
)
from collective.ops import ReduceOp, premul_sum, user_op
from collective.shards import ShardBatches, ShardFold, Shards
from collective.start.connecting import connect
from collective.start.session import current, init
from collective.start.session import settings as config

__version__ = "0.2.0"

_F = TypeVar("_F")

__all__ = [
    "ANY_SOURCE",
    "NULL",
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
    "CorruptionError",
    "DeviceError",
    "DtypeError",
    "ExcludedError",
    "GradientError",
    "Grid",
    "InvalidArgumentError",
    "MismatchError",
    "PeerFailedError",
    "PeerLostError",
    "RankError",
    "RanksJoinError",
    "ReduceOp",
    "RendezvousError",
    "ShapeError",
    "ShardBatches",
    "ShardFold",
    "Shards",
    "StateLostError",
    "Status",
    "UnsupportedError",
    "Work",
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
    "grid",
    "group",
    "grow",
    "hook",
    "init",
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
    "user_op",
]

#: Modules that are imported when they are first used.
_MODULES = ("adapters", "compression", "elastic", "errors", "gradients", "profile", "testing")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__doc__", "__file__", "__version__"])


if not TYPE_CHECKING:  # a type checker would conclude that the module has every name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"collective.{name}")
        text, remedy = (
            f"module 'collective' has no attribute {name!r}",
            remedy_of(name, "collective"),
        )
        raise AttributeError(
            f"{text}; use {remedy}" if remedy else text, name=name, obj=sys.modules[__name__]
        )


def rank() -> int:
    """Return this rank in the current communicator."""
    return current().rank


def size() -> int:
    """Return the number of ranks in the current communicator."""
    return current().size


# For a type checker the functions below are methods of a communicator, with all their overloads.
_methods = cast(Communicator, Communicator)


def _of_current(method: _F) -> _F:
    """Return a function that calls ``method`` of the communicator that is current at the call."""
    function = cast(Callable[..., Any], method)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(current(), *args, **kwargs)

    return cast(_F, call)


all_gather = _of_current(_methods.all_gather)
all_gather_object = _of_current(_methods.all_gather_object)
all_reduce = _of_current(_methods.all_reduce)
all_to_all = _of_current(_methods.all_to_all)
barrier = _of_current(_methods.barrier)
broadcast = _of_current(_methods.broadcast)
broadcast_object = _of_current(_methods.broadcast_object)
dup = _of_current(_methods.dup)
empty = _of_current(_methods.empty)
gather = _of_current(_methods.gather)
gather_object = _of_current(_methods.gather_object)
grid = _of_current(_methods.grid)
group = _of_current(_methods.group)
grow = _of_current(_methods.grow)
hook = _of_current(_methods.hook)
recv = _of_current(_methods.recv)
recv_object = _of_current(_methods.recv_object)
reduce = _of_current(_methods.reduce)
reduce_scatter = _of_current(_methods.reduce_scatter)
scan = _of_current(_methods.scan)
scatter = _of_current(_methods.scatter)
scatter_object = _of_current(_methods.scatter_object)
send = _of_current(_methods.send)
send_object = _of_current(_methods.send_object)
sendrecv = _of_current(_methods.sendrecv)
shrink = _of_current(_methods.shrink)
split = _of_current(_methods.split)
