"""The host plane: the choice of its transport, and reporting its failures to the monitor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.backends.peers.channel import Channel
from collective.backends.peers.monitored import HandedStore
from collective.contract import registry
from collective.contract.backend import Backend, Plan
from collective.contract.failure import Failure
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
)
from collective.memory.buffer import Buffer
from collective.request import Request

from .watch import failure_of

if TYPE_CHECKING:
    from collective.contract.world import World

_CONNECT = Request("connect", over="nccl")


def host_plane(world: World) -> type[Backend]:
    """Return the transport for data in the host's memory.

    ``options["host"]`` names it. Without that option it is the transport that ``auto`` chooses for
    CPUs, as far as a rank can tell from its world alone.
    """
    name = world.options.get("host", "")
    if not name:
        if world.size == 1:
            name = "threads"
        elif world.local_size == world.size:
            name = "shm"
        elif world.size == 2:
            name = world.options.get("across", "tcp")
        else:
            name = "hierarchical"
    return registry.find(name)


def connect_step(
    host: Backend,
    number: int,
    operation: str,
    src: Buffer,
    dst: Buffer,
    deadline: Deadline,
    **arguments: Any,
) -> None:
    """Do one step of connecting on the host plane. Collective: all of its ranks."""
    work = host.plan(_CONNECT.step(number, operation, **arguments))(src, dst, deadline)
    if work is not None:
        work.wait()


class Reporting:
    """Wrapper that reports the failures of a transport without a monitor to a monitor.

    The wrapper has the methods of the transport. If a method fails on some rank and breaks the
    transport, the monitor informs the ranks that wait for a GPU.
    """

    def __init__(self, host: Backend, channel: Channel) -> None:
        self._transport = host
        self._channel = channel

    def plan(self, request: Request) -> Plan:
        """Return the transport's plan for ``request``; calls of the plan report failures, too."""
        return _reporting(self._transport.plan(request), self._channel)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._transport, name)
        if not callable(attribute):
            return attribute
        method = _reporting(attribute, self._channel)
        setattr(self, name, method)
        return method


def _reporting(method: Callable[..., Any], channel: Channel) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return method(*args)
        except CollectiveTimeoutError as error:
            channel.abort(Failure("timeout", channel.rank, str(error), error.ranks))
            raise
        except (BackendError, CommunicatorAbortedError) as error:
            channel.abort(failure_of(error, channel.rank))
            raise

    return call


def broadcast_store(host: Backend, store: Store, deadline: Deadline) -> Store:
    """Return a store in which rank 0 of a connected transport publishes a value.

    Args:
        host: the transport.
        store: the store through which its ranks have met.
        deadline: deadline for handing the value to the other ranks.
    """

    def hand(note: Buffer, publishes: bool) -> None:
        connect_step(host, 0, "broadcast", note, note, deadline, root=0)

    return HandedStore(hand, store.check)


def breaker(host: Backend, channel: Channel) -> Callable[[], None]:
    """Return a function that breaks the host plane when the channel is broken.

    The function keeps neither of them alive.
    """
    host_ref, channel_ref = weakref.ref(host), weakref.ref(channel)

    def function() -> None:
        transport, watched = host_ref(), channel_ref()
        if transport is not None and watched is not None and watched.failure is not None:
            transport.abort(watched.failure)

    return function
