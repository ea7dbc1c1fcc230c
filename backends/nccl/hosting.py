"""The host plane: which transport it is, and how its failures become known to the monitor."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.backends.peers import levels
from collective.contract import registry
from collective.contract.backend import Backend, Plan
from collective.contract.failure import Failure
from collective.contract.store import Store
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Request

from .watch import failure_of

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.contract.world import World

__all__ = ["BroadcastStore", "Reporting", "breaker", "connect_step", "host_plane", "step_of"]

_UINT8 = BY_NAME["uint8"]
_MAIL_BYTES = 4096
_CONNECT = Request("connect", over="nccl")


def host_plane(world: World) -> type[Backend]:
    """Return the transport of what is in the host's memory.

    ``options["host"]`` names it; else it is what ``auto`` takes among CPUs, as far as a rank can
    tell from its world alone.
    """
    name = world.options.get("host", "")
    if not name:
        if world.size == 1:
            name = "threads"
        elif world.local_size == world.size:
            name = "shm"
        elif world.size == 2:
            name = world.options.get("across", "gloo")
        else:
            name = "hierarchical"
    return registry.find(name)


def connect_step(
    host: Backend,
    number: int,
    operation: str,
    src: Buffer,
    dst: Buffer,
    timeout: float,
    **arguments: Any,
) -> None:
    """Make a step of connecting on the host plane: all its ranks together."""
    work = host.plan(_CONNECT.step(number, operation, **arguments))(src, dst, timeout)
    if work is not None:
        work.wait()


@contextlib.contextmanager
def step_of(
    where: object, channel: Channel, timeout: float, awaited: Sequence[int] | None = None
) -> Iterator[None]:
    """Do something on the host plane that is a step of a call; its errors are those of the call."""
    try:
        yield
    except levels.OF_LEVELS as error:
        explanation = levels.explained(channel, error, where, timeout, awaited)
        raise explanation or error from error


class Reporting:
    """A transport without a monitor, whose failures are reported to one.

    It answers to the transport's methods: whatever rank breaks it in one of them has those
    ranks know of it that wait for a GPU.
    """

    def __init__(self, host: Backend, channel: Channel) -> None:
        self._transport = host
        self._channel = channel

    def plan(self, request: Request) -> Plan:
        """As of the transport; what is planned reports its failures, too."""
        return _reporting(self._transport.plan(request), self._channel)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._transport, name)
        if not callable(found):
            return found
        made = _reporting(found, self._channel)
        setattr(self, name, made)
        return made


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


class BroadcastStore(Store):
    """A store of one thing, on a transport that stands: rank 0 has it, and all others get it."""

    def __init__(self, host: Backend, store: Store, end: float) -> None:
        self._host = host
        self._store = store
        self._end = end
        self._received: bytes | None = None

    def set(self, key: str, value: bytes) -> None:
        self._share(value)

    def get(self, key: str, deadline: float) -> bytes:
        if self._received is None:
            self._received = self._share(b"")
        return self._received

    def _share(self, value: bytes) -> bytes:
        letter = Buffer(np.zeros(_MAIL_BYTES, np.uint8), _UINT8)
        letter.array[: len(value)] = np.frombuffer(value, np.uint8)
        left = max(0.001, self._end - time.monotonic())
        connect_step(self._host, 0, "broadcast", letter, letter, left, root=0)
        return letter.array.tobytes().rstrip(b"\0")

    def try_get(self, key: str) -> bytes | None:
        return self._received

    def delete(self, key: str) -> None:
        """Do nothing: it is with those whom it was sent to."""

    def check(self) -> None:
        self._store.check()


def breaker(host: Backend, channel: Channel) -> Callable[[], None]:
    """Return what breaks the host plane when the channel is broken; keeps neither alive."""
    host_ref, channel_ref = weakref.ref(host), weakref.ref(channel)

    def function() -> None:
        found, source = host_ref(), channel_ref()
        if found is not None and source is not None and source.failure is not None:
            found.abort(source.failure)

    return function
