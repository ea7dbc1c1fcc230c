"""What transports know of their peers apart from the transport.

Engines like MPI and Gloo cannot tell a rank that died from one that is late, a rank that
left from one that failed, or who called something else. Beside the engine every rank keeps a
link to a hub in rank 0's process (:mod:`collective.backends.hub`): a thread that sleeps until
something goes wrong. One communicator's view of it is :mod:`collective.backends.channel`.

When a call has waited for a second, the ranks' flight recorders are compared: ranks that made
different calls get ``MismatchError``, and a deadline that passes can say who did not come and
what that rank did last.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING

from collective.errors import RendezvousError

from .channel import WORLD, Channel
from .hub import Hub
from .link import Link, Message, connect, proof

if TYPE_CHECKING:
    from typing_extensions import Self

    from collective.world import World

__all__ = ["Monitor"]

# Where rank 0 tells the others how to reach the hub.
_KEY = "monitor"
# How long the hub may take to conclude the roll call after its deadline.
_ANSWER_S = 2.0
_RETRY_S = 0.01


class Monitor:
    """This rank's link to the hub; made by :meth:`start`.

    Attributes:
        rank, size: of the world.
        hosts: the name of every rank's host.
        channel: of the communicator of all ranks.
    """

    def __init__(self, world: World, link: Link, hosts: list[str]) -> None:
        self.rank = world.rank
        self.size = world.size
        self.hosts = hosts
        self._link: Link | None = link
        self._channels: weakref.WeakValueDictionary[str, Channel] = weakref.WeakValueDictionary()
        # What was said of communicators that this rank has not made yet.
        self._early: dict[str, list[Message]] = {}
        self._lost: set[int] = set()
        self._lock = threading.RLock()
        # A communicator that is dropped without being closed looks to its peers like a death.
        weakref.finalize(self, _close_unless_forked, link, os.getpid()).atexit = False
        self.channel = Channel(self, WORLD, tuple(range(world.size)))
        threading.Thread(
            target=_watch, args=(weakref.ref(self), link), name="collective-monitor", daemon=True
        ).start()

    @classmethod
    def start(cls, world: World, timeout: float) -> Self:
        """Link this rank to the others' and return when all of them have come.

        Raises:
            RendezvousError: some did not arrive within ``timeout`` seconds, or disagree about
                how many there are, or two claim one rank; the text says who.
        """
        deadline = time.monotonic() + timeout
        if world.rank == 0:
            alone = world.local_size == world.size
            hub = Hub(world.size, None if alone else world.address, timeout)
            told = json.dumps({"place": hub.place, "key": hub.key}).encode()
            world.store.set(_KEY, told)
            try:
                link, hosts = _join(world, hub.place, hub.key, deadline)
            except (EOFError, OSError) as error:  # it was over before this rank came
                raise _refused(world, hub.refusal or repr(error)) from error
            finally:
                world.store.delete(_KEY)
        else:
            link, hosts = _find(world, timeout, deadline)
        return cls(world, link, hosts)

    # -- for the channels -----------------------------------------------------------------

    def _say(self, message: Message) -> None:
        link = self._link
        if link is not None:
            # If the hub is gone the watcher thread knows it as well.
            with contextlib.suppress(OSError):
                link.send(message)

    def _leave(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(OSError):
                link.send({"kind": "bye"})
            link.close()

    def _enter(self, channel: Channel) -> None:
        with self._lock:
            self._channels[channel.name] = channel
            for message in self._early.pop(channel.name, ()):
                channel._hear(message)
            for rank in self._lost.intersection(channel.members):
                channel._lose(rank)

    # -- the watcher thread ---------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        with self._lock:
            if message["kind"] == "lost":
                self._lose(message["rank"])
                return
            channel = self._channels.get(message["channel"])
            if channel is not None:
                channel._hear(message)
            elif message["kind"] == "report":
                # Not made here yet: nothing was called.
                self._say({**message, "entries": [], "finished": 0, "started": 0})
            elif message["kind"] in ("failure", "left"):
                self._early.setdefault(message["channel"], []).append(message)

    def _lose(self, rank: int) -> None:
        self._lost.add(rank)
        for channel in list(self._channels.values()):
            if rank in channel.members:
                channel._lose(rank)

    def _hub_gone(self) -> None:
        """The hub's process has ended: by its end, or after it has left."""
        with self._lock:
            if self._link is not None and 0 not in self.channel.left:
                self._lose(0)


def _find(world: World, timeout: float, deadline: float) -> tuple[Link, list[str]]:
    """Look for rank 0's hub and take part in its roll call."""
    while True:
        try:
            told = json.loads(world.store.get(_KEY, deadline))
        except RendezvousError as error:
            raise RendezvousError(
                f"rendezvous: rank 0 of {world.size} did not arrive within {timeout:g} s [rank "
                f"{world.rank}]: {error}"
            ) from error
        try:
            return _join(world, told["place"], told["key"], deadline)
        except (EOFError, OSError) as error:
            # It may be the hub of an earlier roll call, which the store has not forgotten yet.
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rendezvous: rank {world.rank} of {world.size} cannot reach rank 0 at "
                    f"{told['place'].replace(' ', ':')}: {error!r}. Is it an address of the right "
                    "interface of that host (COLLECTIVE_INTERFACE), and open to this one?"
                ) from error
            time.sleep(_RETRY_S)


def _join(world: World, place: str, key: str, deadline: float) -> tuple[Link, list[str]]:
    """Take part in the roll call; return the link and the ranks' hosts.

    Raises:
        RendezvousError: the hub refuses this rank, or has given up.
        EOFError, OSError: it is not there, or gone before it was complete.
    """
    link = connect(place, max(0.001, deadline - time.monotonic()))
    try:
        nonce = secrets.token_hex(16)
        challenge = link.expect(deadline - time.monotonic())["challenge"]
        me = {"rank": world.rank, "size": world.size, "host": world.host}
        link.send({**me, "proof": proof(key, challenge), "challenge": nonce})
        answer = link.expect(deadline - time.monotonic() + _ANSWER_S)
        if answer.get("proof") != proof(key, nonce):
            raise EOFError("it does not know this job's key")
        link.trusted = True
        answer = link.expect(deadline - time.monotonic() + _ANSWER_S)
        if "refused" in answer:
            raise _refused(world, answer["refused"])
        hosts: list[str] = answer["hosts"]
    except BaseException:
        link.close()
        raise
    return link, hosts


def _close_unless_forked(link: Link, owner: int) -> None:
    # A forked child has the same connection: ending it would end the parent's.
    if os.getpid() == owner:
        link.close()


def _refused(world: World, why: str) -> RendezvousError:
    return RendezvousError(f"rendezvous: {why} [rank {world.rank}].")


def _watch(reference: weakref.ref[Monitor], link: Link) -> None:
    """Listen to the hub until it or this rank goes; holds no monitor alive."""
    while True:
        try:
            messages = link.receive()
        except (EOFError, OSError, ValueError):
            monitor = reference()
            if monitor is not None:
                monitor._hub_gone()
            return
        monitor = reference()
        if monitor is None:
            link.close()
            return
        for message in messages:
            monitor._hear(message)
        del monitor
