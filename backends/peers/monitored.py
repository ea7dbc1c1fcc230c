"""Transports whose peers a monitor watches, also those that are made of other transports (levels).

Each level numbers its ranks in its own way and would break alone. One channel watches all of them,
so one failure breaks all levels, and the error has the numbers of the whole communicator.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from collective.contract.backend import Backend, Note
from collective.contract.failure import Failure
from collective.contract.process import shortage
from collective.contract.recorder import Recorder
from collective.contract.waits import caller
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    MismatchError,
    RendezvousError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.request import Disagreement

from .channel import Channel
from .monitor import Monitor
from .wait import Running, Wait

if TYPE_CHECKING:
    from collective.contract.world import World

#: Errors that a level raises in its own terms, such as its own numbers of ranks.
OF_LEVELS = (
    BackendError, CollectiveTimeoutError, CommunicatorAbortedError, CommunicatorClosedError,
    Disagreement, MismatchError,
)  # fmt: skip
_UINT8 = BY_NAME["uint8"]
# Size of a note. It says where a segment or a hub is: a path, or an address and a key.
_NOTE_BYTES = 4096
# Descriptors while a rank of a Paired transport connects, beside one for each peer: the listening
# socket, those of the thread that waits at it, and the connections of strangers.
_CONNECTING_DESCRIPTORS = 4


class Monitored(Backend):
    """Transport whose peers a monitor watches.

    Attributes:
        channel: this communicator's channel of the monitor.
    """

    channel: Channel

    @property
    def meeting(self) -> str:  # type: ignore[override]  # an attribute elsewhere
        """Text that is derived from the secret of this meeting, and does not reveal the secret."""
        return self.channel.secret.key("meeting")[:8].hex()

    def lost(self) -> Set[int]:
        return self.channel.lost()

    def lasting(self, store: Store) -> Store:
        return self.channel.lasting(store)

    def observe(self, recorder: Recorder) -> None:
        self.channel.recorder = recorder
        self.channel.compares_on_arrival = self.capabilities.checks_calls

    def refuse_broken(self, where: object) -> None:
        if self.channel.failure is not None:
            self.channel.check(where, ())

    def post(self, note: Note, rank: int) -> Mapping[int, Note]:
        self.channel.post(note)
        return {}  # the hub searches for circles

    def abort(self, failure: Failure) -> None:
        self.channel.abort(failure)


class Pairing(NamedTuple):
    """The ranks of one communicator, of which each pair connects, and how they are watched.

    Attributes:
        world: this rank's place in the job.
        channel: channel of the communicator.
        parent: channel through which the ranks are watched until the communicator is connected.
        ranks: numbers of the communicator's ranks in ``parent``.
        where: the operation, for errors.
        deadline: deadline of the operation.
        look: function that raises if another source knows that some rank will not connect.
    """

    world: World
    channel: Channel
    parent: Channel
    ranks: Sequence[int]
    where: str
    deadline: Deadline
    look: Callable[[], None]

    def wait(self, rank: int | None = None) -> Wait:
        """Return a wait for a rank of the communicator; None for all ranks."""
        awaited = None if rank is None else [self.ranks[rank]]
        return self.parent.wait(self.where, self.deadline, awaited)


def listens_at(world: World) -> str:
    """Return the address at which this rank listens, which all other ranks can reach."""
    return "127.0.0.1" if world.local_size == world.size else world.address


class Paired(Monitored):
    """Transport with a connection between each pair of ranks of each communicator.

    Attributes:
        running: the running collective call, or the operation that connects, for errors.
    """

    def __init__(self, world: World, channel: Channel) -> None:
        self.rank = channel.rank
        self.size = channel.size
        self.channel = channel
        self.running: object = "connect"
        self._world = world

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Self:
        """Connect to the other ranks through ``world.store``; see :meth:`Backend.connect`."""
        channel, ranks = Monitor.start(world, deadline).channel, range(world.size)
        self = cls(world, channel)
        try:
            if short := shortage(self.descriptors(ranks)):
                channel.abort(Failure("aborted", world.rank, f"rank {world.rank}: {short}"))
            look = world.store.check
            self._pair(Pairing(world, channel, channel, ranks, "connect", deadline, look))
        except CollectiveError as error:
            raise RendezvousError(
                f"{cls.name}: the ranks have met but cannot connect [rank {world.rank} of "
                f"{world.size}]: {error}"
            ) from error
        return self

    def group(self, ranks: Sequence[int], deadline: Deadline) -> Self:
        self.refuse_broken("group")
        child, parent = type(self)(self._world, self.channel.group(ranks)), self.channel
        child._pair(
            Pairing(self._world, child.channel, parent, ranks, "group", deadline, lambda: None)
        )
        return child

    def descriptors(self, ranks: Sequence[int]) -> int:
        return len(ranks) - 1 + _CONNECTING_DESCRIPTORS if len(ranks) > 1 else 0

    def _pair(self, pairing: Pairing) -> None:
        """Connect with the other ranks."""
        pairing.parent.check(pairing.where, ())
        self.running = pairing.where
        try:
            self._open(pairing)
            self.channel.when_broken(self._cut)
            if self.channel.broken_by_connected:
                self._cut()  # the first call raises the reason
            else:
                self.channel.check(pairing.where, ())  # it may have broken before when_broken()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.channel.end_waits()
        # Tell the monitor before the connections end: peers that see them end ask it why.
        self.channel.close()
        self._end()

    @abstractmethod
    def _open(self, pairing: Pairing) -> None:
        """Make the connections; return when all ranks have theirs."""

    @abstractmethod
    def _cut(self) -> None:
        """End all running calls, here and at the peers, whose monitors give them the reason.

        May be called from any thread, also before the connections are there.
        """

    @abstractmethod
    def _end(self) -> None:
        """Cut the connections and release them."""


def explained(
    channel: Channel,
    error: BaseException,
    where: object,
    deadline: Deadline,
    awaited: Sequence[int] | None = None,
) -> Exception | None:
    """Return the monitor's explanation of a level's failure, and break the whole communicator.

    Args:
        channel: channel of the whole communicator.
        error: error that the level raised, with the level's own numbers of ranks and deadline.
        where, deadline: operation and deadline of the call.
        awaited: ranks of the whole communicator that the call waited for; None for any.

    Returns:
        The exception to raise instead of ``error``; None if ``error`` is not of a level's types, or
        is the mismatch of the whole communicator: the outer level shares its channel.
    """
    if isinstance(error, MismatchError) and channel.has_raised(error):
        return None
    if not isinstance(error, OF_LEVELS):
        return None
    if isinstance(error, (CollectiveTimeoutError, Disagreement, MismatchError)):
        # The deadline of the whole call has passed, too, or might as well have passed. Giving up
        # asks all ranks for their calls, and finds the ranks that are late or make another call.
        try:
            channel.check(where, awaited)
            channel.give_up(where, deadline, awaited)
        except Exception as known:
            return known
    return channel.explain(where, error, awaited)


@contextlib.contextmanager
def inside(
    channel: Channel, where: object, deadline: Deadline, awaited: Sequence[int] | None = None
) -> Iterator[None]:
    """Run a body that waits in a level; raise its errors as :func:`explained` explains them.

    Args:
        channel: channel of the whole communicator.
        where, deadline: operation and deadline of the call.
        awaited: ranks of the whole communicator that the body waits for; None for any.
    """
    key = object()
    channel.inside[key] = Running(where, awaited, caller())
    try:
        yield
    except OF_LEVELS as error:
        # The call stays in ``channel.inside`` here. The failure of the level has ended the waits of
        # all its ranks, and each of them asks what the others waited for.
        raise explained(channel, error, where, deadline, awaited) or error from error
    finally:
        del channel.inside[key]


class HandedStore(Store):
    """A store of one value, which one rank publishes and a transport hands to the other ranks.

    Args:
        hand: function that moves the note from the publishing rank to the other ranks. Its
            arguments are the note, and whether this rank publishes it.
        check: function that raises if the ranks can no longer meet.
    """

    def __init__(self, hand: Callable[[Buffer, bool], None], check: Callable[[], None]) -> None:
        self._hand = hand
        self._check = check
        self._received: bytes | None = None

    def __str__(self) -> str:
        return "the transport"

    def set(self, key: str, value: bytes) -> None:
        note = Buffer(np.zeros(_NOTE_BYTES, np.uint8), _UINT8)
        note.array[: len(value)] = np.frombuffer(value, np.uint8)
        self._hand(note, True)

    def get(self, key: str, deadline: Deadline) -> bytes:
        if self._received is None:
            note = Buffer.empty(_NOTE_BYTES, _UINT8)
            self._hand(note, False)
            self._received = note.array.tobytes().rstrip(b"\0")
        return self._received

    def try_get(self, key: str) -> bytes | None:
        return self._received

    def delete(self, key: str) -> None:
        """Do nothing: the other ranks have the value already."""

    def check(self) -> None:
        self._check()
